"""The kernel's work list: which sequence's pages each query block reads, and in what order."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from kvjax.pallas_kernels.residual import encoded_before

Scalar = Int32[Array, ""]

# Scalar memory has 2**18 words on the generations from v5e on; the compiler takes some itself.
SCALAR_WORDS = 240_000


class Work(NamedTuple):
    """One entry an item: the queries of one sequence that lie in one query block.

    The kernel reads these from scalar memory. A page is "visible" if any of the item's queries
    may see any of its slots; visible pages are numbered 0 .. num_pages - 1: first the sink pages,
    then those from `window_page` on. The others are never fetched.

    Attributes:
        table_start: int32 [W], where the sequence's row starts in the flattened block tables.
        first_query: int32 [W], first query, counted from the block's first.
        end_query: int32 [W], one past the last query.
        first_position: int32 [W], position of the first query.
        end_slot: int32 [W], slots from here on are hidden from every query of the item.
        sink_pages: int32 [W], leading pages that stay visible outside the window.
        window_page: int32 [W], table entry of the first page after them.
        num_pages: int32 [W], visible pages.
        first_block: int32 [W], KV blocks that all earlier items fetch: its parity picks the buffer.
        next_item: int32 [W], the next item that fetches anything; W if none does.
        first_window: int32 [W], windows of statistics that all earlier items write.
    """

    table_start: Int32[Array, "W"]
    first_query: Int32[Array, "W"]
    end_query: Int32[Array, "W"]
    first_position: Int32[Array, "W"]
    end_slot: Int32[Array, "W"]
    sink_pages: Int32[Array, "W"]
    window_page: Int32[Array, "W"]
    num_pages: Int32[Array, "W"]
    first_block: Int32[Array, "W"]
    next_item: Int32[Array, "W"]
    first_window: Int32[Array, "W"]


def rows_per_kernel(batch: int, table_width: int, num_blocks: int) -> int:
    """Say how many sequences one kernel can take: tables and work list live in scalar memory.

    Args:
        batch: sequences.
        table_width: entries of a block table.
        num_blocks: query blocks of the call.

    Returns:
        A number from 1 to `batch`.

    Raises:
        ValueError: not even one block table fits.
    """
    rows, most_entries = _fitting(table_width, num_blocks)
    if rows < 1:
        raise ValueError(
            f"block_tables has {table_width} entries a row; a TPU's scalar memory holds "
            f"{most_entries} beside this call's work list: use larger pages"
        )
    return min(rows, batch)


def lists_per_kernel(lists: int, list_width: int, num_blocks: int) -> int:
    """Say how many page lists, with their token counts, one kernel can take.

    Args:
        lists: lists of the call.
        list_width: entries of a list.
        num_blocks: query blocks of the call.

    Returns:
        A number from 1 to `lists`.

    Raises:
        ValueError: not even one list fits.
    """
    rows, most_words = _fitting(2 * list_width, num_blocks)
    if rows < 1:
        raise ValueError(
            f"page_ids has {list_width} entries a list; a TPU's scalar memory holds "
            f"{most_words // 2} beside this call's work list: choose fewer pages"
        )
    return min(rows, lists)


def _fitting(words: int, num_blocks: int) -> tuple[int, int]:
    """Rows of so many words that fit beside a work list, and the most words of one row."""
    words_per_item = len(Work._fields) + 1
    left = SCALAR_WORDS - num_blocks * words_per_item
    return left // (words + words_per_item), max(left - words_per_item, 0)


class WorkList(NamedTuple):
    """The items, and where each query block's begin.

    Attributes:
        work: the items, in the order the kernel takes them.
        block_items: int32 [num_blocks + 1], the items of block i are block_items[i] ..
            block_items[i + 1] - 1.
        query_item: int32 [T], each query's item.
        is_query: bool [T], False for rows that no sequence of the list owns.
    """

    work: Work
    block_items: Int32[Array, "blocks+1"]
    query_item: Int32[Array, "T"]
    is_query: Array


def visible_pages(
    first_position: Int32[Array, "W"],
    num_queries: Int32[Array, "W"],
    lengths: Int32[Array, "W"],
    *,
    page_size: int,
    window: int | None,
    sink_tokens: int,
    residual: int | None = None,
) -> tuple[Int32[Array, "W"], Int32[Array, "W"], Int32[Array, "W"], Int32[Array, "W"]]:
    """Find the pages that consecutive queries of a sequence may see.

    Args:
        first_position: int32 [W], position of the first query.
        num_queries: int32 [W], how many queries there are; 0 sees nothing.
        lengths: int32 [W], cached tokens.
        page_size: tokens a page.
        window: tokens a query sees, itself included, or None.
        sink_tokens: first tokens that stay visible outside the window.
        residual: newest tokens that are not here for a query, or None; see `encoded_before`.

    Returns:
        `end_slot`, `sink_pages`, `window_page` and `num_pages` of `Work`.
    """
    end_slot = first_position + num_queries
    if residual is not None:
        end_slot = encoded_before(end_slot - 1, residual, page_size)
    end_slot = jnp.clip(end_slot, 0, lengths)
    end_slot = jnp.where(num_queries > 0, end_slot, 0)
    end_page = (end_slot + (page_size - 1)) // page_size
    if window is None:
        nothing = jnp.zeros_like(end_slot)
        return end_slot, nothing, nothing, end_page
    window_page = jnp.maximum(first_position - (window - 1), 0) // page_size
    sinks = jnp.minimum(end_slot, sink_tokens)
    sink_pages = jnp.minimum((sinks + (page_size - 1)) // page_size, window_page)
    return end_slot, sink_pages, window_page, sink_pages + jnp.maximum(end_page - window_page, 0)


def pages_in_order(work: Work, block_tables: Int32[Array, "B M"]) -> Int32[Array, "W M"]:
    """Page ids as the kernel reads them, an item a row: its visible pages, then anything.

    Args:
        work: the items.
        block_tables: int32 [B, M].
    """
    flat = block_tables.reshape(-1)
    visible = jnp.arange(block_tables.shape[1], dtype=jnp.int32)[None, :]
    start, sinks, later = (
        each[:, None] for each in (work.table_start, work.sink_pages, work.window_page)
    )
    entry = start + jnp.where(visible < sinks, visible, visible - sinks + later)
    ids: Array = flat.at[entry].get(mode="clip")
    return ids


def decode_work(
    lengths: Int32[Array, "B"],
    query_positions: Int32[Array, "B"],
    *,
    table_width: int,
    block_tokens: int,
    block_pages: int,
    page_size: int,
    window: int | None,
    sink_tokens: int,
) -> WorkList:
    """List the work of one query a sequence: item b is sequence b.

    Args:
        lengths: int32 [B], cached tokens.
        query_positions: int32 [B], each query's position.
        table_width: entries of a block table.
        block_tokens: queries a query block holds.
        block_pages: pages of a KV block.
        page_size: tokens a page.
        window: tokens a query sees, itself included, or None.
        sink_tokens: first tokens that stay visible outside the window.

    Returns:
        The list.
    """
    pages = visible_pages(
        query_positions,
        jnp.ones_like(lengths),
        lengths,
        page_size=page_size,
        window=window,
        sink_tokens=sink_tokens,
    )
    return _one_query_each(query_positions, pages, table_width, block_tokens, block_pages)


def list_work(
    page_tokens: Int32[Array, "L K"],
    *,
    block_tokens: int,
    block_pages: int,
    page_size: int,
) -> WorkList:
    """List the work of one query a list of pages: item l is list l.

    `end_slot` ends the whole pages; `BlockFolder.page_tokens` says what counts of the others.

    Args:
        page_tokens: int32 [L, K], tokens of each page that count: whole pages first, then those of
            which a part counts, then none.
        block_tokens: queries a query block holds.
        block_pages: pages of a KV block.
        page_size: tokens a page.

    Returns:
        The list.
    """
    whole = jnp.sum(page_tokens == page_size, axis=1, dtype=jnp.int32)
    end_slot = whole * page_size
    nothing = jnp.zeros_like(whole)
    some = jnp.sum(page_tokens > 0, axis=1, dtype=jnp.int32)
    return _one_query_each(
        end_slot,
        (end_slot, nothing, nothing, some),
        page_tokens.shape[1],
        block_tokens,
        block_pages,
    )


def _one_query_each(
    positions: Int32[Array, "W"],
    pages: tuple[Int32[Array, "W"], Int32[Array, "W"], Int32[Array, "W"], Int32[Array, "W"]],
    table_width: int,
    block_tokens: int,
    block_pages: int,
) -> WorkList:
    """Make every row of the tables an item of one query."""
    batch = positions.shape[0]
    item = jnp.arange(batch, dtype=jnp.int32)
    work = _linked(
        table_start=item * table_width,
        first_query=item % block_tokens,
        end_query=item % block_tokens + 1,
        first_position=positions,
        pages=pages,
        block_pages=block_pages,
        num_windows=jnp.ones_like(positions),
    )
    starts = jnp.arange(-(-batch // block_tokens) + 1, dtype=jnp.int32) * block_tokens
    return WorkList(work, jnp.minimum(starts, batch), item, jnp.ones((batch,), bool))


def ragged_work(
    kv_lengths: Int32[Array, "B"],
    cu_q_lengths: Int32[Array, "B+1"],
    *,
    num_queries: int,
    table_width: int,
    block_tokens: int,
    window_tokens: int,
    block_pages: int,
    page_size: int,
    window: int | None,
    sink_tokens: int,
    residual: int | None = None,
) -> WorkList:
    """List the work of a ragged batch: the pieces that sequences and query blocks cut it into.

    Args:
        kv_lengths: int32 [B], cached tokens, the queries' own included.
        cu_q_lengths: int32 [B + 1], where each sequence's queries start; rows before the first and
            from the last on belong to none of the sequences.
        num_queries: rows of q, padding included.
        table_width: entries of a block table.
        block_tokens: queries a query block holds.
        window_tokens: queries a window of statistics holds.
        block_pages: pages of a KV block.
        page_size: tokens a page.
        window: tokens a query sees, itself included, or None.
        sink_tokens: first tokens that stay visible outside the window.
        residual: newest tokens that are not here for a query, or None; see `encoded_before`.

    Returns:
        The list; it has num_blocks + B items, some of them empty.
    """
    num_blocks = -(-num_queries // block_tokens)
    block_start = jnp.arange(num_blocks + 1, dtype=jnp.int32) * block_tokens
    end = cu_q_lengths[-1:]
    start = jnp.sort(jnp.concatenate([block_start[:-1], cu_q_lengths[:-1]]))
    stop = jnp.minimum(jnp.concatenate([start[1:], end]), end)
    # Queries outside cu_q_lengths are padding, or belong to another part of a split batch.
    queries = jnp.where(start >= cu_q_lengths[:1], jnp.maximum(stop - start, 0), 0)
    # A sequence without queries starts where the next one does: "right" passes over it.
    sequence = jnp.searchsorted(cu_q_lengths[1:], start, side="right").astype(jnp.int32)
    sequence = jnp.minimum(sequence, kv_lengths.shape[0] - 1)
    lengths = kv_lengths[sequence]
    position = lengths - cu_q_lengths[sequence + 1] + start
    pages = visible_pages(
        position,
        queries,
        lengths,
        page_size=page_size,
        window=window,
        sink_tokens=sink_tokens,
        residual=residual,
    )
    first_query = start % block_tokens
    last_query = jnp.maximum(first_query + queries - 1, first_query)
    windows = last_query // window_tokens - first_query // window_tokens + 1
    work = _linked(
        table_start=sequence * table_width,
        first_query=first_query,
        end_query=first_query + queries,
        first_position=position,
        pages=pages,
        block_pages=block_pages,
        num_windows=jnp.where(queries > 0, windows, 0),
    )
    row = jnp.arange(num_queries, dtype=jnp.int32)
    return WorkList(
        work,
        block_items=jnp.searchsorted(start, block_start).astype(jnp.int32),
        # The last item that starts at or before the row is the one with queries.
        query_item=jnp.searchsorted(start, row, side="right").astype(jnp.int32) - 1,
        is_query=(row >= cu_q_lengths[:1]) & (row < end),
    )


def _linked(
    *,
    table_start: Int32[Array, "W"],
    first_query: Int32[Array, "W"],
    end_query: Int32[Array, "W"],
    first_position: Int32[Array, "W"],
    pages: tuple[Int32[Array, "W"], Int32[Array, "W"], Int32[Array, "W"], Int32[Array, "W"]],
    block_pages: int,
    num_windows: Int32[Array, "W"],
) -> Work:
    """Add what an item must know of the items before and after it."""
    end_slot, sink_pages, window_page, num_pages = pages
    blocks = (num_pages + (block_pages - 1)) // block_pages
    items = blocks.shape[0]
    index = jnp.arange(items, dtype=jnp.int32)
    busy = jnp.where(blocks > 0, index, items)
    following = lax.cummin(busy, reverse=True)
    last = jnp.full((1,), items, jnp.int32)
    return Work(
        table_start=table_start,
        first_query=first_query,
        end_query=end_query,
        first_position=first_position,
        end_slot=end_slot,
        sink_pages=sink_pages,
        window_page=window_page,
        num_pages=num_pages,
        first_block=jnp.cumsum(blocks, dtype=jnp.int32) - blocks,
        next_item=jnp.concatenate([following[1:], last]),
        first_window=jnp.cumsum(num_windows, dtype=jnp.int32) - num_windows,
    )
