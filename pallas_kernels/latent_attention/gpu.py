"""Attention over latents with the Pallas Triton kernels of paged attention.

Expiry note: the Triton backend of Pallas is deprecated since JAX 0.11 and will be removed; this
file goes with it. Until then it runs only when asked for by name (`implementation="gpu"`), and JAX
says so with a DeprecationWarning when the program is lowered. The default on a GPU is XLA.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_pages import KeyPool, ValuePool
from kvjax.pallas_kernels.paged_attention.gpu import paged_attention_gpu
from kvjax.pallas_kernels.ragged_paged_attention.rows import query_rows
from kvjax.pallas_kernels.sparse_paged_attention.gpu import sparse_paged_attention_gpu
from kvjax.pallas_kernels.triton_walk import SMALLEST_BLOCK


def latent_attention_gpu(
    q_latent: Float[Array, "B H Dc"],
    q_rope: Float[Array, "B H Dr"],
    latents: ValuePool,
    ropes: KeyPool,
    block_tables: Int32[Array, "B M"],
    lengths: Int32[Array, "B"],
    *,
    scale: float,
    page_stats: bool,
    interpret: bool = False,
) -> AttentionOutput:
    """Attend one query a sequence to its pages; the contract is that of `latent_attention`.

    A program's registers hold the outputs of 16 heads of 512 elements, not of 128: some heads of a
    sequence are a row of their own, over the same pages, which lie in the second-level cache.

    Args:
        q_latent: [B, H, Dc].
        q_rope: [B, H, Dr].
        latents: [N, 1, P, Dc], plain or packed.
        ropes: [N, 1, P, Dr], plain or packed.
        block_tables: int32 [B, M].
        lengths: int32 [B], tokens.
        scale: factor of the scores.
        page_stats: whether to return page statistics.
        interpret: whether to run the kernel in Pallas' interpreter, on any platform.

    Returns:
        The `AttentionOutput`, T = B.
    """
    split = _split(q_rope.shape[1])
    tables, tokens = (jnp.repeat(each, split, axis=0) for each in (block_tables, lengths))
    result = paged_attention_gpu(
        _cut(q_rope, split),
        ropes,
        latents,
        tables,
        tokens,
        scale=scale,
        window=None,
        sink_tokens=0,
        sink_logits=None,
        soft_cap=None,
        query_positions=tokens - 1,
        page_stats=page_stats,
        value_q=_cut(q_latent, split),
        interpret=interpret,
    )
    return _joined(result, split)


def ragged_latent_attention_gpu(
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
    interpret: bool = False,
) -> AttentionOutput:
    """Attend a ragged batch, each query as a decode of its own: correct, not fast.

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
        interpret: whether to run the kernel in Pallas' interpreter, on any platform.

    Returns:
        The `AttentionOutput`, T = q_latent.shape[0].
    """
    rows = query_rows(kv_lengths, cu_q_lengths, q_latent.shape[0])
    return latent_attention_gpu(
        q_latent,
        q_rope,
        latents,
        ropes,
        block_tables[rows.sequence],
        rows.seen(residual, latents.shape[2]),
        scale=scale,
        page_stats=page_stats,
        interpret=interpret,
    )


def sparse_latent_attention_gpu(
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
    interpret: bool = False,
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
        interpret: whether to run the kernel in Pallas' interpreter, on any platform.

    Returns:
        The `AttentionOutput`, T = B.
    """
    split = _split(q_rope.shape[1])
    ids, tokens = (jnp.repeat(each, split, axis=0) for each in (page_ids, page_tokens))
    result = sparse_paged_attention_gpu(
        _cut(q_rope, split),
        ropes,
        latents,
        ids,
        tokens,
        scale=scale,
        sink_logits=None,
        soft_cap=None,
        page_stats=page_stats,
        value_q=_cut(q_latent, split),
        chosen=None if chosen is None else jnp.repeat(chosen, split, axis=0),
        interpret=interpret,
    )
    return _joined(result, split)


def _split(heads: int) -> int:
    """Rows that one of so many heads becomes: as few as have no more heads than a block takes."""
    return next(n for n in range(-(-heads // SMALLEST_BLOCK), heads + 1) if heads % n == 0)


def _cut(q: Float[Array, "B H D"], split: int) -> Float[Array, "rows heads D"]:
    batch, heads, dim = q.shape
    return q.reshape(batch * split, heads // split, dim)


def _joined(result: AttentionOutput, split: int) -> AttentionOutput:
    """Undo `_cut` for what a kernel returned."""

    def join(x: Any) -> Any:
        return x.reshape(x.shape[0] // split, x.shape[1] * split, *x.shape[2:])

    joined: AttentionOutput = jax.tree.map(join, result)
    return joined
