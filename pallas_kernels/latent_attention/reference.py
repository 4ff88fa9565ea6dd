"""Attention over latents as its definition reads: gather every page, then one float32 softmax."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_pages import KeyPool, ValuePool, plain
from kvjax.pallas_kernels.page_walk import finite
from kvjax.pallas_kernels.ragged_paged_attention.rows import query_rows


def latent_attention_reference(
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

    The yardstick of the other implementations: obvious, not fast. It materialises every page of
    every table ([B, M, P, Dc], float32).

    Args:
        q_latent: [B, H, Dc].
        q_rope: [B, H, Dr].
        latents: [N, 1, P, Dc].
        ropes: [N, 1, P, Dr].
        block_tables: int32 [B, M].
        lengths: int32 [B], tokens.
        scale: factor of the scores.
        page_stats: whether to return page statistics.

    Returns:
        The `AttentionOutput`, T = B.
    """
    num_pages, _, page_size, _ = latents.shape
    batch, width = block_tables.shape
    slot = jnp.arange(width * page_size, dtype=jnp.int32)
    seen = (slot[None] < lengths[:, None]).reshape(batch, width, page_size)
    pages = jnp.minimum(block_tables, num_pages - 1)  # unused entries name no page, and are hidden
    return _attend(q_latent, q_rope, plain(latents), plain(ropes), pages, seen, scale, page_stats)


def ragged_latent_attention_reference(
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
    """Attend a ragged batch, each query as a decode of its own.

    Args:
        q_latent: [T, H, Dc].
        q_rope: [T, H, Dr].
        latents: [N, 1, P, Dc].
        ropes: [N, 1, P, Dr].
        block_tables: int32 [B, M].
        kv_lengths: int32 [B], tokens.
        cu_q_lengths: int32 [B + 1], where each sequence's queries start.
        scale: factor of the scores.
        page_stats: whether to return page statistics.
        residual: newest tokens that a query does not see here, or None.

    Returns:
        The `AttentionOutput`, T = q_latent.shape[0].
    """
    rows = query_rows(kv_lengths, cu_q_lengths, q_latent.shape[0])
    return latent_attention_reference(
        q_latent,
        q_rope,
        latents,
        ropes,
        block_tables[rows.sequence],
        rows.seen(residual, latents.shape[2]),
        scale=scale,
        page_stats=page_stats,
    )


def sparse_latent_attention_reference(
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
    """Attend each query to what it lists.

    Args:
        q_latent: [B, H, Dc].
        q_rope: [B, H, Dr].
        latents: [N, 1, P, Dc].
        ropes: [N, 1, P, Dr].
        page_ids: int32 [B, 1, K], all from 0 to N - 1.
        page_tokens: int32 [B, 1, K], from 0 to P; 0 where there is no page.
        chosen: bool [B, 1, K, P], which of these tokens count, or None.
        scale: factor of the scores.
        page_stats: whether to return page statistics.

    Returns:
        The `AttentionOutput`, T = B.
    """
    slot = jnp.arange(latents.shape[2], dtype=jnp.int32)
    seen = slot[None, None] < page_tokens[:, 0, :, None]
    seen = seen if chosen is None else seen & chosen[:, 0]
    pages = page_ids[:, 0]
    return _attend(q_latent, q_rope, plain(latents), plain(ropes), pages, seen, scale, page_stats)


def _attend(
    q_latent: Float[Array, "B H Dc"],
    q_rope: Float[Array, "B H Dr"],
    latents: Float[Array, "N 1 P Dc"],
    ropes: Float[Array, "N 1 P Dr"],
    pages: Int32[Array, "B M"],
    seen: Bool[Array, "B M P"],
    scale: float,
    page_stats: bool,
) -> AttentionOutput:
    """Attend each row to the slots of its pages that it sees."""
    f32, highest = jnp.float32, jax.lax.Precision.HIGHEST
    # Hidden slots become 0 before any product, because 0 * NaN is NaN.
    c, r = (
        jnp.where(seen[..., None], pool[pages, 0].astype(f32), 0.0) for pool in (latents, ropes)
    )
    scores = jnp.einsum("bhd,bmpd->bhmp", q_latent.astype(f32), c, precision=highest)
    scores += jnp.einsum("bhd,bmpd->bhmp", q_rope.astype(f32), r, precision=highest)
    scores = jnp.where(seen[:, None], scale * scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=(2, 3))
    weights = jnp.exp(scores - finite(lse)[..., None, None])
    out = jnp.einsum("bhmp,bmpd->bhd", weights, c, precision=highest).astype(q_latent.dtype)
    if not page_stats:
        return AttentionOutput(out, lse)
    page_max = scores.max(axis=3)
    page_sum = jnp.exp(scores - finite(page_max)[..., None]).sum(axis=3)
    return AttentionOutput(out, lse, page_max, page_sum)
