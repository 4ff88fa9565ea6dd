"""What each page contributed to each query's softmax, kept while the scores are at hand."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from kvjax.pallas_kernels.mosaic.flash import NOTHING
from kvjax.pallas_kernels.mosaic.tiles import Tiles
from kvjax.pallas_kernels.mosaic.work import Scalar, WorkList


class StatisticsWriter(NamedTuple):
    """The refs through which page statistics leave the kernel.

    Attributes:
        raw: [windows, 2, kv_blocks, pages, lanes] in HBM: maximum and sum of each visible page,
            a lane for each row of the window and KV head.
        scores: [lanes, slots] in VMEM, the scores of one window of rows, KV heads stacked.
        staging: [2, pages, lanes] in VMEM.
        in_flight: [1] in SMEM, whether a copy from `staging` has not been waited for.
        semaphore: of that copy.
    """

    raw: Any
    scores: Any
    staging: Any
    in_flight: Any
    semaphore: Any

    def open(self) -> None:
        """Prepare, once a kernel: no copy is in flight, unused lanes hold numbers."""
        self.in_flight[0] = 0
        self.scores[...] = jnp.zeros(self.scores.shape, jnp.float32)

    def write(self, window: Scalar, block: Scalar) -> None:
        """Reduce `scores` page by page and start copying the result out."""
        _, pages, lanes = self.staging.shape
        # Slots along sublanes: a page is then whole tiles, and its reduction needs no shuffles.
        by_page = self.scores[...].T.reshape(pages, -1, lanes)
        maximum = jnp.max(by_page, axis=1)
        total = jnp.sum(jnp.exp(by_page - jnp.maximum(maximum, NOTHING)[:, None, :]), axis=1)
        self.close()
        self.staging[0] = maximum
        self.staging[1] = total
        self._copy(window, block).start()
        self.in_flight[0] = 1

    def close(self) -> None:
        """Wait for the copy in flight, if any."""

        @pl.when(self.in_flight[0] == 1)
        def _() -> None:
            self._copy(jnp.int32(0), jnp.int32(0)).wait()
            self.in_flight[0] = 0

    def _copy(self, window: Scalar, block: Scalar) -> Any:
        return pltpu.make_async_copy(self.staging, self.raw.at[window, :, block], self.semaphore)


def unpack(
    raw: Float[Array, "windows 2 kv_blocks pages lanes"],
    work_list: WorkList,
    *,
    tiles: Tiles,
    kv_heads: int,
    group: int,
    table_width: int,
) -> tuple[Float[Array, "T Hq M"], Float[Array, "T Hq M"]]:
    """Arrange raw statistics by query, head and table entry.

    Args:
        raw: what the kernel wrote; windows and blocks that it did not write hold anything.
        work_list: what it worked on.
        tiles: its sizes.
        kv_heads: KV heads.
        group: query heads a KV head.
        table_width: entries of a block table, M.

    Returns:
        `page_max` and `page_sum` of `AttentionOutput`.
    """
    work, _, query_item, is_query = work_list
    num_queries = query_item.shape[0]
    tokens = tiles.window_rows // tiles.group
    windows = raw.shape[0]
    # Transposed while both axes are long: short minor axes are padded to whole tiles.
    by_lane = raw.reshape(windows, 2, -1, raw.shape[4]).swapaxes(2, 3)
    by_lane = by_lane[:, :, : kv_heads * tiles.window_rows]
    by_lane = by_lane.reshape(windows, 2, kv_heads, tokens, tiles.group, -1)[:, :, :, :, :group]
    by_token = by_lane.transpose(0, 3, 1, 2, 4, 5)
    by_token = by_token.reshape(windows * tokens, 2, kv_heads * group, -1)
    first = work.first_query[query_item]
    # Queries are in order, so an item's i-th query is i rows after its first.
    item_row = jnp.searchsorted(query_item, query_item).astype(jnp.int32)
    in_block = first + jnp.arange(num_queries, dtype=jnp.int32) - item_row
    window = work.first_window[query_item] + in_block // tokens - first // tokens
    row = jnp.where(is_query, window * tokens + in_block % tokens, 0)
    mine = by_token[row]

    entry = jnp.arange(table_width, dtype=jnp.int32)[None, :]
    sinks, start, pages = (
        array[query_item][:, None] for array in (work.sink_pages, work.window_page, work.num_pages)
    )
    visible = jnp.where(entry < sinks, entry, entry - start + sinks)
    shown = (visible < pages) & ((entry < sinks) | (entry >= start)) & is_query[:, None]
    index = jnp.where(shown, visible, 0)[:, None, None, :]
    index = jnp.broadcast_to(index, (*mine.shape[:3], table_width))
    maximum, total = jnp.moveaxis(jnp.take_along_axis(mine, index, axis=3), 1, 0)
    # A sum is NaN if any score is; whether a maximum is depends on the order of comparisons.
    maximum = jnp.where(jnp.isnan(total), jnp.nan, maximum)
    shown = shown[:, None, :] & (total != 0.0)
    return jnp.where(shown, maximum, -jnp.inf), jnp.where(shown, total, 0.0)


def window_count(num_queries: int, num_items: int, tiles: Tiles, decode: bool) -> int:
    """Bound the windows of statistics: pieces that windows and items cut the queries into."""
    if decode:
        return num_items
    return -(-num_queries // tiles.tokens) * (tiles.rows // tiles.window_rows) + num_items
