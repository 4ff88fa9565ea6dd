"""Codes that have arrived in VMEM, unpacked to the elements they stand for."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float32

from kvjax.pallas_kernels.code_levels import FLOAT8, code_levels, factor_values
from kvjax.pallas_kernels.mosaic.work import Scalar
from kvjax.pallas_kernels.packed_bits import PLANES

Spread = Literal["page", "channel", "slot"]
"""How a scale or a middle lies: a row of channels a page, copied as pages are; a row of channels
for some slots of a block (`Factor.by_channel`); or a row of slots for some channels."""


class Coding(NamedTuple):
    """How a block of codes is read: what is static of a packed pool.

    Attributes:
        bits: of a code.
        kind: the codes' dtype, by name.
        centre: what is taken off an integer code.
        spread: for the scale, and the middle if there is one, how it lies.
        has_unit: whether both have units, one more factor, by slot.
    """

    bits: int
    kind: str
    centre: float
    spread: tuple[Spread, ...]
    has_unit: bool

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits of a code that each plane holds, low bits first."""
        return (8,) if self.bits == 8 else tuple(PLANES[self.bits].values())

    def levels(self, planes: Sequence[Array]) -> Float32[Array, "pages P D"]:
        """Codes as numbers, before scale and middle.

        Args:
            planes: [pages, rows, D], one array a plane.
        """
        code, below = None, 0
        for plane, width in zip(planes, self.widths, strict=True):
            if self.kind in FLOAT8:
                plane = lax.bitcast_convert_type(plane, jnp.uint8)
            whole = plane.astype(jnp.int32)
            fields = [whole]
            if width < 8:
                mask = 2**width - 1
                fields = [((whole >> shift) & mask) << below for shift in range(0, 8, width)]
            field = fields[0] if width == 8 else jnp.concatenate(fields, axis=1)
            code = field if code is None else code | field
            below += width
        levels: Array = code_levels(code, self.kind, self.centre)
        return levels


class Unpacker(NamedTuple):
    """Refs in VMEM of one packed pool's double buffer, and where its elements go.

    Attributes:
        coding: how codes are read.
        planes: [2, Hkv, pages, rows, D] each.
        rows: [2, pages, Hkv, D] each: the scale and the middle, if they are by page.
        factors: [2, Hkv, ...] each: those that are not; the units, if there are any.
        wide_rows: [pages, Hkv, D] each, float32: a head's rows of these can be told apart.
        elements: [1, Hkv, pages, P, D], in the queries' dtype: in bfloat16 an element is rounded
            once, as it would be in a plain pool.
    """

    coding: Coding
    planes: tuple[Any, ...]
    rows: tuple[Any, ...]
    factors: tuple[Any, ...]
    wide_rows: tuple[Any, ...]
    elements: Any

    def unpack(self, buffer: Scalar) -> None:
        """Unpack the block that lies in `buffer`, whatever the slots that nothing fills hold."""
        _, heads, pages, page_size, dim = self.elements.shape
        slots = pages * page_size
        for row, wide in zip(self.rows, self.wide_rows, strict=True):
            wide[...] = factor_values(row[buffer])

        def per_head(head: Scalar, _: None) -> None:
            levels = self.coding.levels([plane[buffer, head] for plane in self.planes])
            value = levels.reshape(slots, dim)
            rows = [wide[:, pl.ds(head, 1)] for wide in self.wide_rows]
            factors = [factor_values(factor[buffer, head]) for factor in self.factors]
            units = factors.pop().T if self.coding.has_unit else None
            for which, spread in enumerate(self.coding.spread):
                if spread == "slot":
                    factor = factors.pop(0).T
                else:
                    factor = rows.pop(0) if spread == "page" else factors.pop(0)[:, None, :]
                unit = None if units is None else units[:, which : which + 1]
                value = _apply(value, factor, unit, add=which == 1)
            self.elements[0, head] = value.astype(self.elements.dtype).reshape(
                pages, page_size, dim
            )

        lax.fori_loop(0, heads, per_head, None)


def _apply(values: Array, factor: Array, unit: Array | None, *, add: bool) -> Array:
    """Multiply the elements of a block by a factor, or add it.

    Args:
        values: float32 [slots, D].
        factor: float32, [slots, columns] or, by channel, [rows, 1, D].
        unit: float32 [slots, 1], or None.
        add: whether to add.
    """
    slots, dim = values.shape
    if factor.ndim == 3:
        rows = factor.shape[0]
        whole = jnp.broadcast_to(factor, (rows, slots // rows, dim)).reshape(slots, dim)
        whole = whole if unit is None else whole * unit
    else:
        whole = _over_channels(factor if unit is None else factor * unit, dim)
    return values + whole if add else values * whole


def _over_channels(by_slot: Array, dim: int) -> Array:
    """[slots, columns] as [slots, D], or [slots, 1] where all channels share it."""
    slots, columns = by_slot.shape
    if columns == 1:
        return by_slot
    lane = lax.broadcasted_iota(jnp.int32, (slots, dim), 1)
    spread = jnp.broadcast_to(by_slot[:, :1], (slots, dim))
    for column in range(1, columns):
        # Not a product with 0 and 1: what is not finite stays in its group.
        first = column * (dim // columns)
        spread = jnp.where(lane < first, spread, by_slot[:, column : column + 1])
    return spread
