"""How much the kernel holds in VMEM at once: rows of a query block, pages of a KV block."""

import math
from typing import NamedTuple

LANES = 128
# Rows of queries are touched in whole packed tiles: 16 rows suit bfloat16 and float32 alike.
WINDOW_ROWS = 16
# Rows that one product takes: enough to keep the MXU busy, few enough to keep the program short.
CHUNK_ROWS = 256
DECODE_ROWS = 64
MAX_KV_TOKENS = 512
KV_BYTES = 4 * 2**20
# A query block of 512 tokens and 32 heads of 128: a prefill chunk reads its pages once.
QUERY_BYTES = 32 * 2**20
# What the compiler keeps beside the declared buffers: scores, weights, rescaled accumulators.
SPILL_BYTES = 8 * 2**20


class Tiles(NamedTuple):
    """Static sizes of one kernel.

    Attributes:
        group: query heads of a KV head, padded so that a token never straddles two windows.
        tokens: queries a query block holds.
        rows: rows of a query block, `tokens * group`.
        chunk_rows: rows of the largest piece of a query block that is computed at once.
        window_rows: rows of the smallest; divides `chunk_rows`.
        pages: pages of a KV block.
        vmem_bytes: limit handed to the compiler.
    """

    group: int
    tokens: int
    rows: int
    chunk_rows: int
    window_rows: int
    pages: int
    vmem_bytes: int


def choose_tiles(
    *,
    num_queries: int,
    group: int,
    kv_heads: int,
    page_size: int,
    head_dim: int,
    v_head_dim: int,
    q_itemsize: int,
    kv_itemsize: int,
    out_itemsize: int,
    decode: bool,
    scored_values: bool = False,
) -> Tiles:
    """Choose the sizes of a kernel.

    A KV block is 128 to 512 tokens and, double buffered, about 8 MiB. A query block is as large as
    VMEM allows, because it reads its sequences' pages once; in decode it is small, because every
    query has pages of its own.

    Args:
        num_queries: queries in the call, tokens.
        group: query heads a KV head.
        kv_heads: KV heads.
        page_size: tokens a page.
        head_dim: width of keys.
        v_head_dim: width of values.
        q_itemsize: bytes of a query's element.
        kv_itemsize: bytes of an element of a KV block, unpacked.
        out_itemsize: bytes of an element that the kernel writes.
        decode: whether each sequence has one query.
        scored_values: whether values are scored too, by queries of their own.

    Returns:
        The sizes.
    """
    group = _padded_group(group)
    window_rows = max(WINDOW_ROWS, group)
    most_chunk_rows = max(CHUNK_ROWS // window_rows, 1) * window_rows
    # Queries and outputs are double buffered by the pipeline; accumulators are float32.
    q_lanes = _lanes(head_dim, v_head_dim) if scored_values else _lanes(head_dim)
    row_bytes = 2 * q_itemsize * q_lanes + 2 * out_itemsize * _lanes(v_head_dim)
    row_bytes = kv_heads * (row_bytes + 4 * (LANES + _lanes(v_head_dim)))
    most_rows = DECODE_ROWS if decode else QUERY_BYTES // row_bytes
    wanted = _round_up(num_queries * group, window_rows)
    chunk_rows = min(wanted, most_chunk_rows, max(most_rows // window_rows, 1) * window_rows)
    rows = min(_round_up(wanted, chunk_rows), max(most_rows // chunk_rows, 1) * chunk_rows)

    token_bytes = kv_heads * kv_itemsize * _lanes(head_dim, v_head_dim)
    pages = _block_pages(page_size, token_bytes)
    slots = pages * page_size
    statistics = 2 * kv_heads * window_rows * slots * 4
    return Tiles(
        group=group,
        tokens=rows // group,
        rows=rows,
        chunk_rows=chunk_rows,
        window_rows=window_rows,
        pages=pages,
        vmem_bytes=2 * slots * token_bytes + rows * row_bytes + statistics + SPILL_BYTES,
    )


def _padded_group(group: int) -> int:
    """Round up so that `max(WINDOW_ROWS, group)` is a multiple of it."""
    if group < WINDOW_ROWS:
        return 1 << (group - 1).bit_length()
    return _round_up(group, WINDOW_ROWS)


def _block_pages(page_size: int, token_bytes: int) -> int:
    """Pages of a KV block: whole lanes of scores if the page size allows, within the budget."""
    step = math.lcm(page_size, LANES)
    if step > MAX_KV_TOKENS:
        return max(1, MAX_KV_TOKENS // page_size)
    tokens = MAX_KV_TOKENS // step * step
    while tokens > step and tokens * token_bytes > KV_BYTES:
        tokens -= step
    return tokens // page_size


def _lanes(*widths: int) -> int:
    """Lanes that rows of these widths occupy: VMEM pads each to a multiple of 128."""
    return sum(_round_up(width, LANES) for width in widths)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
