"""Pages from HBM to VMEM, two KV blocks at a time: one is computed on while the next arrives."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.pallas_kernels.mosaic.work import Scalar, Work


class PageStream(NamedTuple):
    """The refs of the double buffer. A page of all KV heads is one contiguous copy.

    Attributes:
        work: the items, refs in scalar memory.
        tables: flattened block tables, a ref in scalar memory.
        k_pages: the pool of keys, [N, Hkv, P, D], left in HBM.
        v_pages: the pool of values, [N, Hkv, P, Dv], left in HBM.
        k_buffer: [2, Hkv, pages, P, D] in VMEM.
        v_buffer: [2, Hkv, pages, P, Dv] in VMEM.
        semaphores: DMA semaphores [2, 2]: keys and values, of each buffer.
    """

    work: Work
    tables: Any
    k_pages: Any
    v_pages: Any
    k_buffer: Any
    v_buffer: Any
    semaphores: Any

    @property
    def block_pages(self) -> int:
        """Pages of a KV block."""
        pages: int = self.k_buffer.shape[2]
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
        return slot

    def _pages(self, item: Scalar, block: Scalar) -> Scalar:
        left = self.work.num_pages[item] - block * self.block_pages
        return jnp.minimum(left, self.block_pages)

    def _copies(self, page_id: Scalar | int, slot: Scalar, page: Scalar) -> tuple[Any, Any]:
        keys = self.k_buffer.at[slot, :, page]
        values = self.v_buffer.at[slot, :, page]
        return (
            pltpu.make_async_copy(self.k_pages.at[page_id], keys, self.semaphores.at[0, slot]),
            pltpu.make_async_copy(self.v_pages.at[page_id], values, self.semaphores.at[1, slot]),
        )
