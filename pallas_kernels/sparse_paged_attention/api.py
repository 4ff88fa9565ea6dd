"""The public function of sparse paged attention, and its contract."""

from importlib import import_module

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_pages import KeyPool, PackedPages, ValuePool, as_pool
from kvjax.pallas_kernels.sparse_paged_attention.lists import bounded_lists
from kvjax.pallas_kernels.support import Implementation, choose
from kvjax.pallas_kernels.validate import check_options
from kvjax.pallas_kernels.validate_lists import check_lists


def sparse_paged_attention(
    q: Float[Array, "B Hq D"],
    k_pages: KeyPool,
    v_pages: ValuePool,
    page_ids: Int32[Array, "B Hkv K"],
    page_tokens: Int32[Array, "B Hkv K"],
    *,
    scale: float | None = None,
    sink_logits: Float[Array, "Hq"] | None = None,
    soft_cap: float | None = None,
    page_stats: bool = False,
    implementation: Implementation | None = None,
) -> AttentionOutput:
    """Attend one query a sequence to the pages that each of its KV heads lists.

    KV head h of sequence b reads the first page_tokens[b, h, i] slots of page page_ids[b, h, i],
    its own row of the page, for every i (Quest, arXiv:2406.10774, section 3.3, with lists a KV
    head). Nothing else in the pool has any effect, whatever it holds. The order of a list has no
    effect but on statistics; where tokens were chosen, not pages, and where keys stand, is the
    caller's business: keys carry their positions. A page that a list names twice counts twice:
    that is a mistake of the caller, which `check_page_lists` finds. Query head h uses KV head
    h // (Hq // Hkv). All arithmetic is float32. Attention over parts of a list merges by
    `merge_attention`.

    Args:
        q: [B, Hq, D], float32, bfloat16 or float16, position encoding already applied.
        k_pages: [N, Hkv, P, D], float32, bfloat16 or float16, or packed; P from 8 to 128 tokens.
        v_pages: [N, Hkv, P, Dv], the keys' dtype, or packed; Dv may differ from D. If one is packed
            so is the other; they are unpacked block by block, nowhere in full.
        page_ids: int32 [B, Hkv, K], physical pages in any order, each once a list; N, or anything
            else that is not from 0 to N - 1, names no page. K may be any number.
        page_tokens: int32 [B, Hkv, K], how many of the page's first slots count, 0 to P; what is
            outside is taken as the nearer of the two. A list may be empty.
        scale: factor of the scores; None means D ** -0.5.
        sink_logits: [Hq], one logit a head that joins the softmax's denominator, and `lse`,
            without a value (gpt-oss model card, arXiv:2508.10925, section 2.2).
        soft_cap: c in c * tanh(score / c) (Gemma 2, arXiv:2408.00118, section 2); None means no
            cap.
        page_stats: also return `page_max` and `page_sum`, [B, Hq, K]: an entry for each listed
            page, in the list's order.
        implementation: None picks the Mosaic kernel on a TPU that can run it and XLA elsewhere;
            "reference", "xla", "tpu" or "gpu" insists.

    Returns:
        The `AttentionOutput`, T = B; a head whose list is empty has out 0.

    Raises:
        ValueError: an argument breaks a rule above, or the named implementation cannot run (the
            message says why). Raised before anything is traced.
    """
    check_lists(q, k_pages, v_pages, page_ids, page_tokens)
    scale = check_options(
        num_heads=q.shape[1],
        head_dim=q.shape[2],
        scale=scale,
        window=None,
        sink_tokens=0,
        sink_logits=sink_logits,
        soft_cap=soft_cap,
        page_stats=page_stats,
    )
    num_pages, _, page_size, _ = k_pages.shape
    chosen = choose(
        "sparse_paged_attention",
        implementation,
        head_dim=q.shape[2],
        v_head_dim=v_pages.shape[3],
        page_size=page_size,
        dtype=q.dtype if isinstance(k_pages, PackedPages) else k_pages.dtype,
        pools=(k_pages, v_pages),
    )
    # By name and only now: importing Pallas takes longer than importing JAX.
    backend = import_module(f"kvjax.pallas_kernels.sparse_paged_attention.{chosen}")
    ids, tokens = bounded_lists(
        jnp.asarray(page_ids), jnp.asarray(page_tokens), num_pages, page_size
    )
    result: AttentionOutput = getattr(backend, f"sparse_paged_attention_{chosen}")(
        jnp.asarray(q),
        as_pool(k_pages),
        as_pool(v_pages),
        ids,
        tokens,
        scale=scale,
        sink_logits=None if sink_logits is None else jnp.asarray(sink_logits, jnp.float32),
        soft_cap=soft_cap,
        page_stats=page_stats,
    )
    return result
