"""One KV block that has arrived, folded into the rows of the item it belongs to."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int32

from kvjax.pallas_kernels.mosaic.flash import Accumulators, attention_scores, visible_slots
from kvjax.pallas_kernels.mosaic.statistics import StatisticsWriter
from kvjax.pallas_kernels.mosaic.stream import PageStream
from kvjax.pallas_kernels.mosaic.tiles import LANES, Tiles
from kvjax.pallas_kernels.mosaic.work import Scalar


class Masking(NamedTuple):
    """The static options of attention: what is seen and how it is scored.

    Attributes:
        scale: factor of the scores.
        window: tokens a query sees, itself included, or None.
        sink_tokens: first tokens that stay visible outside the window.
        soft_cap: bound of the scores, or None.
        residual: newest tokens that are not here for a query, or None; see `encoded_before`.
    """

    scale: float
    window: int | None
    sink_tokens: int
    soft_cap: float | None
    residual: int | None = None


class BlockFolder(NamedTuple):
    """Everything that folding a block touches.

    Attributes:
        q: [Hkv, rows, D], a ref in VMEM.
        stream: what the block belongs to.
        keys: [2 or 1, Hkv, pages, P, D], a ref in VMEM, where the block lies; 2 halves of a double
            buffer, or 1 that it was unpacked to.
        values: [2 or 1, Hkv, pages, P, Dv], the same of values.
        accumulators: what it is folded into.
        writer: where statistics go, or None.
        tiles: the sizes.
        masking: the options.
        decode: whether no item is longer than a window of rows.
        page_tokens: flattened like the block tables, a ref in scalar memory: how many of the first
            slots of each page at or past an item's `end_slot` its queries see; None means none.
        value_q: [Hkv, rows, Dv], a ref in VMEM: queries that score the values too, or None.
        chosen: [2, 1, slots], a ref in VMEM: 0 for slots of the block that do not count; None means
            that all do.
    """

    q: Any
    stream: PageStream
    keys: Any
    values: Any
    accumulators: Accumulators
    writer: StatisticsWriter | None
    tiles: Tiles
    masking: Masking
    decode: bool
    page_tokens: Any = None
    value_q: Any = None
    chosen: Any = None

    def fold(self, item: Scalar, block: Scalar, buffer: Scalar) -> None:
        """Fold an item's block, which lies in `buffer`, into the item's rows.

        An item of few rows (a decode, the end of a chunk) computes one window of rows, a longer
        one as many chunks as it touches; statistics are always kept by window.
        """
        if self.page_tokens is None:
            self._clean_values(item, block, buffer)
        else:
            self._clean_listed_values(item, block, buffer)
        work, tiles, writer = self.stream.work, self.tiles, self.writer
        first_row = work.first_query[item] * tiles.group
        last_row = work.end_query[item] * tiles.group - 1
        first_window = lax.div(first_row, tiles.window_rows)
        last_window = lax.div(last_row, tiles.window_rows)

        def window() -> None:
            self._fold_rows(item, block, buffer, first_window, tiles.window_rows)

        if writer is not None:

            def windows(window: Scalar, _: None) -> None:
                self._fold_rows(item, block, buffer, window, tiles.window_rows)
                writer.write(work.first_window[item] + window - first_window, block)

            lax.fori_loop(first_window, last_window + 1, windows, None)
        elif self.decode or tiles.rows == tiles.window_rows:
            window()
        else:
            pl.when(first_window == last_window)(window)

            @pl.when(first_window != last_window)
            def _() -> None:
                def chunks(chunk: Scalar, _: None) -> None:
                    self._fold_rows(item, block, buffer, chunk, tiles.chunk_rows)

                first = lax.div(first_row, tiles.chunk_rows)
                lax.fori_loop(first, lax.div(last_row, tiles.chunk_rows) + 1, chunks, None)

    def _fold_rows(
        self, item: Scalar, block: Scalar, buffer: Scalar, piece: Scalar, count: int
    ) -> None:
        """Fold a block into the `piece`-th run of `count` rows."""
        stream, tiles, masking, writer = self.stream, self.tiles, self.masking, self.writer
        work = stream.work
        start = pl.multiple_of(piece * count, count)
        rows = pl.ds(start, count)
        few = count == tiles.window_rows < LANES  # the matrix unit is that tall at least
        kv_heads, pages, page_size, _ = self.keys.shape[1:]
        num_slots = pages * page_size

        slots = self._slots(lax.broadcasted_iota(jnp.int32, (1, num_slots), 1), item, block)
        first_row = work.first_query[item] * tiles.group
        row = start + lax.broadcasted_iota(jnp.int32, (count, 1), 0)
        mine = (row >= first_row) & (row < work.end_query[item] * tiles.group)
        # Rows before the item's first have a meaningless position, and a limit that hides all.
        position = work.first_position[item] + lax.div(row - first_row, tiles.group)
        last = position
        if masking.residual is not None:
            # `encoded_before`, in a division that Mosaic has.
            behind = position - masking.residual + (page_size - 1)
            last = lax.div(jnp.maximum(behind, 0), page_size) * page_size - 1
        limit = jnp.where(mine, jnp.minimum(last, work.end_slot[item] - 1), -1)
        visible = visible_slots(
            slots, position, limit, window=masking.window, sink_tokens=masking.sink_tokens
        )
        if self.page_tokens is not None:
            visible |= mine & (slots < self._listed_end(slots, item, block))
        chosen = None if self.chosen is None else self.chosen[buffer]
        if chosen is not None:
            visible &= chosen > 0.0
            chosen = chosen.T

        def per_head(head: Scalar, _: None) -> None:
            queries = self.q[head, rows]
            keys = self.keys[_half(self.keys, buffer), head].reshape(num_slots, -1)
            values = self.values[_half(self.values, buffer), head].reshape(num_slots, -1)
            if queries.dtype == jnp.float32:
                values = values.astype(jnp.float32)
            if chosen is not None:  # 0 * NaN would be NaN, as in `_clean_values`
                kept = jnp.where(chosen > 0.0, values.astype(jnp.float32), 0.0)
                values = kept.astype(values.dtype)
            pairs = [(queries, keys)]
            if self.value_q is not None:
                pairs.append((self.value_q[head, rows], values))
            scores = attention_scores(
                pairs, visible, scale=masking.scale, soft_cap=masking.soft_cap
            )
            if writer is not None:
                writer.scores[pl.ds(pl.multiple_of(head * count, count), count)] = scores
            self.accumulators.fold(head, rows, mine, scores, values, split_weights=few)

        lax.fori_loop(0, kv_heads, per_head, None)

    def _slots(
        self, index: Int32[Array, "..."], item: Scalar, block: Scalar
    ) -> Int32[Array, "..."]:
        """Turn places in a KV block into slots of the sequence, over the pages left out between."""
        work = self.stream.work
        page_size = self.keys.shape[3]
        place = index + block * (self.stream.block_pages * page_size)
        skipped = (work.window_page[item] - work.sink_pages[item]) * page_size
        slots: Array = place + jnp.where(place < work.sink_pages[item] * page_size, 0, skipped)
        return slots

    def _listed_end(
        self, slots: Int32[Array, "..."], item: Scalar, block: Scalar
    ) -> Int32[Array, "..."]:
        """Where what counts of each slot's page ends; 0 for pages that are whole or not there."""
        _, pages, page_size, _ = self.keys.shape[1:]

        def add(page: Scalar, ends: Array) -> Array:
            first, tokens = (block * pages + page) * page_size, self._tokens(item, block, page)
            inside = (slots >= first) & (slots < first + page_size)
            return jnp.where(inside, first + tokens, ends)

        whole = lax.div(self.stream.work.end_slot[item], page_size)
        there = self.stream.work.num_pages[item] - block * pages
        ends: Array = lax.fori_loop(
            jnp.maximum(whole - block * pages, 0),
            jnp.minimum(there, pages),
            add,
            jnp.zeros(slots.shape, jnp.int32),
        )
        return ends

    def _tokens(self, item: Scalar, block: Scalar, page: Scalar) -> Scalar:
        """How many slots count of a block's page that is not whole."""
        entry = block * self.stream.block_pages + page
        tokens: Scalar = self.page_tokens[self.stream.work.table_start[item] + entry]
        return tokens

    def _clean_listed_values(self, item: Scalar, block: Scalar, buffer: Scalar) -> None:
        """Put 0 for values past what counts of a page, and in pages that were not fetched."""
        stream = self.stream
        half = _half(self.values, buffer)
        kv_heads, pages, page_size, width = self.values.shape[1:]
        whole = lax.div(stream.work.end_slot[item], page_size)
        there = stream.work.num_pages[item] - block * pages
        offset = lax.broadcasted_iota(jnp.int32, (page_size, width), 0)

        def clean(index: Scalar, _: None) -> None:
            head, page = lax.rem(index, kv_heads), lax.div(index, kv_heads)
            # A page that is not there has no entry either: a list may end before the block does.
            read = self._tokens(item, block, jnp.minimum(page, there - 1))
            tokens = jnp.where(page < there, read, 0)
            values = self.values[half, head, page].astype(jnp.float32)
            values = jnp.where(offset < tokens, values, 0.0).astype(self.values.dtype)
            self.values[half, head, page] = values

        first = jnp.maximum(whole - block * pages, 0)
        lax.fori_loop(jnp.minimum(first, pages) * kv_heads, pages * kv_heads, clean, None)

    def _clean_values(self, item: Scalar, block: Scalar, buffer: Scalar) -> None:
        """Put 0 for values that no query of the item may see: 0 * NaN would be NaN.

        Such slots lie past the item's last slot, in pages that were not fetched, or beside the
        window: only blocks that hold an edge have any.
        """
        stream, masking = self.stream, self.masking
        work = stream.work
        half = _half(self.values, buffer)
        kv_heads, pages, page_size, width = self.values.shape[1:]
        edge = block == stream.num_blocks(item) - 1
        if masking.window is not None:
            # The sinks end in the visible page just before the one where the window begins.
            page = work.sink_pages[item]
            edge |= (block * pages <= page) & (page <= (block + 1) * pages)

        @pl.when(edge)
        def _() -> None:
            shape = (pages, page_size, width)
            index = lax.broadcasted_iota(jnp.int32, shape, 0) * page_size
            index += lax.broadcasted_iota(jnp.int32, shape, 1)
            slots = self._slots(index, item, block)
            keep = slots < work.end_slot[item]
            if masking.window is not None:
                seen = slots > work.first_position[item] - masking.window
                keep &= (seen | (slots < masking.sink_tokens)) if masking.sink_tokens else seen

            def clean(head: Scalar, _: None) -> None:
                # In float32, because not every TPU selects among packed bfloat16.
                values = self.values[half, head].astype(jnp.float32)
                values = jnp.where(keep, values, 0.0).astype(self.values.dtype)
                self.values[half, head] = values

            lax.fori_loop(0, kv_heads, clean, None)


def _half(ref: Any, buffer: Scalar) -> Scalar | int:
    """Where the block in `buffer` lies: there is one place for what is unpacked."""
    return buffer if ref.shape[0] == 2 else 0
