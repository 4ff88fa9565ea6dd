"""Scales and middles of groups, as they are kept beside codes."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

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
    _, exponent = jnp.frexp(jnp.maximum(greatest, LEAST))  # greatest < 2 ** exponent
    unit = jnp.exp2((exponent - 8).astype(jnp.float32))  # so that the quotients are below 256
    quotient = values / unit
    rounded = quotient.astype(jnp.float8_e4m3fn)
    if up:
        bits = lax.bitcast_convert_type(rounded, jnp.uint8)
        following = lax.bitcast_convert_type(bits + jnp.uint8(1), jnp.float8_e4m3fn)
        rounded = jnp.where(rounded.astype(jnp.float32) < quotient, following, rounded)
    return rounded, unit


def real(stored: Array, unit: Array | None) -> Float32[Array, "N Hkv Pt Dc"]:
    """The numbers that stored ones stand for."""
    value = stored.astype(jnp.float32)
    return value if unit is None else value * unit


def units(scale: Array | None, middle: Array | None) -> Array | None:
    """The units of scales and middles, as pages keep them: bfloat16 [N, Hkv, 1, 2]."""
    if scale is None:
        return None
    other = scale if middle is None else middle
    return jnp.concatenate([scale, other], axis=-1).astype(jnp.bfloat16)
