"""Codes that have arrived in VMEM, unpacked to the elements they stand for."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from kvjax.pallas_kernels.code_levels import FLOAT8, code_levels, factor_values
from kvjax.pallas_kernels.mosaic.work import Scalar
from kvjax.pallas_kernels.packed_bits import PLANES


class Coding(NamedTuple):
    """How a block of codes is read: what is static of a packed pool.

    Attributes:
        bits: of a code.
        kind: the codes' dtype, by name.
        centre: what is taken off an integer code.
        by_channel: for the scale, and the middle if there is one, `Factor.by_channel`.
        has_unit: whether both have units, one more factor, by slot.
    """

    bits: int
    kind: str
    centre: float
    by_channel: tuple[bool, ...]
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
        factors: [2, Hkv, ...] each: the scale; the middle, if there is one; the units, likewise.
        elements: [1, Hkv, pages, P, D], in the queries' dtype: in bfloat16 an element is rounded
            once, as it would be in a plain pool.
    """

    coding: Coding
    planes: tuple[Any, ...]
    factors: tuple[Any, ...]
    elements: Any

    def unpack(self, buffer: Scalar) -> None:
        """Unpack the block that lies in `buffer`, whatever the slots that nothing fills hold."""
        _, heads, pages, page_size, dim = self.elements.shape
        slots = pages * page_size

        def per_head(head: Scalar, _: None) -> None:
            levels = self.coding.levels([plane[buffer, head] for plane in self.planes])
            value = levels.reshape(slots, dim)
            factors = [factor_values(factor[buffer, head]) for factor in self.factors]
            units = factors.pop().T if self.coding.has_unit else None
            for which, by_channel in enumerate(self.coding.by_channel):
                unit = None if units is None else units[:, which : which + 1]
                value = _apply(value, factors[which], unit, by_channel, add=which == 1)
            self.elements[0, head] = value.astype(self.elements.dtype).reshape(
                pages, page_size, dim
            )

        lax.fori_loop(0, heads, per_head, None)


def _apply(
    values: Array, factor: Array, unit: Array | None, by_channel: bool, *, add: bool
) -> Array:
    """Multiply the elements of a block by a factor, or add it.

    Args:
        values: float32 [slots, D].
        factor: float32 [rows, D] by channel, else [columns, slots].
        unit: float32 [slots, 1], or None.
        by_channel: which.
        add: whether to add.
    """
    slots, dim = values.shape
    if by_channel:
        rows = factor.shape[0]
        spread = jnp.broadcast_to(factor[:, None, :], (rows, slots // rows, dim))
        spread = spread.reshape(slots, dim)
        spread = spread if unit is None else spread * unit
    else:
        spread = factor.T if unit is None else factor.T * unit
        spread = _over_channels(spread, dim)
    return values + spread if add else values * spread


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
