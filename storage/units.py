"""Names of units: what one read brings, as rows of four numbers and as one integer.

A unit is a group of layers x a group of KV heads x one page x (K and V, or one of them) of one
stored segment. A row `[layer group, head group, kind, page]` names it within its segment; packed
together with the segment's number it is one integer, which dictionaries and heaps take without a
tuple.
"""

from typing import Any

import numpy as np

UnitId = int
"""A unit of any segment: the segment's number and its row, packed into 63 bits."""

_FIELDS = (("layer group", 10), ("head group", 10), ("kind", 1), ("page", 22))  # name, bits
_SHIFTS = (33, 23, 22, 0)
_WEIGHTS = np.array([1 << shift for shift in _SHIFTS])
_LIMITS = np.array([1 << bits for _, bits in _FIELDS], np.int64)
_SEGMENT_SHIFT = 43

MAX_SEGMENTS = 1 << (63 - _SEGMENT_SHIFT)
"""How many segments one process can tell apart."""


def pack_units(segment: int, units: np.ndarray) -> np.ndarray:
    """One integer a unit.

    Args:
      segment: the segment's number, below `MAX_SEGMENTS`.
      units: integers [n, 4]: layer group, head group, kind and page of each unit.

    Returns:
      int64 [n].

    Raises:
      ValueError: `units` has another shape or dtype, or a number out of range.
    """
    units = np.asarray(units)
    if units.ndim != 2 or units.shape[1] != len(_FIELDS) or units.dtype.kind not in "iu":
        raise ValueError(
            f"units is {units.dtype}{list(units.shape)}; give integers [n, 4]: "
            "layer group, head group, kind, page"
        )
    wide = units.astype(np.int64)
    wrong = (wide < 0) | (wide >= _LIMITS)
    if wrong.any():
        row, field = np.argwhere(wrong)[0]
        name, bits = _FIELDS[field]
        raise ValueError(
            f"units[{row}] names {name} {units[row, field]}; allowed: 0 to {(1 << bits) - 1}"
        )
    packed: np.ndarray = wide @ _WEIGHTS + (segment << _SEGMENT_SHIFT)
    return packed


def unpack_units(ids: np.ndarray | list[UnitId]) -> np.ndarray:
    """The rows of packed units, without their segment: int32 [n, 4]."""
    packed = np.asarray(ids, np.int64).reshape(-1, 1)
    rows: np.ndarray[Any, Any] = (packed >> np.array(_SHIFTS)) & (_LIMITS - 1)
    return rows.astype(np.int32)
