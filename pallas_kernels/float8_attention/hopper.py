"""How Hopper's float8 tensor cores add, in software: to see what it does where it is not had."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

STEP = 32
"""Products that one instruction adds to its accumulator."""

FRACTION_BITS = 13
"""Bits that a sum keeps below the leading one of its largest part; float32 has 23."""

LEAST_NORMAL = 2.0**-6
"""The smallest float8_e4m3fn with a leading one; those below have its exponent."""


def add_products(
    sums: Float32[Array, "*heads G Dv"],
    weights: Float32[Array, "*heads G T"],
    values: Float32[Array, "*heads T Dv"],
) -> Float32[Array, "*heads G Dv"]:
    """Add weights @ values to sums, as a chain of wgmma instructions on an H100 would.

    An instruction takes 32 exact products and the sum so far, shifts all of them to the largest
    exponent among them, cuts off what then lies below 13 bits after the point, adds, and cuts the
    result to 13 bits (MMA-Sim, arXiv:2511.10909: bit by bit what an H100 returns; "around 14 bits"
    in DeepSeek-V3, arXiv:2412.19437, section 3.3.2; "FP22" in SageAttention2, arXiv:2411.10958).
    So a product below 2**-13 of the sum so far is lost, and every cut is towards 0.

    Args:
        sums: float32 [..., G, Dv].
        weights: float32 [..., G, T], each a float8_e4m3fn.
        values: float32 [..., T, Dv], each a float8_e4m3fn.
    """
    missing = -weights.shape[-1] % STEP
    kept = [(0, 0)] * (weights.ndim - 1)
    weights = jnp.pad(weights, [*kept, (0, missing)])
    values = jnp.pad(values, [*kept[1:], (0, missing), (0, 0)])
    for start in range(0, weights.shape[-1], STEP):
        step = slice(start, start + STEP)
        sums = _add_one_step(sums, weights[..., step], values[..., step, :])
    return sums


def _add_one_step(sums: Array, weights: Array, values: Array) -> Array:
    products = weights[..., None] * values[..., None, :, :]
    # The exponents of factors count, not that of the product, whose significand may reach 4.
    powers = _power(weights)[..., None] * _power(values)[..., None, :, :]
    powers = jnp.where(products == 0.0, 0.0, powers)
    most = jnp.maximum(jnp.max(powers, axis=-2), _leading_power(sums))
    shift = jnp.where(most == 0.0, 0.0, 2.0**FRACTION_BITS / most)
    total = jnp.trunc(products * shift[..., None, :]).sum(axis=-2) + jnp.trunc(sums * shift)
    return _cut(total * (most * 2.0**-FRACTION_BITS))


def _power(x: Array) -> Array:
    """The power of two that a float8_e4m3fn's exponent stands for."""
    return jnp.maximum(_leading_power(x), LEAST_NORMAL)


def _leading_power(x: Array) -> Array:
    """The largest power of two up to |x|; 0 for 0."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)


def _cut(x: Array) -> Array:
    """Float32 without the bits that its accumulator does not have."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type(bits & -(2 ** (23 - FRACTION_BITS)), jnp.float32)
