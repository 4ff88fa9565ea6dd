"""The public function of ragged paged attention, and its contract."""

from importlib import import_module

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_pages import KeyPool, PackedPages, ValuePool, as_pool
from kvjax.pallas_kernels.support import Implementation, choose
from kvjax.pallas_kernels.validate import check_arrays, check_at_least, check_options


def ragged_paged_attention(
    q: Float[Array, "T Hq D"],
    k_pages: KeyPool,
    v_pages: ValuePool,
    block_tables: Int32[Array, "B M"],
    kv_lengths: Int32[Array, "B"],
    cu_q_lengths: Int32[Array, "B+1"],
    *,
    scale: float | None = None,
    window: int | None = None,
    sink_tokens: int = 0,
    sink_logits: Float[Array, "Hq"] | None = None,
    soft_cap: float | None = None,
    page_stats: bool = False,
    residual: int | None = None,
    implementation: Implementation | None = None,
) -> AttentionOutput:
    """Attend a flat batch of prefill chunks and decodes to their sequences' pages.

    Sequence b's queries are q[cu_q_lengths[b] : cu_q_lengths[b + 1]] and are the last of its
    kv_lengths[b] cached tokens: the i-th of n stands at position kv_lengths[b] - n + i and sees
    slots 0 .. that position, by the rules of `paged_attention` (ragged batches: Orca, OSDI 2022,
    section 3.2; chunked prefill: Sarathi-Serve, arXiv:2403.02310, section 4). A sequence may have
    no query. Rows of q at or past cu_q_lengths[B] are padding: out 0, lse -inf, page_max -inf,
    page_sum 0. A NaN or infinity that one query may see can reach other queries of its sequence,
    never those of another.

    Args:
        q: [T, Hq, D], float32, bfloat16 or float16, position encoding already applied.
        k_pages: [N, Hkv, P, D], float32, bfloat16 or float16, or packed; P from 8 to 128 tokens.
        v_pages: [N, Hkv, P, Dv], the keys' dtype, or packed; Dv may differ from D. If one is packed
            so is the other; they are unpacked block by block, nowhere in full.
        block_tables: int32 [B, M], page ids; unused entries hold N (or anything else from 0 up).
        kv_lengths: int32 [B], cached tokens a sequence, its queries' own keys included.
        cu_q_lengths: int32 [B + 1], where each sequence's queries start; 0 first, never falling.
        scale: factor of the scores; None means D ** -0.5.
        window: how many of the newest positions are visible, in tokens, the query's own included;
            None means all.
        sink_tokens: how many of the first tokens stay visible outside the window.
        sink_logits: [Hq], one logit a head that joins the softmax's denominator, and `lse`,
            without a value.
        soft_cap: c in c * tanh(score / c); None means no cap.
        page_stats: also return `page_max` and `page_sum`, over the table of each query's sequence.
        residual: newest tokens that a query does not see here, because they were not encoded when
            it came: a query at position t sees slots below `encoded_before(t, residual, P)`, in
            place of 0 .. t. None sees all of them.
        implementation: None picks the Mosaic kernel on a TPU that can run it and XLA elsewhere;
            "reference", "xla", "tpu" or "gpu" insists.

    Returns:
        The `AttentionOutput`, T = q.shape[0].

    Raises:
        ValueError: an argument breaks a rule above, or the named implementation cannot run (the
            message says why). Raised before anything is traced.
    """
    check_arrays(
        q, k_pages, v_pages, block_tables, kv_lengths=kv_lengths, cu_q_lengths=cu_q_lengths
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
    if residual is not None:
        check_at_least("residual", residual, k_pages.shape[2], ", a page, or None")
    options = {} if residual is None else {"residual": int(residual)}
    chosen = choose(
        "ragged_paged_attention",
        implementation,
        head_dim=q.shape[2],
        v_head_dim=v_pages.shape[3],
        page_size=k_pages.shape[2],
        dtype=q.dtype if isinstance(k_pages, PackedPages) else k_pages.dtype,
        pools=(k_pages, v_pages),
    )
    # By name and only now: importing Pallas takes longer than importing JAX.
    backend = import_module(f"kvjax.pallas_kernels.ragged_paged_attention.{chosen}")
    result: AttentionOutput = getattr(backend, f"ragged_paged_attention_{chosen}")(
        jnp.asarray(q),
        as_pool(k_pages),
        as_pool(v_pages),
        jnp.asarray(block_tables),
        jnp.asarray(kv_lengths),
        jnp.asarray(cu_q_lengths),
        scale=scale,
        window=None if window is None else int(window),
        sink_tokens=int(sink_tokens),
        sink_logits=None if sink_logits is None else jnp.asarray(sink_logits, jnp.float32),
        soft_cap=soft_cap,
        page_stats=page_stats,
        **options,
    )
    return result
