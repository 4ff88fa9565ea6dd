"""Codes that have arrived in VMEM, unpacked to the elements they stand for."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from kvjax.pallas_kernels.code_levels import FLOAT8, code_levels
from kvjax.pallas_kernels.mosaic.work import Scalar
from kvjax.pallas_kernels.packed_bits import PLANES


class Coding(NamedTuple):
    """How a block of codes is read: what is static of a packed pool.

    Attributes:
        bits: of a code.
        kind: the codes' dtype, by name.
        centre: what is taken off an integer code.
        by_channel: for the scale, and the middle if there is one, `Factor.by_channel`.
    """

    bits: int
    kind: str
    centre: float
    by_channel: tuple[bool, ...]

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
        factors: [2, Hkv, ...] each, the scale and, if there is one, the middle.
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
            scale, *middle = (
                _spread(factor[buffer, head].astype(jnp.float32), slots, dim, by_channel)
                for factor, by_channel in zip(self.factors, self.coding.by_channel, strict=True)
            )
            value = _grouped(levels, scale) * scale
            if middle:
                value = _grouped(value, middle[0]) + middle[0]
            value = value.reshape(pages, page_size, dim)
            self.elements[0, head] = value.astype(self.elements.dtype)

        lax.fori_loop(0, heads, per_head, None)


def _grouped(values: Array, factor: Array) -> Array:
    """Values [..., D] of all slots, in the groups of slots that share the factor's rows."""
    return values.reshape(factor.shape[0], -1, values.shape[-1])


def _spread(factor: Array, slots: int, dim: int, by_channel: bool) -> Array:
    """A factor as [groups, 1 or slots / groups, D or 1], which multiplies grouped values."""
    if by_channel:
        return factor[:, None, :]
    columns = factor.shape[0]
    by_slot = factor.T
    if columns == 1:
        return by_slot[None]
    lane = lax.broadcasted_iota(jnp.int32, (slots, dim), 1)
    spread = by_slot[:, :1]
    for column in range(1, columns):
        # Not a product with 0 and 1: what is not finite stays in its group.
        spread = jnp.where(
            lane < column * (dim // columns), spread, by_slot[:, column : column + 1]
        )
    return spread[None]
