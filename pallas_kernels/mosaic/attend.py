"""Attention over a work list: queries by token in, `AttentionOutput` by token out."""

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from kvjax.pallas_kernels.mosaic.block import Masking
from kvjax.pallas_kernels.mosaic.kernel import run_kernel
from kvjax.pallas_kernels.mosaic.pools import block_pool
from kvjax.pallas_kernels.mosaic.statistics import unpack, window_count
from kvjax.pallas_kernels.mosaic.tiles import Tiles
from kvjax.pallas_kernels.mosaic.work import WorkList
from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_pages import KeyPool, ValuePool


def attend_work(
    q: Float[Array, "T Hq D"],
    k_pages: KeyPool,
    v_pages: ValuePool,
    block_tables: Int32[Array, "B M"],
    work_list: WorkList,
    *,
    tiles: Tiles,
    masking: Masking,
    page_stats: bool,
    out_dtype: jnp.dtype,
    decode: bool,
    interpret: bool | pltpu.InterpretParams,
    page_tokens: Int32[Array, "B M"] | None = None,
    value_q: Float[Array, "T Hq Dv"] | None = None,
    chosen: Bool[Array, "B M P"] | None = None,
) -> AttentionOutput:
    """Lay queries out for the kernel, run it, and arrange what it wrote.

    Args:
        q: [T, Hq, D].
        k_pages: [N, Hkv, P, D], plain or packed.
        v_pages: [N, Hkv, P, Dv], likewise.
        block_tables: int32 [B, M], page ids; with `page_tokens`, page * Hkv + head: pages of one
            head each.
        work_list: what to do.
        tiles: the kernel's sizes.
        masking: the options.
        page_stats: whether to return page statistics.
        out_dtype: of the output.
        decode: whether every sequence has one query.
        interpret: whether, and how, to interpret the kernel instead of compiling it.
        page_tokens: int32 [B, M], tokens that count of the pages past an item's `end_slot`; None
            means none.
        value_q: [T, Hq, Dv], queries that score the values too (MLA; no soft cap then), or None.
        chosen: bool [B, M, P], which of the tokens that count do, where item b is row b of the
            tables; None means all.

    Returns:
        The `AttentionOutput` without attention sinks; rows that the list does not know are empty.
    """
    num_queries, heads, _ = q.shape
    one_head = page_tokens is not None
    kv_heads = 1 if one_head else k_pages.shape[1]
    group = heads // kv_heads
    items = work_list.work.num_pages.shape[0]
    keys, values = (
        block_pool(pool, work_list.work, block_tables, block_pages=tiles.pages, one_head=one_head)
        for pool in (k_pages, v_pages)
    )
    written = run_kernel(
        _to_rows(q, kv_heads, tiles),
        keys,
        values,
        block_tables,
        work_list,
        tiles=tiles,
        masking=masking,
        num_windows=window_count(num_queries, items, tiles, decode) if page_stats else 0,
        out_dtype=out_dtype,
        decode=decode,
        interpret=interpret,
        page_tokens=page_tokens,
        value_q=None if value_q is None else _to_rows(value_q, kv_heads, tiles),
        chosen=None if chosen is None else _by_block(chosen, tiles.pages),
    )
    out, lse = _from_rows(written.out, written.lse, num_queries, group, tiles)
    if written.raw is None:
        return AttentionOutput(out, lse)
    width = block_tables.shape[1]
    page_max, page_sum = unpack(
        written.raw, work_list, tiles=tiles, kv_heads=kv_heads, group=group, table_width=width
    )
    return AttentionOutput(out, lse, page_max, page_sum)


def _to_rows(q: Float[Array, "T Hq D"], kv_heads: int, tiles: Tiles) -> Float[Array, "Hkv rows D"]:
    """Lay queries out as the kernel reads them."""
    num_queries, heads, width = q.shape
    group = heads // kv_heads
    blocks = -(-num_queries // tiles.tokens)
    q = q.reshape(num_queries, kv_heads, group, width)
    missing = blocks * tiles.tokens - num_queries
    q = jnp.pad(q, ((0, missing), (0, 0), (0, tiles.group - group), (0, 0)))
    return q.transpose(1, 0, 2, 3).reshape(kv_heads, blocks * tiles.rows, width)


def _by_block(
    chosen: Bool[Array, "B M P"], block_pages: int
) -> Float32[Array, "B kv_blocks 1 slots"]:
    """Lay a choice of tokens out block by block, a slot a lane."""
    rows, width, page_size = chosen.shape
    chosen = jnp.pad(chosen, ((0, 0), (0, -width % block_pages), (0, 0)))
    return chosen.reshape(rows, -1, 1, block_pages * page_size).astype(jnp.float32)


def _from_rows(
    out: Float[Array, "Hkv rows Dv"],
    lse: Float[Array, "blocks Hkv chunks chunk_rows"],
    num_queries: int,
    group: int,
    tiles: Tiles,
) -> tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"]]:
    """Undo `_to_rows` for the kernel's outputs."""
    kv_heads, _, width = out.shape
    out = out.reshape(kv_heads, -1, tiles.group, width)[:, :num_queries, :group]
    lse = lse.reshape(-1, kv_heads, tiles.tokens, tiles.group)[..., :group]
    lse = lse.transpose(0, 2, 1, 3).reshape(-1, kv_heads * group)[:num_queries]
    return out.transpose(1, 0, 2, 3).reshape(num_queries, kv_heads * group, width), lse
