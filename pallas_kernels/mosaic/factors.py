"""Scales and middles of packed pages, gathered so that each KV block's are one dense piece."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


class Factor(NamedTuple):
    """A scale or a middle, as the kernel copies it.

    Attributes:
        array: [W, kv_blocks, Hkv, rows, D] by channel, a row for slots / rows slots of the block;
            or else [W, kv_blocks, Hkv, Dc, slots], a slot a lane. The first two axes are 1 where
            all blocks share it. bfloat16 if that is exact, else float32.
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
        """Gather what pages have, as rows of all of it: narrow ones would be slow."""
        count, kept_heads, *groups = values.shape
        if self.heads is None:
            gathered = values.reshape(count, -1).at[self.ids].get(mode="clip")
        else:
            head = self.ids % self.heads if kept_heads > 1 else jnp.zeros_like(self.ids)
            page = self.ids // self.heads if count > 1 else jnp.zeros_like(self.ids)
            gathered = values.reshape(count, kept_heads, -1).at[page, head].get(mode="clip")
        return gathered.reshape(*self.ids.shape, -1, *groups)


def block_factor(
    stored: Float[Array, "N heads Pt Dc"],
    unit: Float[Array, "N heads 1 1"] | None,
    pages: PageIds,
    shape: tuple[int, int, int],
) -> Factor:
    """Gather a factor along the pages that items read.

    Args:
        stored: `PackedPages.scale` or `middle`.
        unit: what float8 ones are multiplied by: a power of two, or the product is rounded.
        pages: the pages.
        shape: of a page: heads, tokens, channels.
    """
    listed = pages.of(stored).astype(_exact(stored))
    if unit is not None:
        product = listed.astype(jnp.float32) * pages.of(unit).astype(jnp.float32)
        listed = product.astype(listed.dtype)
    return _by_block(listed, shape)


def shared_factor(
    stored: Float[Array, "1 heads Pt Dc"], pages: PageIds, shape: tuple[int, int, int]
) -> Factor:
    """Lay out a factor that all pages share: once for all blocks, unless those differ in it.

    Args:
        stored: `PackedPages.scale` or `middle`.
        pages: the pages.
        shape: of a page: heads, tokens, channels.
    """
    kept = stored.astype(_exact(stored))
    if kept.shape[2] == 1 and kept.shape[1] in (1, shape[0]):
        once = jnp.broadcast_to(kept, (1, shape[0], 1, shape[2]))
        return Factor(once[None], by_channel=True)
    if pages.heads is not None:
        return _by_block(pages.of(kept), shape)
    return _by_block(jnp.broadcast_to(kept, (*pages.ids.shape, *kept.shape[1:])), shape)


def _exact(stored: Array) -> jnp.dtype:
    """The dtype that holds a stored factor as it is: float8 has fewer bits than bfloat16."""
    narrow = stored.dtype == jnp.bfloat16 or stored.dtype.itemsize == 1
    return jnp.dtype(jnp.bfloat16 if narrow else jnp.float32)


def _by_block(
    listed: Float[Array, "W kv_blocks pages _ Pt Dc"], shape: tuple[int, int, int]
) -> Factor:
    """Bring the heads before the pages, and slots into lanes where channels do not fill them."""
    heads, page_size, dim = shape
    items, blocks, pages, _, rows, columns = listed.shape
    listed = jnp.broadcast_to(listed, (items, blocks, pages, heads, rows, columns))
    listed = listed.swapaxes(2, 3)
    if columns == dim:
        rows *= pages
        return Factor(listed.reshape(items, blocks, heads, rows, dim), by_channel=True)
    by_slot = jnp.repeat(listed, page_size // rows, axis=4)
    by_slot = by_slot.reshape(items, blocks, heads, pages * page_size, columns)
    return Factor(by_slot.swapaxes(3, 4), by_channel=False)
