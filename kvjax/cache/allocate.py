"""Who holds which page: reserve, release, fork. Vectorised, deterministic, all or nothing."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax.cache.pages import copy_pages, copy_rings
from kvjax.cache.state import (
    COUNTS,
    RING,
    SEQUENCES,
    Integers,
    PagedKVCache,
    Reservation,
    as_int32,
)
from kvjax.errors import KvjaxError, check_integer


def reserve(
    cache: PagedKVCache, counts: Integers, *, max_count: int | None = None
) -> tuple[PagedKVCache, Reservation]:
    """Give every sequence the pages that its next `counts` tokens need.

    The free pages of lowest id go to the sequences in order. If the pool cannot serve all, a block
    table is too narrow or a count out of range, nothing changes and the reservation says so; that
    never raises inside a program (see `Reservation.check`). Reserving again what is reserved takes
    nothing. Where layers keep rings, a count above `PagedKVCache.most_at_once` is out of range.

    Args:
      cache: the cache.
      counts: integers [B], tokens about to be appended; 0 asks for nothing.
      max_count: a bound on `counts` known before tracing, in tokens; it makes the program smaller
        (1 in a decode loop). None means that a sequence may ask for its whole block table.

    Returns:
      The cache with the new pages in its block tables, and the reservation.

    Raises:
      KvjaxError: `max_count` is below 1 or more than rings have room for, or `counts` are no
        integers.
    """
    counts = as_int32("counts", counts)
    most_at_once = cache.most_at_once
    if max_count is not None:
        check_integer("max_count", max_count, 1, ", or None")
        if most_at_once is not None and max_count > most_at_once:
            raise KvjaxError(
                f"max_count is {max_count}: must be 1 to {most_at_once} where layers with a window "
                f"keep rings, or the windows of a chunk's first tokens would be overwritten; "
                f"append fewer at once, or make the cache with window_chunk={max_count}"
            )
    size, width = cache.page_size, cache.max_pages
    held = cache.pages_held
    wanted = (cache.lengths + counts + (size - 1)) // size
    extra = jnp.where(counts > 0, jnp.maximum(wanted - held, 0), 0)
    needed = jnp.sum(extra, dtype=jnp.int32)
    taken = jnp.cumsum(cache.page_refs == 0, dtype=jnp.int32)  # free pages with ids up to this one
    free = taken[-1]
    longest = jnp.max(jnp.where(counts > 0, wanted, held))
    sensible = jnp.all(counts >= 0)
    if max_count is not None:
        sensible &= jnp.all(counts <= max_count)
    fits = jnp.bool_(True) if most_at_once is None else jnp.all(counts <= most_at_once)
    ok = sensible & fits & (needed <= free) & (longest <= width)

    # The k-th new page of sequence b is the free page of rank (pages of earlier sequences) + k.
    most = width if max_count is None else min(width, -(-max_count // size) + 1)
    k = jnp.arange(most, dtype=jnp.int32)[None, :]
    before = jnp.cumsum(extra, dtype=jnp.int32) - extra
    wanted_here = (k < extra[:, None]) & ok
    pages = jnp.searchsorted(taken, before[:, None] + k + 1, method="scan").astype(jnp.int32)
    pages = jnp.where(wanted_here, pages, cache.num_pages)
    column = jnp.where(wanted_here, held[:, None] + k, width)
    row = jnp.arange(cache.batch, dtype=jnp.int32)[:, None]
    updated = dataclasses.replace(
        cache,
        block_tables=cache.block_tables.at[row, column].set(pages, mode="drop"),
        page_refs=cache.page_refs.at[pages].add(1, mode="drop"),
    )
    wrong = jnp.where(sensible, jnp.where(fits, 0, RING), COUNTS).astype(jnp.int32)
    return updated, Reservation(ok=ok, needed=needed, free=free, longest=longest, wrong=wrong)


def advance(cache: PagedKVCache, counts: Integers) -> PagedKVCache:
    """Count tokens as written, once every layer holds them.

    Args:
      cache: the cache, with pages reserved and rows written.
      counts: integers [B], tokens written a sequence.

    Raises:
      KvjaxError: `counts` are no integers.
    """
    return dataclasses.replace(cache, lengths=cache.lengths + as_int32("counts", counts))


def release(
    cache: PagedKVCache, sequences: Bool[Array, " B"] | Bool[np.ndarray, " B"] | Sequence[bool]
) -> PagedKVCache:
    """Empty the marked sequences; a page that no other sequence holds becomes free.

    States of theirs are zero then, as before a first token.

    Args:
      cache: the cache.
      sequences: bool [B], which to release. Releasing an empty one changes nothing.

    Raises:
      KvjaxError: `sequences` is no mask.
    """
    sequences = jnp.asarray(sequences)
    if sequences.dtype != jnp.bool_ or sequences.shape != (cache.batch,):
        raise KvjaxError(
            f"sequences is {sequences.dtype} of shape {sequences.shape}: must be bool of shape "
            f"({cache.batch},), True for each sequence to release"
        )
    marked = sequences[:, None]
    dropped = jnp.where(marked, cache.block_tables, cache.num_pages)
    return dataclasses.replace(
        cache,
        block_tables=jnp.where(marked, cache.num_pages, cache.block_tables),
        lengths=jnp.where(sequences, 0, cache.lengths),
        skipped=jnp.where(sequences, 0, cache.skipped),
        page_refs=cache.page_refs.at[dropped].add(-1, mode="drop"),
        states=jax.tree.map(lambda x: jnp.where(marked[..., None, None], 0, x), cache.states),
    )


def fork(
    cache: PagedKVCache, source: Int[Array, ""] | int, target: Int[Array, ""] | int
) -> tuple[PagedKVCache, Reservation]:
    """Make `target` a sequence with `source`'s tokens, sharing every full page.

    Rings, which layers with a window may keep, and states are copied.

    The open tail page is copied at once (copy-on-write with the write foreseen: the next token
    goes there), so whoever appends next writes to a page of its own and neither sees the other.
    Whatever `target` held before is released. Pages `source` only reserved are not shared.

    Args:
      cache: the cache.
      source: integer scalar, the sequence to copy, 0 to B - 1.
      target: integer scalar, the sequence to fill, 0 to B - 1, not `source`.

    Returns:
      The cache and the reservation of the tail page; if it failed, as it does for sequences that
      are not there or the same, nothing changed.

    Raises:
      KvjaxError: they are no integers.
    """
    source, target = as_int32("source", source), as_int32("target", target)
    batch = cache.batch
    sensible = (source >= 0) & (source < batch) & (target >= 0) & (target < batch)
    sensible &= source != target
    emptied = release(cache, jnp.arange(cache.batch, dtype=jnp.int32) == target)
    length = emptied.lengths[source]
    full = length // cache.page_size
    open_tail = (length % cache.page_size) > 0
    free_pages = emptied.page_refs == 0
    free = jnp.sum(free_pages, dtype=jnp.int32)
    needed = open_tail.astype(jnp.int32)
    ok = sensible & (needed <= free)

    column = jnp.arange(cache.max_pages, dtype=jnp.int32)
    old = emptied.block_tables[source]
    fresh = jnp.argmax(free_pages).astype(jnp.int32)
    table = jnp.where(column < full, old, cache.num_pages)
    table = jnp.where((column == full) & open_tail, fresh, table)
    tail = jnp.where(open_tail & ok, fresh, cache.num_pages)
    copied = copy_pages(emptied, old[jnp.minimum(full, cache.max_pages - 1)][None], tail[None])
    copied = copy_rings(copied, source, target, ok)

    def copied_row(rows: Array) -> Array:
        return rows.at[jnp.where(ok, target, batch)].set(rows[source], mode="drop")

    result = dataclasses.replace(
        copied,
        block_tables=jnp.where(ok, emptied.block_tables.at[target].set(table), cache.block_tables),
        lengths=jnp.where(ok, emptied.lengths.at[target].set(length), cache.lengths),
        skipped=jnp.where(
            ok, emptied.skipped.at[target].set(emptied.skipped[source]), cache.skipped
        ),
        page_refs=jnp.where(ok, emptied.page_refs.at[table].add(1, mode="drop"), cache.page_refs),
        recent=jax.tree.map(copied_row, cache.recent),
        states=jax.tree.map(copied_row, cache.states),
    )
    longest = jnp.maximum(full + needed, jnp.max(cache.pages_held))
    wrong = jnp.where(sensible, 0, SEQUENCES).astype(jnp.int32)
    return result, Reservation(ok=ok, needed=needed, free=free, longest=longest, wrong=wrong)
