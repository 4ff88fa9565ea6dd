"""Scales and middles of groups, as they are kept beside codes."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from kvjax.pallas_kernels.packed_bits import float8_values

LEAST = 1e-30
"""Magnitudes below this count as 0: their scale could not be told from it."""


def kept(
    values: Float32[Array, "N Hkv Pt Dc"], dtype: str, *, up: bool
) -> tuple[Float[Array, "N Hkv Pt Dc"], Float32[Array, "N Hkv 1 1"] | None]:
    """Values as they are kept, and what they are then multiplied by.

    Args:
      values: of a page's head, finite.
      dtype: "float32", "bfloat16", "float16" or "float8_e4m3fn"; float8 ones have a unit, a power
        of two, a page's head.
      up: whether to round towards plus infinity; then they are 0 or more.
    """
    if dtype == "float8_e4m3fn":
        return to_float8(values, up=up)
    if dtype == "float32":
        return values, None
    most = float(jnp.finfo(dtype).max)
    nearest = jnp.clip(values, -most, most).astype(dtype)
    if up:
        bits = lax.bitcast_convert_type(nearest, jnp.uint16)
        following = lax.bitcast_convert_type(bits + jnp.uint16(1), nearest.dtype)
        nearest = jnp.where(nearest.astype(jnp.float32) < values, following, nearest)
        nearest = jnp.where(jnp.isfinite(nearest), nearest, jnp.finfo(nearest.dtype).max)
    return nearest, None


def to_float8(
    values: Float32[Array, "N Hkv Pt Dc"], *, up: bool
) -> tuple[Float[Array, "N Hkv Pt Dc"], Float32[Array, "N Hkv 1 1"]]:
    """Values as float8_e4m3fn times one power of two a page's head.

    Args:
      values: what to keep.
      up: whether to round towards plus infinity.
    """
    greatest = jnp.max(jnp.abs(values), axis=(2, 3), keepdims=True)
    # With numbers as integers: XLA's own conversions to float8 take long to compile on a CPU.
    exponent = lax.bitcast_convert_type(jnp.maximum(greatest, LEAST), jnp.int32) >> 23
    # A power of two by which the greatest is from 128 on and below 256.
    unit = lax.bitcast_convert_type((exponent - 7) << 23, jnp.float32)
    quotient = values / unit
    magnitude = jnp.abs(quotient)
    bits = lax.bitcast_convert_type(magnitude, jnp.int32)
    half = 2**19 - 1 + ((bits >> 20) & 1)  # ties go to even codes
    normal = ((bits + (2**20 - 1 if up else half)) >> 20) - (120 << 3)
    small = magnitude * 512
    small = (jnp.ceil(small) if up else jnp.round(small)).astype(jnp.int32)
    code = jnp.where(magnitude < 2.0**-6, small, normal)
    code = code | jnp.where(quotient < 0, 128, 0)
    return lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.float8_e4m3fn), unit


def real(stored: Array, unit: Array | None) -> Float32[Array, "N Hkv Pt Dc"]:
    """The numbers that stored ones stand for."""
    if stored.dtype == jnp.float8_e4m3fn:
        code = lax.bitcast_convert_type(stored, jnp.uint8).astype(jnp.int32)
        value: Array = float8_values(code)
    else:
        value = stored.astype(jnp.float32)
    return value if unit is None else value * unit


def units(scale: Array | None, middle: Array | None) -> Array | None:
    """The units of scales and middles, as pages keep them: bfloat16 [N, Hkv, 1, 2]."""
    if scale is None:
        return None
    other = scale if middle is None else middle
    return jnp.concatenate([scale, other], axis=-1).astype(jnp.bfloat16)
