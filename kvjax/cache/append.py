"""Appending tokens of all layers at once: reserve, write, advance."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.allocate import advance, reserve
from kvjax.cache.packed import put_chunk
from kvjax.cache.pages import ragged_rows, token_slots, write
from kvjax.cache.state import STARTS, PagedKVCache, Reservation, as_int32
from kvjax.errors import KvjaxError


def append(
    cache: PagedKVCache,
    keys: Sequence[Float[Array, "T Hkv D"]],
    values: Sequence[Float[Array, "T Hkv Dv"]],
    cu_lengths: Int[Array, " B1"] | Int[np.ndarray, " B1"] | Sequence[int] | None = None,
) -> tuple[PagedKVCache, Reservation]:
    """Append a ragged chunk, or one token a sequence, to every layer.

    A model's forward pass does the same in pieces (`reserve` once, `write` in each layer,
    `advance` at the end), because a layer's keys are only known when the layer runs.

    Args:
      cache: the cache.
      keys: one [T, Hkv, D] a layer, position encoding applied.
      values: one [T, Hkv, Dv] a layer.
      cu_lengths: integers [B + 1], where each sequence's tokens start among the T; 0 first, never
        falling, at most T; tokens at or past cu_lengths[B] are padding. None means T = B, one
        token a sequence.

    Returns:
      The cache and the reservation; if it failed, as it does for other `cu_lengths`, nothing
      changed.

    Raises:
      KvjaxError: not one array a layer, one of another shape than the layer's, `cu_lengths` that
        are no integers, a wrong number of sequences, or layers that keep index keys too, that
        are shared, or that keep rings or states.
    """
    layers = len(cache.spec.layers)
    if any(pages is not None for pages in cache.index_pages):
        raise KvjaxError(
            "the cache keeps index keys, and append is given none: use reserve, write and "
            "write_index in each layer, and advance"
        )
    if any(state is not None for state in cache.states):
        raise KvjaxError(
            "the cache keeps states, and append is given none: use reserve, write in each layer "
            "that stores tokens, with_state in the others, and advance"
        )
    if any(layer.shared is not None for layer in cache.spec.layers):
        raise KvjaxError(
            "the cache has layers that share another's pages, and append writes every layer: use "
            "reserve, write in each layer that stores, and advance"
        )
    if any(cache.ring(layer) for layer in range(layers)):
        raise KvjaxError(
            "the cache has layers that keep the last pages only, and append writes every layer "
            "alike: use reserve, token_slots and write in each layer, and advance"
        )
    if len(keys) != layers or len(values) != layers:
        raise KvjaxError(
            f"keys and values hold {len(keys)} and {len(values)} arrays: give one for each of the "
            f"{layers} layers"
        )
    tokens = keys[0].shape[0]
    if cu_lengths is None:
        if tokens != cache.batch:
            raise KvjaxError(
                f"keys have {tokens} tokens and the cache {cache.batch} sequences: without "
                f"cu_lengths, give one token a sequence"
            )
        starts = jnp.arange(cache.batch + 1, dtype=jnp.int32)
    else:
        starts = as_int32("cu_lengths", cu_lengths)
    if starts.shape != (cache.batch + 1,):
        raise KvjaxError(
            f"cu_lengths has shape {starts.shape}: must be ({cache.batch + 1},), one start a "
            f"sequence and the end"
        )
    for layer, shape in enumerate(cache.spec.layers):
        heads, key, value = shape.pool_dims
        _check_rows(f"keys[{layer}]", keys[layer], (tokens, heads, key))
        _check_rows(f"values[{layer}]", values[layer], (tokens, heads, value))
    counts = jnp.diff(starts)
    sensible = (starts[0] == 0) & jnp.all(counts >= 0) & (starts[-1] <= tokens)
    counts = jnp.where(sensible, counts, 0)
    cache, reservation = reserve(cache, counts, max_count=max(tokens, 1))
    reservation = dataclasses.replace(
        reservation,
        ok=reservation.ok & sensible,
        wrong=jnp.where(sensible, reservation.wrong, STARTS),
    )
    counts = jnp.where(reservation.ok, counts, 0)
    sequences, index = ragged_rows(starts, tokens)
    start = cache.lengths.at[sequences].get(mode="clip")
    page, offset = token_slots(cache, sequences, start + index)
    slots = (jnp.where(reservation.ok, page, cache.num_pages), offset)
    for layer in range(layers):
        rows = keys[layer], values[layer]
        if cache.recent[layer] is None:
            cache = write(cache, layer, *rows, slots)
        else:
            cache = put_chunk(cache, layer, *rows, starts, reservation.ok)
    return advance(cache, counts), reservation


def _check_rows(name: str, rows: Array, shape: tuple[int, int, int]) -> None:
    """Refuse what a scatter would broadcast: one head or one token repeated to fill many."""
    if rows.shape != shape:
        raise KvjaxError(
            f"{name} has shape {rows.shape}: must be {shape}, tokens, the layer's KV heads and "
            f"their width"
        )
