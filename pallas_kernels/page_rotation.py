"""The rotary embedding of whole pages, each from its own position on."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32


def rotated_pages(
    pages: Float32[Array, "N Hkv P D"],
    position: Int32[Array, "N heads 1"],
    frequencies: Float32[Array, " half"],
    sharpen: float,
    *,
    back: bool = False,
) -> Float32[Array, "N Hkv P D"]:
    """Pages with the rotation of their tokens' positions, or without the one that they have.

    Pair (i, i + D / 2) turns by position times frequency i. Cosines and sines are of a page's first
    position and of a token's place in its page, and added by theorem: D numbers a page, not P * D.

    Args:
      pages: float32 [N, Hkv, P, D].
      position: int32 [N, Hkv or 1, 1], of each page's first token, logical.
      frequencies: float32 [D / 2], radians a token.
      sharpen: what the rotary embedding multiplies keys by, 1 but under yarn.
      back: whether to undo a rotation.
    """
    turn = frequencies[None, None, None, :]
    place = jnp.arange(pages.shape[2], dtype=jnp.int32).astype(jnp.float32)
    first = position.astype(jnp.float32)[..., None] * turn  # [N, heads, 1, half]
    later = place[None, None, :, None] * turn  # [1, 1, P, half]
    tables = [function(angle) for angle in (first, later) for function in (jnp.cos, jnp.sin)]
    # Fused into what uses them, cosines are computed once an element: five times slower on a CPU.
    pages, (cos_first, sin_first, cos_later, sin_later) = lax.optimization_barrier((pages, tables))
    factor = 1 / sharpen if back else sharpen
    cosine = (cos_first * cos_later - sin_first * sin_later) * factor
    sine = (sin_first * cos_later + cos_first * sin_later) * (-factor if back else factor)
    one, other = jnp.split(pages, 2, axis=3)
    return jnp.concatenate([one * cosine - other * sine, other * cosine + one * sine], axis=3)
