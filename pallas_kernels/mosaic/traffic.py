"""Bytes that the kernels move between HBM and VMEM, counted from their own work lists."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from kvjax.pallas_kernels.mosaic.tiles import LANES, Tiles, choose_tiles
from kvjax.pallas_kernels.mosaic.work import WorkList, decode_work, ragged_work


class Heads(NamedTuple):
    """The shape of one layer's attention.

    Attributes:
        query_heads: query heads.
        kv_heads: KV heads.
        head_dim: width of queries, keys and values.
        page_size: tokens a page.
        itemsize: bytes of an element, of the pages and of the queries.
        window: tokens a query sees, itself included, or None.
        sink_tokens: first tokens that stay visible outside the window.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    itemsize: int
    window: int | None = None
    sink_tokens: int = 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token's key and value."""
        return 2 * self.kv_heads * self.head_dim * self.itemsize

    @property
    def query_bytes(self) -> int:
        """Bytes of one query and its output."""
        return 2 * self.query_heads * self.head_dim * self.itemsize


class Traffic(NamedTuple):
    """Bytes of one call.

    Attributes:
        kv_read: keys and values that the kernel copies from HBM.
        kv_needed: keys and values that some query may see, each once.
        padding: what `kv_read` grows by where rows are padded to 128 lanes in HBM.
        queries: queries in and outputs out, as the kernel's rows hold them.
        queries_needed: the same without rows that no query fills.
        flops: multiplications and additions of scores and values over the needed slots.
    """

    kv_read: int
    kv_needed: int
    padding: int
    queries: int
    queries_needed: int
    flops: int


def decode_traffic(lengths: Int32[Array, "B"], table_width: int, heads: Heads) -> Traffic:
    """Count the bytes of a `paged_attention` call.

    Args:
        lengths: int32 [B], cached tokens; each query is at the newest.
        table_width: entries of a block table.
        heads: the shape of the layer.

    Returns:
        The bytes.
    """
    batch = lengths.shape[0]
    tiles = _tiles(heads, batch, decode=True)
    work_list = decode_work(
        lengths,
        lengths - 1,
        table_width=table_width,
        block_tokens=tiles.tokens,
        block_pages=tiles.pages,
        page_size=heads.page_size,
        window=heads.window,
        sink_tokens=heads.sink_tokens,
    )
    return _count(work_list, np.asarray(lengths), np.ones(batch, np.int64), tiles, heads)


def ragged_traffic(
    kv_lengths: Int32[Array, "B"],
    cu_q_lengths: Int32[Array, "B+1"],
    table_width: int,
    heads: Heads,
) -> Traffic:
    """Count the bytes of a `ragged_paged_attention` call without padding rows.

    Args:
        kv_lengths: int32 [B], cached tokens, the queries' own included.
        cu_q_lengths: int32 [B + 1], where each sequence's queries start.
        table_width: entries of a block table.
        heads: the shape of the layer.

    Returns:
        The bytes.
    """
    starts = np.asarray(cu_q_lengths, np.int64)
    num_queries = int(starts[-1])
    tiles = _tiles(heads, num_queries, decode=False)
    work_list = ragged_work(
        kv_lengths,
        cu_q_lengths,
        num_queries=num_queries,
        table_width=table_width,
        block_tokens=tiles.tokens,
        window_tokens=tiles.window_rows // tiles.group,
        block_pages=tiles.pages,
        page_size=heads.page_size,
        window=heads.window,
        sink_tokens=heads.sink_tokens,
    )
    return _count(work_list, np.asarray(kv_lengths), np.diff(starts), tiles, heads)


def _tiles(heads: Heads, num_queries: int, decode: bool) -> Tiles:
    return choose_tiles(
        num_queries=num_queries,
        group=heads.query_heads // heads.kv_heads,
        kv_heads=heads.kv_heads,
        page_size=heads.page_size,
        head_dim=heads.head_dim,
        v_head_dim=heads.head_dim,
        q_itemsize=heads.itemsize,
        kv_itemsize=heads.itemsize,
        out_itemsize=heads.itemsize,
        decode=decode,
    )


def _count(
    work_list: WorkList,
    lengths: np.ndarray,
    queries: np.ndarray,
    tiles: Tiles,
    heads: Heads,
) -> Traffic:
    pages = int(jnp.sum(work_list.work.num_pages))
    kv_read = pages * heads.page_size * heads.slot_bytes
    lanes = -(-heads.head_dim // LANES) * LANES
    rows = -(-int(queries.sum()) // tiles.tokens) * tiles.rows
    seen = pairs = 0
    for length, count in zip(lengths.tolist(), queries.tolist(), strict=True):
        positions = np.arange(max(length - count, 0), length)
        pairs += int(_visible(positions, positions, heads).sum())
        seen += int(_visible(positions[:1], positions[-1:], heads).sum())
    return Traffic(
        kv_read=kv_read,
        kv_needed=seen * heads.slot_bytes,
        padding=kv_read * (lanes - heads.head_dim) // heads.head_dim,
        queries=2 * rows * heads.kv_heads * heads.head_dim * heads.itemsize,
        queries_needed=int(queries.sum()) * heads.query_bytes,
        flops=4 * pairs * heads.query_heads * heads.head_dim,
    )


def _visible(first: np.ndarray, last: np.ndarray, heads: Heads) -> np.ndarray:
    """Count the slots that queries at positions `first` .. `last` may see, each once."""
    if heads.window is None:
        return last + 1
    start = np.maximum(first - heads.window + 1, 0)
    count: np.ndarray = np.minimum(heads.sink_tokens, start) + last + 1 - start
    return count
