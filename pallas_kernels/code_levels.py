"""The numbers that codes and scales stand for, in operations that every kernel has.

Not all machines convert float8, and bytes, unlike float8, go through every operation: kernels read
8-bit floats as the bytes they are.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from kvjax.pallas_kernels.packed_bits import float8_values

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def code_levels(codes: Any, kind: str, centre: float) -> Any:
    """Codes as numbers, before scale and middle.

    Args:
        codes: int32 of any shape; of float8 the bytes, 0 to 255.
        kind: the codes' dtype.
        centre: what is taken off integers; 0 for floats.

    Returns:
        float32 of that shape.
    """
    if kind in FLOAT8:
        return _of_bits(codes, kind)
    level = codes.astype(jnp.float32)
    return level - centre if centre else level


def factor_values(factors: Any) -> Any:
    """Scales or middles in float32."""
    kind = factors.dtype.name
    if kind in FLOAT8:
        return _of_bits(lax.bitcast_convert_type(factors, jnp.uint8).astype(jnp.int32), kind)
    return factors.astype(jnp.float32)


def _of_bits(bits: Any, kind: str) -> Any:
    if kind == "float8_e4m3fn":
        return float8_values(bits)
    # The upper bytes of float16 numbers: the exponent's bias is 15; of float32's, 127.
    magnitude = bits & 127
    fraction = (magnitude & 3).astype(jnp.float32)
    normal = lax.bitcast_convert_type((magnitude << 21) + (112 << 23), jnp.float32)
    value = jnp.where(magnitude < 4, fraction * 2.0**-16, normal)
    value = jnp.where(magnitude == 124, jnp.inf, value)
    value = jnp.where(magnitude > 124, jnp.nan, value)
    return jnp.where(bits > 127, -value, value)
