"""The public function of paged decode attention, and its contract."""

from importlib import import_module

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_pages import KeyPool, PackedPages, ValuePool, as_pool
from kvjax.pallas_kernels.support import Implementation, choose
from kvjax.pallas_kernels.validate import check_arrays, check_options


def paged_attention(
    q: Float[Array, "B Hq D"],
    k_pages: KeyPool,
    v_pages: ValuePool,
    block_tables: Int32[Array, "B M"],
    lengths: Int32[Array, "B"],
    *,
    scale: float | None = None,
    window: int | None = None,
    sink_tokens: int = 0,
    sink_logits: Float[Array, "Hq"] | None = None,
    soft_cap: float | None = None,
    query_positions: Int32[Array, "B"] | None = None,
    page_stats: bool = False,
    implementation: Implementation | None = None,
) -> AttentionOutput:
    """Attend one query a sequence to the sequence's pages.

    Row b reads slots 0 .. lengths[b] - 1 of the pages block_tables[b] names, slot s being entry
    s % P of page block_tables[b, s // P] (PagedAttention, arXiv:2309.06180, section 4.1). Slot s
    is visible if s < lengths[b], s <= query_positions[b] and, with a window, either
    s > query_positions[b] - window or s < sink_tokens. Nothing else in the pool has any effect,
    whatever it holds. Query head h uses KV head h // (Hq // Hkv). All arithmetic is float32.

    Args:
        q: [B, Hq, D], float32, bfloat16 or float16, position encoding already applied.
        k_pages: [N, Hkv, P, D], float32, bfloat16 or float16, or packed; P from 8 to 128 tokens.
        v_pages: [N, Hkv, P, Dv], the keys' dtype, or packed; Dv may differ from D. If one is packed
            so is the other; they are unpacked block by block, nowhere in full.
        block_tables: int32 [B, M], page ids; unused entries hold N (or anything else from 0 up).
        lengths: int32 [B], cached tokens a sequence; 0 gives out 0.
        scale: factor of the scores; None means D ** -0.5.
        window: how many of the newest positions are visible, in tokens, the query's own included
            (Mistral 7B, arXiv:2310.06825, section 2); None means all.
        sink_tokens: how many of the first tokens stay visible outside the window (StreamingLLM,
            arXiv:2309.17453, section 3.2); without a window they are visible anyway.
        sink_logits: [Hq], one logit a head that joins the softmax's denominator, and `lse`,
            without a value (gpt-oss model card, arXiv:2508.10925, section 2.2).
        soft_cap: c in c * tanh(score / c) (Gemma 2, arXiv:2408.00118, section 2); None means no
            cap.
        query_positions: int32 [B], each query's position; None means lengths - 1, the newest
            cached token. Pass `lengths` when the query's own key is not written yet.
        page_stats: also return `page_max` and `page_sum`.
        implementation: None picks the Mosaic kernel on a TPU that can run it and XLA elsewhere;
            "reference", "xla", "tpu" or "gpu" insists.

    Returns:
        The `AttentionOutput`, T = B.

    Raises:
        ValueError: an argument breaks a rule above, or the named implementation cannot run (the
            message says why). Raised before anything is traced.
    """
    check_arrays(
        q, k_pages, v_pages, block_tables, lengths=lengths, query_positions=query_positions
    )
    scale = check_options(
        num_heads=q.shape[1],
        head_dim=q.shape[2],
        scale=scale,
        window=window,
        sink_tokens=sink_tokens,
        sink_logits=sink_logits,
        soft_cap=soft_cap,
        page_stats=page_stats,
    )
    chosen = choose(
        "paged_attention",
        implementation,
        head_dim=q.shape[2],
        v_head_dim=v_pages.shape[3],
        page_size=k_pages.shape[2],
        dtype=q.dtype if isinstance(k_pages, PackedPages) else k_pages.dtype,
        pools=(k_pages, v_pages),
    )
    # By name and only now: importing Pallas takes longer than importing JAX.
    backend = import_module(f"kvjax.pallas_kernels.paged_attention.{chosen}")
    lengths = jnp.asarray(lengths)
    result: AttentionOutput = getattr(backend, f"paged_attention_{chosen}")(
        jnp.asarray(q),
        as_pool(k_pages),
        as_pool(v_pages),
        jnp.asarray(block_tables),
        lengths,
        scale=scale,
        window=None if window is None else int(window),
        sink_tokens=int(sink_tokens),
        sink_logits=None if sink_logits is None else jnp.asarray(sink_logits, jnp.float32),
        soft_cap=soft_cap,
        query_positions=lengths - 1 if query_positions is None else jnp.asarray(query_positions),
        page_stats=page_stats,
    )
    return result
