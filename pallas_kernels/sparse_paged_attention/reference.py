"""Sparse paged attention as its definition reads, in float32, with no regard for memory."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.pallas_kernels.merge_attention.xla import add_sink
from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_pages import KeyPool, ValuePool, plain
from kvjax.pallas_kernels.page_walk import finite


def sparse_paged_attention_reference(
    q: Float[Array, "B Hq D"],
    k_pages: KeyPool,
    v_pages: ValuePool,
    page_ids: Int32[Array, "B Hkv K"],
    page_tokens: Int32[Array, "B Hkv K"],
    *,
    scale: float,
    sink_logits: Float[Array, "Hq"] | None,
    soft_cap: float | None,
    page_stats: bool,
) -> AttentionOutput:
    """Attend to the listed pages; the contract is that of `sparse_paged_attention`.

    The yardstick of the other implementations: obvious, not fast. It materialises every listed
    page ([B, Hkv, K, P, D], float32).

    Args:
        q: [B, Hq, D].
        k_pages: [N, Hkv, P, D].
        v_pages: [N, Hkv, P, Dv].
        page_ids: int32 [B, Hkv, K], all from 0 to N - 1.
        page_tokens: int32 [B, Hkv, K], from 0 to P; 0 where there is no page.
        scale: factor of the scores.
        sink_logits: [Hq] or None.
        soft_cap: bound of the scores, or None.
        page_stats: whether to return page statistics.

    Returns:
        The `AttentionOutput`, T = B.
    """
    k_pages, v_pages = plain(k_pages), plain(v_pages)
    _, kv_heads, page_size, head_dim = k_pages.shape
    batch, query_heads, _ = q.shape
    width = page_ids.shape[2]
    f32 = jnp.float32

    head = jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
    slot = jnp.arange(page_size, dtype=jnp.int32)
    visible = slot[None, None, None] < page_tokens[..., None]
    # Hidden keys and values become 0 before any product, because 0 * NaN is NaN.
    k = jnp.where(visible[..., None], k_pages[page_ids, head].astype(f32), 0.0)
    v = jnp.where(visible[..., None], v_pages[page_ids, head].astype(f32), 0.0)

    grouped = q.astype(f32).reshape(batch, kv_heads, query_heads // kv_heads, head_dim)
    highest = jax.lax.Precision.HIGHEST  # a TPU would multiply in bfloat16 otherwise
    scores = scale * jnp.einsum("bhgd,bhkpd->bhgkp", grouped, k, precision=highest)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible[:, :, None], scores, -jnp.inf)

    lse = jax.nn.logsumexp(scores, axis=(3, 4))
    weights = jnp.exp(scores - finite(lse)[..., None, None])
    out = jnp.einsum("bhgkp,bhkpd->bhgd", weights, v, precision=highest)
    result = AttentionOutput(
        out=out.reshape(batch, query_heads, -1), lse=lse.reshape(batch, query_heads)
    )
    if sink_logits is not None:
        result = add_sink(result, sink_logits)
    result = result._replace(out=result.out.astype(q.dtype))
    if not page_stats:
        return result
    page_max = scores.max(axis=4)
    page_sum = jnp.exp(scores - finite(page_max)[..., None]).sum(axis=4)
    return result._replace(
        page_max=page_max.reshape(batch, query_heads, width),
        page_sum=page_sum.reshape(batch, query_heads, width),
    )
