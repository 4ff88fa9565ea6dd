"""Scores of pages as their definitions read, in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32


def page_scores_reference(
    q: Float32[Array, "B Hq D"],
    representatives: tuple[Float[Array, "N Hkv D"], ...],
    page_ids: Int32[Array, "B M"],
    page_counts: Int32[Array, "B"],
) -> Float32[Array, "B Hq M"]:
    """Score every entry of the tables for every query head, also those that do not exist.

    The yardstick of the other implementations: obvious, not fast.

    Args:
        q: float32 [B, Hq, D], scaled.
        representatives: `(mean,)` or `(low, high)`, each [N, Hkv, D].
        page_ids: int32 [B, M], all from 0 to N - 1.
        page_counts: int32 [B], not needed here.

    Returns:
        float32 [B, Hq, M].
    """
    group = q.shape[1] // representatives[0].shape[1]
    rows = [jnp.repeat(x[page_ids].astype(jnp.float32), group, axis=2) for x in representatives]
    if len(rows) == 1:
        return jnp.einsum("bhd,bmhd->bhm", q, rows[0], precision=jax.lax.Precision.HIGHEST)
    low, high = rows
    bound = jnp.maximum(q[:, None] * low, q[:, None] * high)
    return bound.sum(axis=3).swapaxes(1, 2)
