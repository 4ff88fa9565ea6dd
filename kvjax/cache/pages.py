"""Rows in, rows out: writing tokens into pages, reading sequences back, copying pages."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from kvjax.cache.state import IndexPages, PagedKVCache
from kvjax.pallas_kernels.packed_pages import KeyPool, PackedPages, ValuePool, plain
from kvjax.pallas_kernels.residual import encoded_before
from kvjax.pallas_kernels.support import target_platform


def token_slots(
    cache: PagedKVCache,
    sequences: Int32[Array, " T"],
    positions: Int32[Array, " T"],
    layer: int = 0,
) -> tuple[Int32[Array, " T"], Int32[Array, " T"]]:
    """Where tokens go: the page and the slot within it.

    Args:
      cache: the cache, with pages reserved.
      sequences: int32 [T], the sequence of each token; B or more is padding.
      positions: int32 [T], each token's index among its sequence's cached tokens, from 0.
      layer: in which layer; layers differ where some keep rings.

    Returns:
      Page ids int32 [T], N for padding and for tokens without a page (writes there are dropped),
      and slots int32 [T], 0 to P - 1.
    """
    column = positions // cache.page_size
    known = (sequences < cache.batch) & (column < cache.max_pages) & (positions >= 0)
    pages = cache.tables(layer).at[sequences, column].get(mode="clip")
    return jnp.where(known, pages, cache.num_pages), positions % cache.page_size


def write(
    cache: PagedKVCache,
    layer: int,
    keys: Float[Array, "T Hkv D"],
    values: Float[Array, "T Hkv Dv"],
    slots: tuple[Int32[Array, " T"], Int32[Array, " T"]],
) -> PagedKVCache:
    """Store one layer's keys and values of T tokens, in a layer without a format.

    Args:
      cache: the cache.
      layer: index of the layer, 0 to L - 1, static.
      keys: [T, Hkv, D], position encoding applied; cast to the pool's dtype.
      values: [T, Hkv, Dv].
      slots: what `token_slots` said; it is the same for layers of one `ring`. A slot must not occur
        twice.
    """
    page, offset = slots
    k_pool, v_pool = cache.pools(layer)
    assert cache.spec.source(layer) == layer, f"layer {layer} stores nothing"
    assert not isinstance(k_pool, PackedPages)
    assert not isinstance(v_pool, PackedPages)
    k_pool = put_rows(k_pool, keys.astype(k_pool.dtype), page, offset)
    v_pool = put_rows(v_pool, values.astype(v_pool.dtype), page, offset)
    return with_layer(cache, layer, k_pool, v_pool)


def put_rows(
    pool: Shaped[Array, "N Hkv P D"],
    rows: Shaped[Array, "T Hkv D"],
    page: Int32[Array, " T"],
    offset: Int32[Array, " T"],
) -> Shaped[Array, "N Hkv P D"]:
    """Store rows in a pool of their dtype, in place.

    Args:
      pool: [N, Hkv, P, D].
      rows: [T, Hkv, D].
      page: int32 [T], N or more stores nothing.
      offset: int32 [T], slots within pages.
    """
    if scatter_copies(pool):
        return _put_blocks(pool, rows[:, :, None], page, offset)
    heads = jnp.arange(rows.shape[1], dtype=jnp.int32)
    # Indexing page, head and slot together keeps XLA from transposing the pool for the scatter.
    at = (page[:, None], heads[None, :], offset[:, None])
    return pool.at[at].set(rows, mode="drop")


def scatter_copies(pool: Array) -> bool:
    """Whether a scatter takes the whole pool through float32, as on CPU with JAX 0.10."""
    return pool.dtype.itemsize < 4 and target_platform() == "cpu"


def _put_blocks(
    pool: Shaped[Array, "N Hkv P D"],
    blocks: Shaped[Array, "n Hkv slots D"],
    page: Int32[Array, " n"],
    offset: Int32[Array, " n"],
) -> Shaped[Array, "N Hkv P D"]:
    """Store one block after the other, in place; page N or more stores nothing.

    An update of a slice, of the pool seen as integers, moves the slice alone. It has no mode that
    drops, as a scatter has, so the loop is over what is not dropped.
    """
    bits = jnp.dtype(f"uint{8 * pool.dtype.itemsize}")
    known = page < pool.shape[0]
    (kept,) = jnp.nonzero(known, size=page.shape[0])

    def put(i: Int32[Array, ""], pool: Array) -> Array:
        block = kept[i]
        at = (page[block], 0, offset[block], 0)
        whole = lax.bitcast_convert_type(pool, bits)
        new = lax.bitcast_convert_type(blocks[block], bits)[None]
        return lax.bitcast_convert_type(lax.dynamic_update_slice(whole, new, at), pool.dtype)

    filled: Array = lax.fori_loop(0, known.sum(dtype=jnp.int32), put, pool)
    return filled


def with_layer(cache: PagedKVCache, layer: int, k_pool: KeyPool, v_pool: ValuePool) -> PagedKVCache:
    """Put one layer's pools in place of the old ones.

    Args:
      cache: the cache.
      layer: index of the layer, static.
      k_pool: [N, Hkv, P, D].
      v_pool: [N, Hkv, P, Dv].
    """
    return dataclasses.replace(
        cache,
        k_pages=(*cache.k_pages[:layer], k_pool, *cache.k_pages[layer + 1 :]),
        v_pages=(*cache.v_pages[:layer], v_pool, *cache.v_pages[layer + 1 :]),
    )


def with_state(cache: PagedKVCache, layer: int, state: Float32[Array, "B H D Dv"]) -> PagedKVCache:
    """The cache with one layer's state replaced.

    Args:
      cache: before.
      layer: one of kind "retention".
      state: float32 [B, H, D, Dv].
    """
    states = (*cache.states[:layer], state, *cache.states[layer + 1 :])
    return dataclasses.replace(cache, states=states)


def ragged_rows(
    cu_lengths: Int32[Array, " B1"], num_tokens: int
) -> tuple[Int32[Array, " T"], Int32[Array, " T"]]:
    """Which sequence each token of a flat ragged batch belongs to, and its index in that chunk.

    Args:
      cu_lengths: int32 [B + 1], where each sequence's tokens start; 0 first, never falling.
      num_tokens: T, static; tokens at or past cu_lengths[B] are padding.

    Returns:
      Sequences int32 [T] (B for padding) and indices int32 [T], from 0 within each sequence.
    """
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    ends = cu_lengths[1:]
    sequence = jnp.sum(token[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    start = cu_lengths.at[sequence].get(mode="clip")
    return sequence, token - start


def gather(
    cache: PagedKVCache, layer: int
) -> tuple[Float[Array, "B S Hkv D"], Float[Array, "B S Hkv Dv"], Bool[Array, "B S"]]:
    """One layer's keys and values in logical order, S = M x P slots a sequence, unpacked.

    Of a layer that keeps a ring, those of a sequence's last R pages.

    Args:
      cache: the cache.
      layer: index of the layer.

    Returns:
      Keys and values, 0 where no token is, and a mask of the slots that hold one.
    """
    slots = jnp.arange(cache.max_pages * cache.page_size, dtype=jnp.int32)
    valid = slots[None, :] < cache.lengths[:, None]
    tables = cache.tables(layer)
    if cache.ring(layer):
        last = (cache.lengths - 1) // cache.page_size
        valid &= slots[None, :] // cache.page_size > (last - cache.ring(layer))[:, None]

    def logical(pool: KeyPool, recent: Array | None) -> Array:
        pool = plain(pool)
        rows = pool.at[tables].get(mode="clip")  # [B, M, Hkv, P, D]
        rows = rows.transpose(0, 1, 3, 2, 4).reshape(cache.batch, slots.size, *pool.shape[1::2])
        if recent is not None and cache.format is not None:
            encoded = encoded_before(cache.lengths, cache.recent_tokens, cache.page_size)
            kept = (slots[None, :] >= encoded[:, None]) | (slots < cache.sink_tokens)[None, :]
            newest = recent[:, cache.recent_row(slots)].astype(rows.dtype)
            rows = jnp.where(kept[:, :, None, None], newest, rows)
        return jnp.where(valid[:, :, None, None], rows, jnp.zeros((), pool.dtype))

    newest = cache.recent[layer]
    k_pool, v_pool = cache.pools(layer)
    keys = logical(k_pool, None if newest is None else newest.keys)
    return keys, logical(v_pool, None if newest is None else newest.values), valid


def copy_pages(
    cache: PagedKVCache, source: Int32[Array, " n"], target: Int32[Array, " n"]
) -> PagedKVCache:
    """Copy whole pages within every layer's pools: the step under copy-on-write and compaction.

    All sources are read before any target is written. Block tables and references stay as they
    are: the caller changes them.

    Layers that keep rings stay as they are: their pages have no ids that others know.

    Args:
      cache: the cache.
      source: int32 [n], page ids.
      target: int32 [n], page ids, none twice; N copies nothing.
    """

    def copied(pool: KeyPool) -> KeyPool:
        if isinstance(pool, PackedPages):
            taken = pool.map_stored(lambda array: array.at[source].get(mode="clip"))
            return put_packed((pool,), (taken,), target)[0]
        return plain_copied(pool)

    def plain_copied(pool: Array) -> Array:
        pages = pool.at[source].get(mode="clip")
        if scatter_copies(pool):
            return _put_blocks(pool, pages, target, jnp.zeros_like(target))
        return pool.at[target].set(pages, mode="drop")

    def moved(pools: Sequence[KeyPool | None]) -> tuple[KeyPool | None, ...]:
        return tuple(
            pool if pool is None or pool.shape[0] < cache.num_pages else copied(pool)
            for pool in pools
        )

    def index_moved(pages: IndexPages | None) -> IndexPages | None:
        if pages is None:
            return None
        scales = pages.scales
        if scales is not None:
            taken = scales.at[source].get(mode="clip")
            scales = scales.at[target].set(taken, mode="drop")
        return IndexPages(plain_copied(pages.keys), scales)

    return dataclasses.replace(
        cache,
        k_pages=moved(cache.k_pages),
        v_pages=moved(cache.v_pages),
        index_pages=tuple(map(index_moved, cache.index_pages)),
    )


def copy_rings(
    cache: PagedKVCache, source: Int32[Array, ""], target: Int32[Array, ""], ok: Bool[Array, ""]
) -> PagedKVCache:
    """Copy one sequence's pages to another's in every layer that keeps rings.

    Args:
      cache: the cache.
      source: int32, a sequence.
      target: int32, another.
      ok: whether to copy.
    """

    def copied(pool: KeyPool, ring: int) -> KeyPool:
        assert not isinstance(pool, PackedPages)
        begin = jnp.clip(source, 0, cache.batch - 1) * ring
        pages = lax.dynamic_slice_in_dim(pool, begin, ring)
        at = jnp.where(ok, target * ring + jnp.arange(ring, dtype=jnp.int32), cache.num_pages)
        if scatter_copies(pool):
            return _put_blocks(pool, pages, at, jnp.zeros_like(at))
        return pool.at[at].set(pages, mode="drop")

    for layer, shape in enumerate(cache.spec.layers):
        ring = cache.ring(layer)
        if ring and shape.shared is None:
            k_pool, v_pool = cache.pools(layer)
            cache = with_layer(cache, layer, copied(k_pool, ring), copied(v_pool, ring))
    return cache


def put_packed(
    pools: tuple[PackedPages, ...], pages: tuple[PackedPages, ...], ids: Int32[Array, " n"]
) -> tuple[PackedPages, ...]:
    """Write whole packed pages into pools, in one loop; ids of N or more write nothing.

    Args:
      pools: packed alike with what stands at the same place in `pages`.
      pages: n pages each.
      ids: int32 [n], where they go, none twice.
    """
    known = ids < pools[0].shape[0]
    (kept,) = jnp.nonzero(known, size=ids.shape[0])
    pairs = list(zip(pools, pages, strict=True))
    new = [{name: getattr(page, name) for name in pool.stored()} for pool, page in pairs]

    def put(i: Int32[Array, ""], stored: list[dict[str, Any]]) -> list[dict[str, Any]]:
        at = kept[i]
        filled: list[dict[str, Any]] = jax.tree.map(
            lambda x, y: set_page(x, lax.dynamic_slice_in_dim(y, at, 1), ids[at]), stored, new
        )
        return filled

    stored = [pool.stored() for pool in pools]
    stored = lax.fori_loop(0, known.sum(dtype=jnp.int32), put, stored)
    return tuple(pool.with_stored(x) for pool, x in zip(pools, stored, strict=True))


def set_page(pool: Array, page: Array, index: Int32[Array, ""]) -> Array:
    """Write one page, [1, ...], in place: as integers, which no backend widens."""
    bits = jnp.dtype(f"uint{8 * pool.dtype.itemsize}")
    whole = lax.bitcast_convert_type(pool, bits)
    whole = lax.dynamic_update_slice_in_dim(whole, lax.bitcast_convert_type(page, bits), index, 0)
    return lax.bitcast_convert_type(whole, pool.dtype)
