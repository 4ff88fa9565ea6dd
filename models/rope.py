"""Rotary position embedding (arXiv:2104.09864) with the stretchings of long-context models."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from kvjax.models.config import LayerConfig, RopeScaling


def frequencies(layer: LayerConfig) -> tuple[Float32[np.ndarray, " half"], float]:
    """One layer's rotary frequencies.

    Returns:
        Radians a token for each of rope_dim / 2 pairs, and the factor cosines and sines are
        multiplied by (1 except under yarn, where it sharpens attention).
    """
    half = layer.rope_dim // 2
    plain = layer.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    scaling = layer.rope_scaling
    if scaling is None:
        return plain.astype(np.float32), 1.0
    match scaling.kind:
        case "linear":
            stretched, sharpen = plain / scaling.factor, 1.0
        case "factors":
            stretched, sharpen = plain / np.asarray(scaling.factors, np.float64), 1.0
        case "llama3":
            stretched, sharpen = _llama3(plain, scaling), 1.0
        case "yarn":
            stretched, sharpen = _yarn(plain, scaling, layer), _yarn_sharpening(scaling)
    return stretched.astype(np.float32), sharpen


def _llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    turns = scaling.original_context * plain / (2 * math.pi)  # within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep: np.ndarray = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(keep * plain + (1 - keep) * plain / scaling.factor)


def _yarn(plain: np.ndarray, scaling: RopeScaling, layer: LayerConfig) -> np.ndarray:
    def dimension(rotations: float) -> float:
        ratio = scaling.original_context / (rotations * 2 * math.pi)
        return layer.rope_dim * math.log(ratio) / (2 * math.log(layer.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, layer.rope_dim - 1)
    if low == high:
        high += 0.001  # as every implementation does: a step instead of a division by zero
    interpolate = np.clip((np.arange(plain.size) - low) / (high - low), 0.0, 1.0)
    return np.asarray((1 - interpolate) * plain + interpolate * plain / scaling.factor)


def _yarn_sharpening(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def rotations(
    layer: LayerConfig, positions: Int32[Array, " T"]
) -> tuple[Float32[Array, "T half"], Float32[Array, "T half"]]:
    """Cosines and sines of every pair's angle at logical positions (tokens)."""
    radians, sharpen = frequencies(layer)
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(radians)[None, :]
    return jnp.cos(angles) * sharpen, jnp.sin(angles) * sharpen


def rotate(
    heads: Float[Array, "T H D"],
    cosines: Float32[Array, "T half"],
    sines: Float32[Array, "T half"],
) -> Float[Array, "T H D"]:
    """Turns pair (i, i + D/2) of every head by its angle; the halves are not interleaved."""
    first, second = jnp.split(heads, 2, axis=-1)
    cos, sin = cosines[:, None, :], sines[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def unrotated(
    heads: Float[Array, "T H D"], layer: LayerConfig, positions: Int32[Array, " T"]
) -> Float[Array, "T H D"]:
    """Heads as they were before `rotate` by a layer's `rotations` at these positions."""
    cosines, sines = rotations(layer, positions)
    _, sharpen = frequencies(layer)
    # Turned by the opposite angle; what sharpens comes out squared.
    return rotate(heads, cosines, -sines) / (sharpen * sharpen)


def halves(heads: Float[Array, "T H D"]) -> Float[Array, "T H D"]:
    """Interleaved pairs (2i, 2i + 1) as `rotate` takes them, (i, i + D/2)."""
    return jnp.concatenate([heads[..., 0::2], heads[..., 1::2]], axis=-1)
