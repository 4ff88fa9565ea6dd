"""Tokens of a layer whose full pages are packed: some as they are, the others encoded once.

A page is encoded when it leaves the newest R tokens of its sequence, R being the format's
`recent`; the first tokens, as many as the format's `sinks` say, never are. When that is, is a rule
of positions alone (`encoded_before`), so that the same pages hold the same codes whether tokens
came in chunks or one by one, and in whatever batch.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache.pages import put_packed, set_page, with_layer
from kvjax.cache.state import PagedKVCache, Recent
from kvjax.formats import LayerFormat, PagePacking
from kvjax.pallas_kernels.packed_pages import PackedPages
from kvjax.pallas_kernels.residual import encoded_before


def encoded_lengths(cache: PagedKVCache) -> Int32[Array, " B"]:
    """Where the tokens end that are encoded in layers that have a format, in each sequence.

    They begin after the sinks; where this is not past those, nothing is encoded.
    """
    return encoded_before(cache.lengths, cache.recent_tokens, cache.page_size)


def recent_slots(cache: PagedKVCache) -> tuple[Int32[Array, "B S"], Bool[Array, "B S"]]:
    """Which token of its sequence each row of `recent` holds, and whether that token counts.

    Returns:
      The token's slot, int32 [B, S + R], and false where it is encoded, or no token is.
    """
    slots = _slots_of_rows(cache, cache.lengths)
    is_sink = jnp.arange(slots.shape[1], dtype=jnp.int32)[None, :] < cache.sink_tokens
    return slots, (slots >= 0) & (is_sink | (slots >= encoded_lengths(cache)[:, None]))


def encode_due(cache: PagedKVCache, active: Bool[Array, " B"]) -> PagedKVCache:
    """Encode the pages that leave `recent` when one more token comes to each active sequence.

    To be called once, before the token's layers run. They go on seeing the page's tokens in
    `recent`, where the token will stand in place of one of them.

    Args:
      cache: the cache, with the token's page reserved.
      active: bool [B].
    """
    layers = [layer for layer, recent in enumerate(cache.recent) if recent is not None]
    if not layers:
        return cache
    size, room = cache.page_size, cache.recent_tokens
    before = encoded_lengths(cache)
    column = jnp.minimum(before // size, cache.max_pages - 1)
    page = jnp.take_along_axis(cache.block_tables, column[:, None], axis=1)[:, 0]
    due = active & (encoded_before(cache.lengths + 1, room, size) > before)
    due &= (page < cache.num_pages) & (before >= cache.sink_tokens)
    (rows,) = jnp.nonzero(due, size=cache.batch)

    def encode_row(i: Int32[Array, ""], pools: tuple[PackedPages, ...]) -> tuple[PackedPages, ...]:
        row = rows[i]
        position = before[row] + cache.skipped[row]
        filled = list(pools)
        for packing, members in _alike(cache, layers):
            rings = [_rings(cache)[member] for member in members]
            at = (row, cache.recent_row(before[row]), 0, 0)
            pages = [lax.dynamic_slice(x, at, (1, size, *x.shape[2:])) for x in rings]
            stacked = jnp.concatenate(pages).swapaxes(1, 2)
            packed = packing.encode(stacked, jnp.broadcast_to(position, (len(members),)))
            for nth, member in enumerate(members):
                filled[member] = _set_nth(pools[member], packed, nth, page[row])
        return tuple(filled)

    pools = tuple(pool for layer in layers for pool in _pools(cache, layer))
    pools = lax.fori_loop(0, due.sum(dtype=jnp.int32), encode_row, pools)
    for nth, layer in enumerate(layers):
        cache = with_layer(cache, layer, *pools[2 * nth : 2 * nth + 2])
    return cache


def put_token(
    cache: PagedKVCache,
    layer: int,
    keys: Float[Array, "B Hkv D"],
    values: Float[Array, "B Hkv Dv"],
    active: Bool[Array, " B"],
) -> PagedKVCache:
    """Store one token a sequence in a layer with a format, after `encode_due`.

    Args:
      cache: the cache.
      layer: index of the layer, static.
      keys: [B, Hkv, D].
      values: [B, Hkv, Dv].
      active: bool [B]; the others store nothing.
    """
    recent, _ = _of(cache, layer)
    row = jnp.where(active, jnp.arange(cache.batch, dtype=jnp.int32), cache.batch)
    at = (row, cache.recent_row(cache.lengths))

    def written(ring: Array, new: Array) -> Array:
        return ring.at[at].set(new.astype(ring.dtype), mode="drop")

    return _with(cache, layer, Recent(written(recent.keys, keys), written(recent.values, values)))


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
    size, room, tokens = cache.page_size, cache.recent_tokens, keys.shape[0]
    rows = recent.keys.shape[1]
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
    slot = first[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :]  # [most, P]
    held = slot < cache.lengths[row][:, None]
    source = jnp.where(
        held,
        row[:, None] * rows + cache.recent_row(slot),
        cache.batch * rows + starts[row][:, None] + slot - cache.lengths[row][:, None],
    )
    column = jnp.minimum(first // size, cache.max_pages - 1)
    due &= first >= cache.sink_tokens
    page = jnp.where(due, cache.block_tables[row, column], cache.num_pages)

    def pages_of(ring: Array, new: Array) -> Array:
        flat = jnp.concatenate([ring.reshape(-1, *ring.shape[2:]), new.astype(ring.dtype)])
        return flat.at[source].get(mode="clip").swapaxes(1, 2)

    position = first + cache.skipped[row]
    packed = (
        chosen.keys.encode(pages_of(recent.keys, keys), position),
        chosen.values.encode(pages_of(recent.values, values), position),
    )
    pools = put_packed(_pools(cache, layer), packed, page)
    slots = _slots_of_rows(cache, cache.lengths + counts)
    is_new = slots >= cache.lengths[:, None]
    at = starts[:, None] + slots - cache.lengths[:, None]

    def renewed(ring: Array, new: Array) -> Array:
        taken = new.astype(ring.dtype).at[at].get(mode="clip")
        return jnp.where(is_new[:, :, None, None], taken, ring)

    newest = Recent(renewed(recent.keys, keys), renewed(recent.values, values))
    return _with(with_layer(cache, layer, *pools), layer, newest)


def _slots_of_rows(cache: PagedKVCache, lengths: Int32[Array, " B"]) -> Int32[Array, "B S"]:
    """The newest slot that falls to each row of `recent`; negative where there is none."""
    sinks, room = cache.sink_tokens, cache.recent_tokens
    last = lengths[:, None] - 1
    first = jnp.arange(sinks, dtype=jnp.int32)[None, :]
    row = jnp.arange(room, dtype=jnp.int32)[None, :]
    newest = last - (last - row) % room
    return jnp.concatenate(
        [jnp.where(first <= last, first, -1), jnp.where(newest < sinks, -1, newest)], axis=1
    )


def _of(cache: PagedKVCache, layer: int) -> tuple[Recent, LayerFormat]:
    recent = cache.recent[layer]
    chosen = None if cache.format is None else cache.format.layer(cache.spec, layer)
    assert recent is not None
    assert chosen is not None
    return recent, chosen


def _pools(cache: PagedKVCache, layer: int) -> tuple[PackedPages, PackedPages]:
    keys, values = cache.pools(layer)
    assert isinstance(keys, PackedPages)
    assert isinstance(values, PackedPages)
    return keys, values


def _rings(cache: PagedKVCache) -> list[Array]:
    """Keys and values of each layer with a format, in turn: what stands in `recent`."""
    return [
        x for recent in cache.recent if recent is not None for x in (recent.keys, recent.values)
    ]


def _alike(cache: PagedKVCache, layers: list[int]) -> list[tuple[PagePacking, list[int]]]:
    """The pools of all layers, grouped by how they are packed and what shape pages have."""
    groups: dict[Any, tuple[PagePacking, list[int]]] = {}
    for nth, layer in enumerate(layers):
        _, chosen = _of(cache, layer)
        for part, packing in enumerate((chosen.keys, chosen.values)):
            member = 2 * nth + part
            shape = _rings(cache)[member].shape
            groups.setdefault((packing, shape), (packing, []))[1].append(member)
    return list(groups.values())


def _set_nth(
    pool: PackedPages, packed: PackedPages, nth: int, page: Int32[Array, ""]
) -> PackedPages:
    """Write the nth of some packed pages into a pool."""
    return pool.map_stored(lambda x, y: set_page(x, y[nth : nth + 1], page), packed)


def _with(cache: PagedKVCache, layer: int, recent: Recent) -> PagedKVCache:
    rest = (cache.recent[:layer], cache.recent[layer + 1 :])
    return dataclasses.replace(cache, recent=(*rest[0], recent, *rest[1]))
