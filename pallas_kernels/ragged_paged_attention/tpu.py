"""Ragged paged attention as a Mosaic TPU kernel (for a TPU, or interpreted)."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int32

from kvjax.pallas_kernels.merge_attention.xla import add_sink
from kvjax.pallas_kernels.mosaic.attend import attend_work
from kvjax.pallas_kernels.mosaic.block import Masking
from kvjax.pallas_kernels.mosaic.pools import block_itemsize
from kvjax.pallas_kernels.mosaic.tiles import choose_tiles
from kvjax.pallas_kernels.mosaic.work import ragged_work, rows_per_kernel
from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_pages import KeyPool, ValuePool


def ragged_paged_attention_tpu(
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
    value_q: Float[Array, "T Hq Dv"] | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> AttentionOutput:
    """Attend a ragged batch to its pages; the contract is that of `ragged_paged_attention`.

    Queries are cut into blocks; a block reads each page that any of its queries may see once, for
    all KV heads and queries (ragged paged attention, arXiv:2604.15464). A decode inside a mixed
    batch costs what it costs in `paged_attention`: only its own rows are computed. Pools of
    head_dim below 128 need the layout that `pallas_kernels.mosaic.layout` describes, or XLA copies
    them before the kernel. Packed ones are unpacked in VMEM, as in `paged_attention`.

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
        value_q: [T, Hq, Dv], queries that score the values too (MLA; no soft cap then), or None.
        interpret: whether, and how, to interpret the kernel instead of compiling it.

    Returns:
        The `AttentionOutput`, T = q.shape[0].
    """
    num_queries, heads, head_dim = q.shape
    _, kv_heads, page_size, v_head_dim = v_pages.shape
    batch, width = block_tables.shape
    # A sink rescales the output once more, so it is rounded only after that.
    out_dtype = q.dtype if sink_logits is None else jnp.dtype(jnp.float32)
    tiles = choose_tiles(
        num_queries=num_queries,
        group=heads // kv_heads,
        kv_heads=kv_heads,
        page_size=page_size,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        q_itemsize=q.dtype.itemsize,
        kv_itemsize=block_itemsize((k_pages, v_pages), q.dtype),
        out_itemsize=out_dtype.itemsize,
        decode=False,
        scored_values=value_q is not None,
    )
    most = rows_per_kernel(batch, width, -(-num_queries // tiles.tokens))
    result = None
    for start in range(0, batch, most):
        work_list = ragged_work(
            kv_lengths[start : start + most],
            cu_q_lengths[start : start + most + 1],
            num_queries=num_queries,
            table_width=width,
            block_tokens=tiles.tokens,
            window_tokens=tiles.window_rows // tiles.group,
            block_pages=tiles.pages,
            page_size=page_size,
            window=window,
            sink_tokens=sink_tokens,
            residual=residual,
        )
        part = attend_work(
            q,
            k_pages,
            v_pages,
            block_tables[start : start + most],
            work_list,
            tiles=tiles,
            masking=Masking(scale, window, sink_tokens, soft_cap, residual),
            page_stats=page_stats,
            out_dtype=out_dtype,
            decode=False,
            interpret=interpret,
            value_q=value_q,
        )
        result = part if result is None else _where(work_list.is_query, part, result)
    assert result is not None
    if sink_logits is not None:
        result = add_sink(result, sink_logits)
        # A padding row has no softmax, not even over a sink.
        padding = jnp.arange(num_queries, dtype=jnp.int32) >= cu_q_lengths[-1:]
        result = result._replace(lse=jnp.where(padding[:, None], -jnp.inf, result.lse))
    return result._replace(out=result.out.astype(q.dtype))


def _where(rows: Bool[Array, "T"], part: AttentionOutput, rest: AttentionOutput) -> AttentionOutput:
    """Take the rows of one part of a batch, and the others from the rest."""

    def choose(mine: Array, theirs: Array) -> Array:
        return jnp.where(jnp.expand_dims(rows, range(1, mine.ndim)), mine, theirs)

    merged: AttentionOutput = jax.tree.map(choose, part, rest)
    return merged
