"""The merge as its definition reads: a softmax over the parts, for every row."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.pallas_kernels.output import AttentionOutput


def merge_attention_reference(
    out: Float[Array, "n rows D"], lse: Float[Array, "n rows"]
) -> AttentionOutput:
    """Merge parts; the contract is that of `merge_attention`.

    Args:
        out: [n, rows, D].
        lse: float32 [n, rows].

    Returns:
        The `AttentionOutput` of the rows.
    """
    empty = jnp.isneginf(lse)
    weights = jnp.where(empty, 0.0, jax.nn.softmax(lse, axis=0))
    values = jnp.where(empty[..., None], 0.0, out.astype(jnp.float32))
    mixed = (weights[..., None] * values).sum(axis=0)
    return AttentionOutput(mixed.astype(out.dtype), jax.nn.logsumexp(lse, axis=0))
