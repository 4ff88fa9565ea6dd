"""The merge in plain XLA: one pass that it fuses with what makes the parts."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.page_walk import finite


def merge_attention_xla(
    out: Float[Array, "n *rows D"], lse: Float[Array, "n *rows"]
) -> AttentionOutput:
    """Merge parts; the contract is that of `merge_attention`.

    Args:
        out: [n, ..., D].
        lse: float32 [n, ...].

    Returns:
        The `AttentionOutput`, `out` in out's dtype.
    """
    top = finite(lse.max(axis=0))
    weights = jnp.exp(lse - top[None])
    total = weights.sum(axis=0)
    share = weights / jnp.where(total == 0.0, 1.0, total)[None]
    values = jnp.where(jnp.isneginf(lse)[..., None], 0.0, out.astype(jnp.float32))
    mixed = (share[..., None] * values).sum(axis=0)
    # log 0 is the -inf of a row that no part has keys for
    return AttentionOutput(mixed.astype(out.dtype), top + jnp.log(total))


def add_sink(result: AttentionOutput, sink_logits: Float[Array, "Hq"]) -> AttentionOutput:
    """Let one logit a head, without a value, join a softmax that is already normalized.

    Args:
        result: attention without sinks, `out` [T, Hq, Dv] in float32.
        sink_logits: [Hq].

    Returns:
        The same with the sink in the denominator, and in `lse`.
    """
    sinks = jnp.broadcast_to(sink_logits.astype(jnp.float32)[None, :], result.lse.shape)
    out = jnp.stack([result.out, jnp.zeros_like(result.out)])
    merged = merge_attention_xla(out, jnp.stack([result.lse, sinks]))
    return result._replace(out=merged.out, lse=merged.lse)
