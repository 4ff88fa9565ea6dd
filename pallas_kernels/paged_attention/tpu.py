"""Paged decode attention as a Mosaic TPU kernel (for a TPU, or interpreted)."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from kvjax.pallas_kernels.merge_attention.xla import add_sink
from kvjax.pallas_kernels.mosaic.attend import attend_work
from kvjax.pallas_kernels.mosaic.block import Masking
from kvjax.pallas_kernels.mosaic.pools import block_itemsize
from kvjax.pallas_kernels.mosaic.tiles import choose_tiles
from kvjax.pallas_kernels.mosaic.work import decode_work, rows_per_kernel
from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_pages import KeyPool, ValuePool


def paged_attention_tpu(
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
    value_q: Float[Array, "B Hq Dv"] | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> AttentionOutput:
    """Attend one query a sequence to its pages; the contract is that of `paged_attention`.

    The pools stay in HBM and each visible page is copied once, all KV heads in one piece
    (PagedAttention, arXiv:2309.06180, section 4.3). Pools of head_dim below 128 need the layout
    that `pallas_kernels.mosaic.layout` describes, or XLA copies them before the kernel. Packed ones
    are unpacked in VMEM, a block of pages at a time (`pallas_kernels.mosaic.pools`).

    Args:
        q: [B, Hq, D].
        k_pages: [N, Hkv, P, D], plain or packed.
        v_pages: [N, Hkv, P, Dv], likewise.
        block_tables: int32 [B, M].
        lengths: int32 [B], tokens.
        scale: factor of the scores.
        window: tokens a query sees, itself included, or None.
        sink_tokens: first tokens that stay visible outside the window.
        sink_logits: [Hq] or None.
        soft_cap: bound of the scores, or None.
        query_positions: int32 [B], the position of each query.
        page_stats: whether to return page statistics.
        value_q: [B, Hq, Dv], queries that score the values too (MLA; no soft cap then), or None.
        interpret: whether, and how, to interpret the kernel instead of compiling it.

    Returns:
        The `AttentionOutput`, T = B.
    """
    batch, heads, head_dim = q.shape
    _, kv_heads, page_size, v_head_dim = v_pages.shape
    width = block_tables.shape[1]
    # A sink rescales the output once more, so it is rounded only after that.
    out_dtype = q.dtype if sink_logits is None else jnp.dtype(jnp.float32)
    tiles = choose_tiles(
        num_queries=batch,
        group=heads // kv_heads,
        kv_heads=kv_heads,
        page_size=page_size,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        q_itemsize=q.dtype.itemsize,
        kv_itemsize=block_itemsize((k_pages, v_pages), q.dtype),
        out_itemsize=out_dtype.itemsize,
        decode=True,
        scored_values=value_q is not None,
    )
    most = rows_per_kernel(batch, width, -(-batch // tiles.tokens))
    parts = [
        attend_work(
            q[start : start + most],
            k_pages,
            v_pages,
            block_tables[start : start + most],
            decode_work(
                lengths[start : start + most],
                query_positions[start : start + most],
                table_width=width,
                block_tokens=tiles.tokens,
                block_pages=tiles.pages,
                page_size=page_size,
                window=window,
                sink_tokens=sink_tokens,
            ),
            tiles=tiles,
            masking=Masking(scale, window, sink_tokens, soft_cap),
            page_stats=page_stats,
            out_dtype=out_dtype,
            decode=True,
            interpret=interpret,
            value_q=None if value_q is None else value_q[start : start + most],
        )
        for start in range(0, batch, most)
    ]
    result: AttentionOutput = jax.tree.map(lambda *rows: jnp.concatenate(rows), *parts)
    if sink_logits is not None:
        result = add_sink(result, sink_logits)
    return result._replace(out=result.out.astype(q.dtype))
