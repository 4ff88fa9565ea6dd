"""Scales and middles of packed pages, gathered so that each KV block's are one dense piece."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.pallas_kernels.mosaic.tiles import LANES


class Factor(NamedTuple):
    """A scale or a middle, or their units, as the kernel copies it.

    In the dtype that it has, but for float16, which not every TPU loads: float32.

    Attributes:
        array: [W, kv_blocks, Hkv, rows, D] by channel, a row for slots / rows slots of the block;
            or else [W, kv_blocks, Hkv, columns, slots], a slot a lane. The first two axes are 1
            where all blocks share it.
        by_channel: whether it is the former.
    """

    array: Array
    by_channel: bool


class PageIds(NamedTuple):
    """The pages that items read, block by block.

    Attributes:
        ids: int32 [W, kv_blocks, pages]: pages of all heads, each from 0 to N - 1; or of one head
            each, page * heads + head.
        heads: KV heads of the pool in the latter case; None in the former.
    """

    ids: Int32[Array, "W kv_blocks pages"]
    heads: int | None

    def of(
        self, values: Float[Array, "N heads Pt Dc"]
    ) -> Float[Array, "W kv_blocks pages _ Pt Dc"]:
        """Gather what pages have."""
        count, kept_heads, *groups = values.shape
        if groups[1] < LANES:
            # XLA keeps pages in the lanes then, and must turn the array: less as rows of a page.
            values = values.reshape(count, *([] if self.heads is None else [kept_heads]), -1)
        if self.heads is None:
            gathered = values.at[self.ids].get(mode="clip")
        else:
            head = self.ids % self.heads if kept_heads > 1 else jnp.zeros_like(self.ids)
            page = self.ids // self.heads if count > 1 else jnp.zeros_like(self.ids)
            gathered = values.at[page, head].get(mode="clip")
        return gathered.reshape(*self.ids.shape, -1, *groups)


def block_factor(
    stored: Float[Array, "N heads Pt Dc"], pages: PageIds, shape: tuple[int, int, int]
) -> Factor:
    """Gather a factor along the pages that items read.

    Args:
        stored: `scale`, `middle` or `unit` of `PackedPages`.
        pages: the pages.
        shape: of a page: heads, tokens, channels.
    """
    return _by_block(pages.of(stored), shape)


def shared_factor(
    stored: Float[Array, "1 heads Pt Dc"], pages: PageIds, shape: tuple[int, int, int]
) -> Factor:
    """Lay out a factor that all pages share: once for all blocks, unless those differ in it.

    Args:
        stored: `scale` or `middle` of `PackedPages`.
        pages: the pages.
        shape: of a page: heads, tokens, channels.
    """
    if stored.dtype == jnp.float16:
        stored = stored.astype(jnp.float32)
    if stored.shape[2] == 1 and stored.shape[1] in (1, shape[0]):
        once = jnp.broadcast_to(stored, (1, shape[0], 1, shape[2]))
        return Factor(once[None], by_channel=True)
    if pages.heads is not None:
        return _by_block(pages.of(stored), shape)
    return _by_block(jnp.broadcast_to(stored, (*pages.ids.shape, *stored.shape[1:])), shape)


def _by_block(
    listed: Float[Array, "W kv_blocks pages _ Pt Dc"], shape: tuple[int, int, int]
) -> Factor:
    """Bring the heads before the pages, and slots into lanes where channels do not fill them."""
    heads, page_size, dim = shape
    if listed.dtype == jnp.float16:
        listed = listed.astype(jnp.float32)
    items, blocks, pages, _, rows, columns = listed.shape
    listed = jnp.broadcast_to(listed, (items, blocks, pages, heads, rows, columns))
    if columns == dim:
        listed = listed.swapaxes(2, 3)
        return Factor(listed.reshape(items, blocks, heads, pages * rows, dim), by_channel=True)
    by_slot = listed.transpose(0, 1, 3, 5, 2, 4)
    by_slot = jnp.repeat(by_slot, page_size // rows, axis=5)
    by_slot = by_slot.reshape(items, blocks, heads, columns, pages * page_size)
    return Factor(by_slot, by_channel=False)
