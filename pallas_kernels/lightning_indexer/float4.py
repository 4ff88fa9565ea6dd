"""Index keys of 4 bits: e2m1 floats, of which two tokens of a page share a byte."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt8

FLOAT4_LARGEST = 6.0

# Halfway between neighbours of 0, 1/2, 1, 3/2, 2, 3, 4 and 6.
_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def float4_codes(values: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """The nearest float4_e2m1fn numbers, sign and all, as integers from 0 to 15.

    Args:
        values: of any shape, from -6 to 6; what is larger becomes 6.
    """
    magnitude = jnp.abs(values)
    code = jnp.zeros(values.shape, jnp.uint8)
    for bound in _BOUNDS:
        code += (magnitude > bound).astype(jnp.uint8)
    return code | ((values < 0).astype(jnp.uint8) << 3)


def float4_values(codes: Int32[Array, "..."]) -> Float32[Array, "..."]:
    """The numbers that float4_e2m1fn codes stand for, in operations that every kernel has.

    Args:
        codes: int32, 0 to 15, any shape.
    """
    magnitude = (codes & 7).astype(jnp.float32)
    upper = jnp.where(magnitude < 6, magnitude - 2, 2 * magnitude - 8)
    value = jnp.where(magnitude < 5, 0.5 * magnitude, upper)
    return jnp.where(codes > 7, -value, value)


def float4_page(held: Any, axis: int) -> Float32[Array, "..."]:
    """Unpack pages: the low bits of their rows are the first tokens, the high bits the others.

    Args:
        held: int32 in which `axis` has P / 2 rows, values 0 to 255.
        axis: of the tokens, which become P.
    """
    return jnp.concatenate([float4_values(held & 15), float4_values(held >> 4)], axis=axis)
