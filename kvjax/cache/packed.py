"""Tokens of a layer whose full pages are packed: the newest as they are, older ones encoded once.

A page is encoded when it leaves the newest R tokens of its sequence, R being the format's
`recent`. When that is, is a rule of positions alone (`encoded_before`), so that the same pages
hold the same codes whether tokens came in chunks or one by one, and in whatever batch.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache.pages import put_pages, set_page, with_layer
from kvjax.cache.state import PagedKVCache, Recent
from kvjax.formats import LayerFormat
from kvjax.pallas_kernels.packed_pages import PackedPages
from kvjax.pallas_kernels.residual import encoded_before


def encoded_lengths(cache: PagedKVCache) -> Int32[Array, " B"]:
    """Tokens of each sequence that are encoded, in layers that have a format."""
    assert cache.format is not None
    return encoded_before(cache.lengths, cache.format.recent(cache.page_size), cache.page_size)


def recent_slots(cache: PagedKVCache) -> tuple[Int32[Array, "B R"], Bool[Array, "B R"]]:
    """Which token of its sequence each row of `recent` holds, and whether that token counts.

    Returns:
      The token's slot, int32 [B, R], and false where it is encoded, or no token is.
    """
    assert cache.format is not None
    slots = _newest_slots(cache.lengths, cache.format.recent(cache.page_size))
    return slots, slots >= encoded_lengths(cache)[:, None]


def put_token(
    cache: PagedKVCache,
    layer: int,
    keys: Float[Array, "B Hkv D"],
    values: Float[Array, "B Hkv Dv"],
    active: Bool[Array, " B"],
) -> PagedKVCache:
    """Store one token a sequence in a layer with a format; encode the page that leaves `recent`.

    Args:
      cache: the cache, with the token's page reserved.
      layer: index of the layer, static.
      keys: [B, Hkv, D].
      values: [B, Hkv, Dv].
      active: bool [B]; the others store nothing.
    """
    recent, chosen = _of(cache, layer)
    size, room = cache.page_size, recent.keys.shape[1]
    before = encoded_before(cache.lengths, room, size)
    after = encoded_before(cache.lengths + 1, room, size)
    column = jnp.minimum(before // size, cache.max_pages - 1)
    page = jnp.take_along_axis(cache.block_tables, column[:, None], axis=1)[:, 0]
    due = active & (after > before) & (page < cache.num_pages)
    (rows,) = jnp.nonzero(due, size=cache.batch)

    def encode_row(i: Int32[Array, ""], pools: tuple[PackedPages, PackedPages]) -> Any:
        row = rows[i]

        def page_of(ring: Array) -> Array:
            at = (row, before[row] % room, 0, 0)
            page = lax.dynamic_slice(ring, at, (1, size, *ring.shape[2:]))
            return page.swapaxes(1, 2)

        position = (before[row] + cache.skipped[row])[None]
        packed = (
            chosen.keys.encode(page_of(recent.keys), position),
            chosen.values.encode(page_of(recent.values), position),
        )
        pairs = zip(pools, packed, strict=True)
        return tuple(
            pool.map_stored(lambda x, y: set_page(x, y, page[row]), y) for pool, y in pairs
        )

    pools = lax.fori_loop(0, due.sum(dtype=jnp.int32), encode_row, _pools(cache, layer))
    row = jnp.where(active, jnp.arange(cache.batch, dtype=jnp.int32), cache.batch)
    at = (row, cache.lengths % room)

    def written(ring: Array, new: Array) -> Array:
        return ring.at[at].set(new.astype(ring.dtype), mode="drop")

    newest = Recent(written(recent.keys, keys), written(recent.values, values))
    return _with(cache, layer, pools, newest)


def put_chunk(
    cache: PagedKVCache,
    layer: int,
    keys: Float[Array, "T Hkv D"],
    values: Float[Array, "T Hkv Dv"],
    cu_lengths: Int32[Array, " B1"],
    ok: Bool[Array, ""] | bool = True,
) -> PagedKVCache:
    """Store a ragged chunk in a layer with a format; encode the pages that leave `recent`.

    Args:
      cache: the cache, with pages reserved.
      layer: index of the layer, static.
      keys: [T, Hkv, D].
      values: [T, Hkv, Dv].
      cu_lengths: int32 [B + 1], where each sequence's tokens start in the chunk.
      ok: whether to store anything.
    """
    recent, chosen = _of(cache, layer)
    size, room, tokens = cache.page_size, recent.keys.shape[1], keys.shape[0]
    starts, counts = cu_lengths[:-1], jnp.where(ok, jnp.diff(cu_lengths), 0)
    before = encoded_before(cache.lengths, room, size)
    after = encoded_before(cache.lengths + counts, room, size)

    # The j-th page to encode is page (j - those of earlier sequences) after what is encoded.
    ends = jnp.cumsum((after - before) // size, dtype=jnp.int32)
    most = -(-tokens // size) + cache.batch
    index = jnp.arange(most, dtype=jnp.int32)
    row = jnp.sum(index[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    due = row < cache.batch
    row = jnp.minimum(row, cache.batch - 1)
    first = before[row] + (index - (ends[row] - (after - before)[row] // size)) * size
    slot = first[:, None] + jnp.arange(size, dtype=jnp.int32)  # [most, P]
    held = slot < cache.lengths[row][:, None]
    source = jnp.where(
        held,
        row[:, None] * room + slot % room,
        cache.batch * room + starts[row][:, None] + slot - cache.lengths[row][:, None],
    )
    column = jnp.minimum(first // size, cache.max_pages - 1)
    page = jnp.where(due, cache.block_tables[row, column], cache.num_pages)

    def pages_of(ring: Array, new: Array) -> Array:
        flat = jnp.concatenate([ring.reshape(-1, *ring.shape[2:]), new.astype(ring.dtype)])
        return flat.at[source].get(mode="clip").swapaxes(1, 2)

    position = first + cache.skipped[row]
    packed = (
        chosen.keys.encode(pages_of(recent.keys, keys), position),
        chosen.values.encode(pages_of(recent.values, values), position),
    )
    pools = tuple(
        pool.map_stored(lambda x, y: put_pages(x, y, page), new)
        for pool, new in zip(_pools(cache, layer), packed, strict=True)
    )
    slots = _newest_slots(cache.lengths + counts, room)
    is_new = slots >= cache.lengths[:, None]
    at = starts[:, None] + slots - cache.lengths[:, None]

    def renewed(ring: Array, new: Array) -> Array:
        taken = new.astype(ring.dtype).at[at].get(mode="clip")
        return jnp.where(is_new[:, :, None, None], taken, ring)

    newest = Recent(renewed(recent.keys, keys), renewed(recent.values, values))
    return _with(cache, layer, pools, newest)


def _newest_slots(lengths: Int32[Array, " B"], room: int) -> Int32[Array, "B R"]:
    """The newest slot that falls to each row of a ring; negative where there is none."""
    row = jnp.arange(room, dtype=jnp.int32)
    last = lengths[:, None] - 1
    return last - (last - row) % room


def _of(cache: PagedKVCache, layer: int) -> tuple[Recent, LayerFormat]:
    recent = cache.recent[layer]
    chosen = None if cache.format is None else cache.format.layer(cache.spec, layer)
    assert recent is not None
    assert chosen is not None
    return recent, chosen


def _pools(cache: PagedKVCache, layer: int) -> tuple[PackedPages, PackedPages]:
    keys, values = cache.k_pages[layer], cache.v_pages[layer]
    assert isinstance(keys, PackedPages)
    assert isinstance(values, PackedPages)
    return keys, values


def _with(cache: PagedKVCache, layer: int, pools: Any, recent: Recent) -> PagedKVCache:
    cache = with_layer(cache, layer, *pools)
    return dataclasses.replace(
        cache, recent=(*cache.recent[:layer], recent, *cache.recent[layer + 1 :])
    )
