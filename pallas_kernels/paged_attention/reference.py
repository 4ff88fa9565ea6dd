"""Paged attention as its definition reads: gather every page, then one float32 softmax."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_pages import KeyPool, ValuePool, plain


def paged_attention_reference(
    q: Float[Array, "B Hq D"],
    k_pages: KeyPool,
    v_pages: ValuePool,
    block_tables: Int32[Array, "B M"],
    lengths: Int32[Array, "B"],
    *,
    scale: float,
    window: int | None,
    sink_tokens: int,
    sink_logits: Float[Array, "Hq"] | None,
    soft_cap: float | None,
    query_positions: Int32[Array, "B"],
    page_stats: bool,
) -> AttentionOutput:
    """Attend one query a sequence to its pages; the contract is that of `paged_attention`.

    The yardstick of the other implementations: obvious, not fast. It materialises every page of
    every table ([B, M, Hkv, P, D], float32).

    Args:
        q: [B, Hq, D].
        k_pages: [N, Hkv, P, D].
        v_pages: [N, Hkv, P, Dv].
        block_tables: int32 [B, M].
        lengths: int32 [B], tokens.
        scale: factor of the scores.
        window: tokens a query sees, itself included, or None.
        sink_tokens: first tokens that stay visible outside the window.
        sink_logits: [Hq] or None.
        soft_cap: bound of the scores, or None.
        query_positions: int32 [B], the position of each query.
        page_stats: whether to return page statistics.

    Returns:
        The `AttentionOutput`, T = B.
    """
    k_pages, v_pages = plain(k_pages), plain(v_pages)
    num_pages, kv_heads, page_size, head_dim = k_pages.shape
    batch, query_heads, _ = q.shape
    width = block_tables.shape[1]
    f32 = jnp.float32

    slot = jnp.arange(width * page_size, dtype=jnp.int32)[None, :]
    position = query_positions[:, None]
    visible = (slot < lengths[:, None]) & (slot <= position)
    if window is not None:
        visible &= (slot > position - window) | (slot < sink_tokens)
    visible = visible.reshape(batch, width, page_size)

    # Unused entries name no page. What they fetch instead is hidden, and so are NaNs in slots that
    # nobody wrote: hidden keys and values become 0 before any product, because 0 * NaN is NaN.
    pages = jnp.minimum(block_tables, num_pages - 1)
    shown = visible[:, :, None, :, None]
    k = jnp.where(shown, k_pages[pages].astype(f32), 0.0)
    v = jnp.where(shown, v_pages[pages].astype(f32), 0.0)

    grouped = q.astype(f32).reshape(batch, kv_heads, query_heads // kv_heads, head_dim)
    highest = jax.lax.Precision.HIGHEST  # a TPU would multiply in bfloat16 otherwise
    scores = scale * jnp.einsum("bkgd,bmkpd->bkgmp", grouped, k, precision=highest)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)

    lse = jax.nn.logsumexp(scores, axis=(3, 4))
    if sink_logits is not None:
        sinks = sink_logits.astype(f32).reshape(1, kv_heads, query_heads // kv_heads)
        lse = jnp.logaddexp(lse, jnp.broadcast_to(sinks, lse.shape))
    weights = jnp.exp(scores - _finite(lse)[..., None, None])
    out = jnp.einsum("bkgmp,bmkpd->bkgd", weights, v, precision=highest)

    page_max = page_sum = None
    if page_stats:
        page_max = scores.max(axis=4)
        page_sum = jnp.exp(scores - _finite(page_max)[..., None]).sum(axis=4)
        page_max = page_max.reshape(batch, query_heads, width)
        page_sum = page_sum.reshape(batch, query_heads, width)
    return AttentionOutput(
        out=out.reshape(batch, query_heads, -1).astype(q.dtype),
        lse=lse.reshape(batch, query_heads),
        page_max=page_max,
        page_sum=page_sum,
    )


def _finite(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Put 0 for -inf: exp(-inf - 0) is the 0 that exp(-inf - -inf), a NaN, stands for."""
    return jnp.where(jnp.isneginf(x), 0.0, x)
