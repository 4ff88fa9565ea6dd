"""Bounds as two dot products, so that every implementation has only products to do."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def products(
    q: Float[Array, "B Hq D"], representatives: tuple[Float[Array, "N Hkv D"], ...]
) -> list[tuple[Float[Array, "B Hq D"], Float[Array, "N Hkv D"]]]:
    """The queries and the rows whose dot products sum to a score.

    max(q * low, q * high) is q * high where q is positive and q * low where it is not.

    Args:
        q: float32 [B, Hq, D].
        representatives: `(mean,)` or `(low, high)`.

    Returns:
        One pair for means, two for bounds.
    """
    if len(representatives) == 1:
        return [(q, representatives[0])]
    low, high = representatives
    return [(jnp.minimum(q, 0.0), low), (jnp.maximum(q, 0.0), high)]
