"""Ragged paged attention with the Pallas Triton decode kernel, one program a query and KV head.

Expiry note: the Triton backend of Pallas is deprecated since JAX 0.11 and will be removed; this
file goes with it. Until then it runs only when asked for by name (`implementation="gpu"`), and JAX
says so with a DeprecationWarning when the program is lowered. The default on a GPU is XLA.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_pages import KeyPool, ValuePool
from kvjax.pallas_kernels.paged_attention.gpu import paged_attention_gpu
from kvjax.pallas_kernels.ragged_paged_attention.rows import query_rows
from kvjax.pallas_kernels.residual import encoded_before


def ragged_paged_attention_gpu(
    q: Float[Array, "T Hq D"],
    k_pages: KeyPool,
    v_pages: ValuePool,
    block_tables: Int32[Array, "B M"],
    kv_lengths: Int32[Array, "B"],
    cu_q_lengths: Int32[Array, "B+1"],
    *,
    scale: float,
    window: int | None,
    sink_tokens: int,
    sink_logits: Float[Array, "Hq"] | None,
    soft_cap: float | None,
    page_stats: bool,
    residual: int | None = None,
    interpret: bool = False,
) -> AttentionOutput:
    """Attend a ragged batch to its pages; the contract is that of `ragged_paged_attention`.

    Every query is a decode of its own, so a prefill chunk reads its pages once a query: correct,
    not fast. Use XLA for long chunks.

    Args:
        q: [T, Hq, D].
        k_pages: [N, Hkv, P, D], plain or packed.
        v_pages: [N, Hkv, P, Dv], likewise.
        block_tables: int32 [B, M].
        kv_lengths: int32 [B], tokens.
        cu_q_lengths: int32 [B + 1], where each sequence's queries start.
        scale: factor of the scores.
        window: tokens a query sees, itself included, or None.
        sink_tokens: first tokens that stay visible outside the window.
        sink_logits: [Hq] or None.
        soft_cap: bound of the scores, or None.
        page_stats: whether to return page statistics.
        residual: newest tokens that a query does not see here, or None.
        interpret: whether to run the kernel in Pallas' interpreter, on any platform.

    Returns:
        The `AttentionOutput`, T = q.shape[0].
    """
    rows = query_rows(kv_lengths, cu_q_lengths, q.shape[0])
    lengths = rows.length
    if residual is not None:
        encoded = encoded_before(rows.position, residual, k_pages.shape[2])
        lengths = jnp.where(rows.padding, 0, encoded)
    result = paged_attention_gpu(
        q,
        k_pages,
        v_pages,
        block_tables[rows.sequence],
        lengths,
        scale=scale,
        window=window,
        sink_tokens=sink_tokens,
        sink_logits=sink_logits,
        soft_cap=soft_cap,
        query_positions=rows.position,
        page_stats=page_stats,
        interpret=interpret,
    )
    # A padding row has no softmax, not even over a sink.
    return result._replace(lse=jnp.where(rows.padding[:, None], -jnp.inf, result.lse))
