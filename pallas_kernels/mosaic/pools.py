"""Pools as the kernel takes them: what it copies page by page, and what block by block.

A plain pool is one array, whose pages are copied as they are. Of a packed pool

- codes are copied page by page, all heads of a page in one piece a plane, and stay bytes until
  they are in VMEM (`coding`). A tile of bytes has 32 rows, of which a page of 16 tokens is half;
  neither HBM nor VMEM pads it, for tiles may have 8 rows too, and 4 where a plane has no more.
  Fewer (the third bit in pages of 16 tokens, 2 bits in pages of 8) are padded to 4;
- scales and middles of a row of channels a page are copied likewise, where heads and channels fill
  tiles; a head's rows of a block are told apart once they are float32;
- others are too narrow for that: a scale a token is a column, which a TPU pads to 128 lanes. XLA
  gathers them along each item's pages, in the order in which the kernel reads pages, as dense
  arrays of one contiguous piece a KV block (`factors`). As XLA keeps pages in the lanes of narrow
  arrays, it turns all of a pool's narrow scales first: pools far larger than what is read of them
  pay for that. They are a small part of a pool; codes are never gathered;
- a scale that all pages share is one such piece for all blocks.

Codes of head_dim below 128 need the layout of `layout`, as plain pools do; scales are read as XLA
lays them.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from kvjax.pallas_kernels.mosaic.coding import Coding, Spread
from kvjax.pallas_kernels.mosaic.factors import PageIds, block_factor, shared_factor
from kvjax.pallas_kernels.mosaic.stream import Copied
from kvjax.pallas_kernels.mosaic.tiles import LANES
from kvjax.pallas_kernels.mosaic.work import Work, pages_in_order
from kvjax.pallas_kernels.packed_bits import PLANES
from kvjax.pallas_kernels.packed_pages import KeyPool, PackedPages, ValuePool


class BlockPool(NamedTuple):
    """What the kernel reads of a pool.

    Attributes:
        copied: its arrays, in HBM.
        coding: how to unpack a block; None where pages hold elements.
    """

    copied: Copied
    coding: Coding | None

    @property
    def page_shape(self) -> tuple[int, int]:
        """Tokens and elements of a head's page."""
        rows, dim = self.copied.pages[0].shape[2:]
        return (rows if self.coding is None else rows * 8 // self.coding.widths[0]), dim


def block_itemsize(pools: tuple[KeyPool, ValuePool], q_dtype: jnp.dtype) -> int:
    """Bytes of an element of a KV block in VMEM: codes are unpacked to the queries' dtype."""
    return max(
        (q_dtype if isinstance(pool, PackedPages) else pool.dtype).itemsize for pool in pools
    )


def block_pool(
    pool: KeyPool,
    work: Work,
    block_tables: Int32[Array, "B M"],
    *,
    block_pages: int,
    one_head: bool,
) -> BlockPool:
    """Make what the kernel reads of a pool.

    Args:
        pool: [N, Hkv, P, D], plain or packed.
        work: the items.
        block_tables: int32 [B, M].
        block_pages: pages of a KV block.
        one_head: take the pool as N * Hkv pages of one head each, which lie the same way; tables
            then say page * Hkv + head.
    """
    count, heads, page_size, dim = pool.shape

    def in_place(array: Array) -> Array:
        return array.reshape(count * heads, 1, *array.shape[2:]) if one_head else array

    if not isinstance(pool, PackedPages):
        return BlockPool(Copied((in_place(pool),)), None)
    table = jnp.clip(pages_in_order(work, block_tables), 0, count * (heads if one_head else 1) - 1)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % block_pages)))
    page_ids = PageIds(table.reshape(table.shape[0], -1, block_pages), heads if one_head else None)
    shape = (1 if one_head else heads, page_size, dim)
    spread: list[Spread] = []
    rows, factors = [], []
    for name in ("scale", "middle"):
        stored = getattr(pool, name)
        if stored is None:
            continue
        if name in pool.shared:
            factor = shared_factor(stored, page_ids, shape)
        elif not one_head and _is_row_a_page(stored, shape):
            rows.append(stored[:, :, 0])
            spread.append("page")
            continue
        else:
            factor = block_factor(stored, page_ids, shape)
        factors.append(factor.array)
        spread.append("channel" if factor.by_channel else "slot")
    if pool.unit is not None:
        factors.append(block_factor(pool.unit, page_ids, shape).array)
    coding = Coding(
        bits=pool.bits,
        kind=pool.dtype.name,
        centre=pool.centre,
        spread=tuple(spread),
        has_unit=pool.unit is not None,
    )
    names = ("codes",) if pool.bits == 8 else tuple(PLANES[pool.bits])
    planes = tuple(in_place(pool.planes[name]) for name in names)
    return BlockPool(Copied(planes, tuple(rows), tuple(factors)), coding)


def _is_row_a_page(stored: Array, shape: tuple[int, int, int]) -> bool:
    """Whether scales can be copied as codes are: a row a page and head, which fill whole tiles."""
    heads, _, dim = shape
    loaded = stored.dtype != jnp.float16  # by every TPU
    filled = heads % 8 == 0 or (heads in (1, 2, 4) and heads * stored.dtype.itemsize >= 4)
    return loaded and stored.shape[1:] == (heads, 1, dim) and dim % LANES == 0 and filled
