"""Attention over latents in plain XLA: the loops of paged attention.

To these, position keys are the keys of one KV head and latents its values, which queries of their
own score too.
"""

from jaxtyping import Array, Bool, Float, Int32

from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_pages import KeyPool, ValuePool
from kvjax.pallas_kernels.paged_attention.xla import paged_attention_xla
from kvjax.pallas_kernels.ragged_paged_attention.xla import ragged_paged_attention_xla
from kvjax.pallas_kernels.sparse_paged_attention.xla import sparse_paged_attention_xla


def latent_attention_xla(
    q_latent: Float[Array, "B H Dc"],
    q_rope: Float[Array, "B H Dr"],
    latents: ValuePool,
    ropes: KeyPool,
    block_tables: Int32[Array, "B M"],
    lengths: Int32[Array, "B"],
    *,
    scale: float,
    page_stats: bool,
) -> AttentionOutput:
    """Attend one query a sequence to its pages; the contract is that of `latent_attention`.

    Args:
        q_latent: [B, H, Dc].
        q_rope: [B, H, Dr].
        latents: [N, 1, P, Dc], plain or packed.
        ropes: [N, 1, P, Dr], plain or packed.
        block_tables: int32 [B, M].
        lengths: int32 [B], tokens.
        scale: factor of the scores.
        page_stats: whether to return page statistics.

    Returns:
        The `AttentionOutput`, T = B.
    """
    return paged_attention_xla(
        q_rope,
        ropes,
        latents,
        block_tables,
        lengths,
        scale=scale,
        window=None,
        sink_tokens=0,
        sink_logits=None,
        soft_cap=None,
        query_positions=lengths - 1,
        page_stats=page_stats,
        value_q=q_latent,
    )


def ragged_latent_attention_xla(
    q_latent: Float[Array, "T H Dc"],
    q_rope: Float[Array, "T H Dr"],
    latents: ValuePool,
    ropes: KeyPool,
    block_tables: Int32[Array, "B M"],
    kv_lengths: Int32[Array, "B"],
    cu_q_lengths: Int32[Array, "B+1"],
    *,
    scale: float,
    page_stats: bool,
    residual: int | None = None,
) -> AttentionOutput:
    """Attend a ragged batch to its pages; the contract is that of `ragged_latent_attention`.

    Args:
        q_latent: [T, H, Dc].
        q_rope: [T, H, Dr].
        latents: [N, 1, P, Dc], plain or packed.
        ropes: [N, 1, P, Dr], plain or packed.
        block_tables: int32 [B, M].
        kv_lengths: int32 [B], tokens.
        cu_q_lengths: int32 [B + 1], where each sequence's queries start.
        scale: factor of the scores.
        page_stats: whether to return page statistics.
        residual: newest tokens that a query does not see here, or None.

    Returns:
        The `AttentionOutput`, T = q_latent.shape[0].
    """
    return ragged_paged_attention_xla(
        q_rope,
        ropes,
        latents,
        block_tables,
        kv_lengths,
        cu_q_lengths,
        scale=scale,
        window=None,
        sink_tokens=0,
        sink_logits=None,
        soft_cap=None,
        page_stats=page_stats,
        residual=residual,
        value_q=q_latent,
    )


def sparse_latent_attention_xla(
    q_latent: Float[Array, "B H Dc"],
    q_rope: Float[Array, "B H Dr"],
    latents: ValuePool,
    ropes: KeyPool,
    page_ids: Int32[Array, "B 1 K"],
    page_tokens: Int32[Array, "B 1 K"],
    chosen: Bool[Array, "B 1 K P"] | None,
    *,
    scale: float,
    page_stats: bool,
) -> AttentionOutput:
    """Attend each query to what it lists; the contract is that of `sparse_latent_attention`.

    Args:
        q_latent: [B, H, Dc].
        q_rope: [B, H, Dr].
        latents: [N, 1, P, Dc], plain or packed.
        ropes: [N, 1, P, Dr], plain or packed.
        page_ids: int32 [B, 1, K], all from 0 to N - 1.
        page_tokens: int32 [B, 1, K], from 0 to P; 0 where there is no page.
        chosen: bool [B, 1, K, P], which of these tokens count, or None.
        scale: factor of the scores.
        page_stats: whether to return page statistics.

    Returns:
        The `AttentionOutput`, T = B.
    """
    return sparse_paged_attention_xla(
        q_rope,
        ropes,
        latents,
        page_ids,
        page_tokens,
        scale=scale,
        sink_logits=None,
        soft_cap=None,
        page_stats=page_stats,
        value_q=q_latent,
        chosen=chosen,
    )
