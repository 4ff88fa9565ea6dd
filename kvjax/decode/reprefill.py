"""Re-prefill: a suffix against a stored prefix of which only the chosen pages are read.

ContiguousKV (arXiv:2601.13631), with the choice as a setting. One program: every layer chooses,
starts its read, collects it into the pool's first pages and attends to them and to the suffix. A
layer with a sliding window has no choice: it reads the pages that its window reaches.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from kvjax import cache as paged
from kvjax.cache import PagedKVCache
from kvjax.decode.attend import chunk_attend
from kvjax.decode.choosing import Asked, Chosen, Selection, StoredPrefix, read_window
from kvjax.decode.latent_rows import LatentRows
from kvjax.decode.latents_as_one_head import AsOneHead
from kvjax.decode.packed_prefix import with_exact_tokens
from kvjax.decode.step import DecodeState, Prompts
from kvjax.decode.stored_form import StoredForm
from kvjax.models import Attend, Decoder
from kvjax.pallas_kernels.packed_pages import KeyPool, PackedPages
from kvjax.pallas_kernels.support import Implementation


class _Carry(NamedTuple):
    cache: PagedKVCache
    chosen: Chosen


def reprefill(
    decoder: Decoder,
    state: DecodeState,
    prefix: StoredPrefix,
    suffix: Prompts,
    *,
    room: int,
    selection: Selection,
    form: StoredForm | LatentRows | None = None,
    implementation: Implementation | None = None,
) -> DecodeState:
    """Prefill one sequence's suffix against the chosen pages of its prefix.

    Args:
      decoder: the model.
      state: of one empty sequence, in a pool of at least `room` pages and the suffix's.
      prefix: what is stored.
      suffix: the sequence's tokens after the prefix's pages, at least one.
      room: K, pages that can be chosen, static.
      selection: how to choose.
      form: how the prefix is stored, if the cache has a format or keeps latents.
      implementation: of `ragged_paged_attention`, or None.

    Returns:
      The state as after prefill, holding the chosen pages and the suffix. If a read failed, which
      the reads under the prefix's handle know, it is of no use.
    """
    size = state.cache.page_size
    tokens = suffix.tokens
    chunk = tokens.shape[0]
    cache = _with_chosen_pages(state.cache, prefix, room)
    if isinstance(form, StoredForm):
        cache = with_exact_tokens(cache, form, prefix.exact, prefix.pages * size)
    cache, reservation = paged.reserve(cache, jnp.diff(suffix.cu_lengths), max_count=chunk)
    sequences, offset = paged.ragged_rows(suffix.cu_lengths, chunk)
    valid = sequences == 0
    base = chunk_attend(
        decoder.config,
        cache,
        sequences,
        offset + prefix.count * size,
        suffix.cu_lengths,
        implementation,
        stores=reservation.ok,
    )
    attend = _fetching(decoder, base, prefix, valid, selection, form)
    heads, _, _ = state.cache.spec.layers[0].pool_dims
    shape = (heads, room)
    none = Chosen(jnp.full(shape, prefix.pages, jnp.int32), jnp.zeros(shape))
    carry = _Carry(cache, none)
    hidden, carry = decoder(tokens, offset + prefix.pages * size, attend, carry)
    cache = paged.advance(carry.cache, jnp.where(reservation.ok, jnp.diff(suffix.cu_lengths), 0))
    last = hidden.at[suffix.cu_lengths[1:] - 1].get(mode="clip")
    return dataclasses.replace(state, cache=cache, hidden=last, reservation=reservation)


def _with_chosen_pages(cache: PagedKVCache, prefix: StoredPrefix, room: int) -> PagedKVCache:
    """The first `count` pages of the pool are the sequence's; the layers fill them."""
    column = jnp.arange(cache.max_pages, dtype=jnp.int32)
    page = jnp.arange(cache.num_pages, dtype=jnp.int32)
    held = column < jnp.minimum(prefix.count, room)
    return dataclasses.replace(
        cache,
        block_tables=cache.block_tables.at[0].set(jnp.where(held, column, cache.num_pages)),
        page_refs=(page < prefix.count).astype(jnp.int32),
        lengths=cache.lengths.at[0].set(prefix.count * cache.page_size),
        skipped=cache.skipped.at[0].set((prefix.pages - prefix.count) * cache.page_size),
    )


def _fetching(
    decoder: Decoder,
    base: Attend[PagedKVCache],
    prefix: StoredPrefix,
    valid: Bool[Array, " T"],
    selection: Selection,
    form: StoredForm | LatentRows | None,
) -> Attend[_Carry]:
    """An `attend` that puts the layer's chosen pages into the pool before `base` reads it."""

    def attend(
        layer: int, q: Array, k: Array, v: Array, carry: _Carry, chosen_tokens: None
    ) -> tuple[Array, _Carry]:
        del chosen_tokens  # of models with an indexer no prefix is stored
        cache, chosen = carry
        keys, values = cache.k_pages[layer], cache.v_pages[layer]
        assert keys is not None  # of layers that share pages no prefix is stored
        assert values is not None
        page = form.page if form is not None else _page(keys)
        queries = q if form is None else form.padded(q)
        asked = Asked(layer, queries, valid, page, form)
        window = decoder.config.layers[layer].window
        if window is None:
            both, chosen = selection.get(decoder.config, prefix, asked, chosen)
        else:
            both = read_window(decoder.config, prefix, asked, window, chosen.ids.shape[1])
        if form is not None:
            keys, values = form.put(layer, both, (keys, values))
        else:
            keys, values = _put(keys, both[0]), _put(values, both[1])
        cache = paged.with_layer(cache, layer, keys, values)
        out, cache = base(layer, q, k, v, cache)
        return out, _Carry(cache, chosen)

    return AsOneHead(attend)


def _page(pool: KeyPool) -> jax.ShapeDtypeStruct:
    """One head's page [P, D] of a pool that is not packed."""
    return jax.ShapeDtypeStruct(pool.shape[2:], pool.dtype)


def _put(pool: KeyPool, pages: Array) -> Array:
    """Write pages into a pool that is not packed, from the first on."""
    assert not isinstance(pool, PackedPages)
    return jax.lax.dynamic_update_slice(pool, pages, (0, 0, 0, 0))
