"""Pages from HBM to VMEM, two KV blocks at a time: one is computed on while the next arrives."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.pallas_kernels.mosaic.work import Scalar, Work


class Copied(NamedTuple):
    """What is copied of a pool of keys, or of values; or the buffers it is copied to.

    Attributes:
        pages: [N, Hkv, rows, width] each, copied page by page: elements, or planes of codes. A page
            of all KV heads is one contiguous copy. Buffers are [2, Hkv, pages, rows, width].
        rows: [N, Hkv, D] each, copied likewise: scales and middles of a row a page. Buffers are
            [2, pages, Hkv, D].
        factors: [W or 1, kv_blocks or 1, ...] each, copied block by block: see `factors`. Buffers
            are [2, ...].
    """

    pages: tuple[Any, ...]
    rows: tuple[Any, ...] = ()
    factors: tuple[Any, ...] = ()


class PageStream(NamedTuple):
    """The refs of the double buffer.

    Attributes:
        work: the items, refs in scalar memory.
        tables: flattened block tables, a ref in scalar memory.
        pools: of keys, of values and of what else is copied by block, left in HBM.
        buffers: of the same, in VMEM.
        semaphores: DMA semaphores [2, arrays]: of each buffer, of each array that is copied.
    """

    work: Work
    tables: Any
    pools: tuple[Copied, ...]
    buffers: tuple[Copied, ...]
    semaphores: Any

    @property
    def block_pages(self) -> int:
        """Pages of a KV block."""
        pages: int = self.buffers[0].pages[0].shape[2]
        return pages

    def num_blocks(self, item: Scalar) -> Scalar:
        """Count the KV blocks an item reads."""
        return lax.div(self.work.num_pages[item] + (self.block_pages - 1), self.block_pages)

    def slot(self, item: Scalar, block: Scalar) -> Scalar:
        """Name the buffer (0 or 1) of an item's block: they alternate over all items."""
        return lax.rem(self.work.first_block[item] + block, 2)

    def first_item(self) -> Scalar:
        """Find the first item that reads anything; the number of items if none does."""
        return jnp.where(self.work.num_pages[0] > 0, 0, self.work.next_item[0])

    def start(self, item: Scalar, block: Scalar) -> None:
        """Start the copies of an item's block; of no block if `item` is past the last."""
        items = self.work.num_pages.shape[0]

        @pl.when(item < items)
        def _() -> None:
            slot = self.slot(item, block)

            def copy(page: Scalar, _: None) -> None:
                visible = block * self.block_pages + page
                skipped = self.work.window_page[item] - self.work.sink_pages[item]
                entry = visible + jnp.where(visible < self.work.sink_pages[item], 0, skipped)
                for dma in self._copies(
                    self.tables[self.work.table_start[item] + entry], slot, page
                ):
                    dma.start()

            lax.fori_loop(0, self._pages(item, block), copy, None)
            for dma in self._factor_copies(item, block, slot):
                dma.start()

    def start_next(self, item: Scalar, block: Scalar) -> None:
        """Start the block after this one: the item's next, or the next item's first."""
        more = block + 1 < self.num_blocks(item)
        self.start(jnp.where(more, item, self.work.next_item[item]), jnp.where(more, block + 1, 0))

    def wait(self, item: Scalar, block: Scalar) -> Scalar:
        """Wait until an item's block is here, and return its buffer."""
        slot = self.slot(item, block)

        def done(page: Scalar, _: None) -> None:
            # Only the size counts in a wait, so any page may stand for the one that was copied.
            for dma in self._copies(0, slot, page):
                dma.wait()

        lax.fori_loop(0, self._pages(item, block), done, None)
        for dma in self._factor_copies(item, block, slot):
            dma.wait()
        return slot

    def _pages(self, item: Scalar, block: Scalar) -> Scalar:
        left = self.work.num_pages[item] - block * self.block_pages
        return jnp.minimum(left, self.block_pages)

    def _copies(self, page_id: Scalar | int, slot: Scalar, page: Scalar) -> list[Any]:
        pools = [pool.at[page_id] for side in self.pools for pool in (*side.pages, *side.rows)]
        places = [
            place
            for side in self.buffers
            for place in (
                *(buffer.at[slot, :, page] for buffer in side.pages),
                *(buffer.at[slot, page] for buffer in side.rows),
            )
        ]
        return [
            pltpu.make_async_copy(pool, place, self.semaphores.at[slot, which])
            for which, (pool, place) in enumerate(zip(pools, places, strict=True))
        ]

    def _factor_copies(self, item: Scalar, block: Scalar, slot: Scalar) -> list[Any]:
        def of_block(factor: Any) -> Any:
            items, blocks = factor.shape[:2]
            return factor.at[item if items > 1 else 0, block if blocks > 1 else 0]

        factors = [factor for side in self.pools for factor in side.factors]
        buffers = [buffer for side in self.buffers for buffer in side.factors]
        first = self.semaphores.shape[1] - len(factors)
        return [
            pltpu.make_async_copy(
                of_block(factor), buffer.at[slot], self.semaphores.at[slot, first + which]
            )
            for which, (factor, buffer) in enumerate(zip(factors, buffers, strict=True))
        ]
