"""A prefix in a format, on its way to the store and back: packed pages, and tokens left exact.

A format leaves the newest tokens of a sequence as they are, and its first ones if it says so. Who
goes on with a stored prefix sees these as whoever prefilled it, so they are kept with it: of the
place where the prefix ends, which is why it serves prompts that begin with all of it.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Shaped, UInt8

from kvjax.cache import PagedKVCache, Recent, recent_slots
from kvjax.cache.pages import put_packed
from kvjax.decode.stored_form import StoredForm
from kvjax.formats import LayerFormat
from kvjax.pallas_kernels.packed_pages import KeyPool, PackedPages


class PackedPrefix(NamedTuple):
    """A prefix's full pages as they are stored."""

    keys: UInt8[np.ndarray, "L N Hkv P W"]
    values: UInt8[np.ndarray, "L N Hkv P W"]
    decoded: Float[np.ndarray, "L N Hkv P D"]  # what queries score of what they stand for
    exact: dict[str, np.ndarray]  # by name, keys and values [packed layers, S + R, Hkv, D]
    finite: bool  # whether all that the bytes stand for is


class ExactTokens(NamedTuple):
    """One layer's tokens that its format leaves as they are: S first, then R last of a prefix."""

    keys: Float[Array, "E Hkv D"]
    values: Float[Array, "E Hkv Dv"]


def exact_group(tokens: int) -> str:
    """What the arrays of a prefix's exact tokens are named by.

    Args:
      tokens: of the prefix's pages; a longer prefix has not those of a shorter one.
    """
    return f"exact-{tokens}"


def packed_prefix(form: StoredForm, cache: PagedKVCache, pages: int) -> PackedPrefix:
    """Take a sequence's pages out of a cache that holds nothing else.

    Args:
      form: how they are stored.
      cache: of one sequence of so many pages, all of them full.
      pages: N, at least 1.
    """
    size = form.page_size
    first, last = form.sinks // size, form.newest // size
    apart = sorted({*range(min(first, pages)), *range(max(pages - last, 0), pages)})
    slots = np.concatenate([np.arange(page * size, (page + 1) * size) for page in apart])
    rows, kept_rows = (
        np.asarray(cache.recent_row(jnp.asarray(x, jnp.int32)))
        for x in (slots, form.exact_positions(pages * size))
    )
    both, decoded, exact, finite = [], [], [], True
    for layer, recent in enumerate(cache.recent):
        rings = None
        if recent is not None:
            rings = tuple(np.asarray(ring)[0] for ring in recent_arrays(recent))
            exact.append([ring[kept_rows] for ring in rings])
            rings = tuple(ring[rows] for ring in rings)
        chosen = form.format.layer(form.spec, layer)
        pools = cache.k_pages[layer], cache.v_pages[layer]
        ids = jnp.asarray(apart, jnp.int32)
        table = cache.block_tables[0]
        stored, numbers, sound = _layer_pages(form, chosen, pools, rings, table, ids)
        both.append(np.asarray(stored)[:, :pages])
        decoded.append(np.asarray(numbers)[:pages])
        finite &= bool(sound)
    keys, values = (np.stack(kind) for kind in zip(*both, strict=True))
    group = exact_group(pages * size)
    arrays = zip(("keys", "values"), zip(*exact, strict=True), strict=True)
    named = {f"{group}.{name}": _stacked(array) for name, array in arrays}
    return PackedPrefix(keys, values, np.stack(decoded), named, finite)


def _stacked(arrays: Sequence[np.ndarray]) -> Shaped[np.ndarray, "L E Hkv D"]:
    """Layers' arrays in one, with zeros behind rows that are not the longest."""
    most = max(array.shape[-1] for array in arrays)
    rest = ((0, 0), (0, 0))
    return np.stack([np.pad(array, (*rest, (0, most - array.shape[-1]))) for array in arrays])


def recent_arrays(recent: Recent) -> tuple[Array, Array]:
    """Keys and values."""
    return recent.keys, recent.values


@functools.partial(jax.jit, static_argnums=(0, 1))
def _layer_pages(
    form: StoredForm,
    chosen: LayerFormat | None,
    pools: tuple[KeyPool, KeyPool],
    tokens: tuple[Array, Array] | None,
    table: Int32[Array, " M"],
    apart: Int32[Array, " E"],
) -> tuple[UInt8[Array, "two M Hkv P W"], Float[Array, "M Hkv P D"], Bool[Array, ""]]:
    """One layer's pages as bytes, what queries score of them, and whether all numbers are finite.

    Pages that are not encoded yet are now.

    Args:
      form: how they are stored.
      chosen: how the layer packs pages.
      pools: of the layer.
      tokens: keys and values [E * P, Hkv, D] of pages that the pools have not.
      table: where the sequence's pages are.
      apart: which pages of the sequence `tokens` are.
    """
    taken: list[KeyPool] = []
    for nth, pool in enumerate(pools):
        if not isinstance(pool, PackedPages):
            taken.append(pool.at[table].get(mode="clip"))
            continue
        assert chosen is not None
        assert tokens is not None
        rows = tokens[nth].reshape(-1, form.page_size, *tokens[nth].shape[1:]).swapaxes(1, 2)
        packing = (chosen.keys, chosen.values)[nth]
        encoded = packing.encode(rows, apart * form.page_size)
        pages = pool.map_stored(lambda array: array.at[table].get(mode="clip"))
        taken.append(put_packed((pages,), (encoded,), apart)[0])
    keys, values = map(form.numbers, taken)
    finite = jnp.isfinite(keys).all() & jnp.isfinite(values).all()
    return form.as_bytes(taken[0], taken[1]), form.scored(keys, values), finite


def exact_tokens(
    form: StoredForm, arrays: Mapping[str, np.ndarray]
) -> tuple[ExactTokens | None, ...]:
    """Each layer's exact tokens; None where the layer is not packed.

    Args:
      form: how they are stored.
      arrays: of the prefix, by name, the group's left out: "keys" and "values".
    """
    packed = [layer for layer in range(len(form.spec.layers)) if form.packed(layer)]
    tokens = {}
    for layer, *kept in zip(packed, arrays["keys"], arrays["values"], strict=True):
        _, *dims = form.spec.layers[layer].pool_dims
        keys, values = (array[..., :dim] for array, dim in zip(kept, dims, strict=True))
        tokens[layer] = ExactTokens(jnp.asarray(keys), jnp.asarray(values))
    return tuple(tokens.get(layer) for layer in range(len(form.spec.layers)))


def with_exact_tokens(
    cache: PagedKVCache,
    form: StoredForm,
    exact: tuple[ExactTokens | None, ...],
    tokens: Int32[Array, ""],
) -> PagedKVCache:
    """Put exact tokens where a sequence of chosen pages has its sinks and its newest tokens.

    Args:
      cache: of one sequence, whose `lengths` and `skipped` count the prefix; its last pages are
        the prefix's last ones, its first the first ones.
      form: how the prefix is stored.
      exact: of every layer.
      tokens: of the prefix's pages, those that were not chosen too.
    """
    slots, _ = recent_slots(cache)
    slot = slots[0]
    place = form.sinks + slot + cache.skipped[0] - (tokens - form.newest)
    place = jnp.where(slot < form.sinks, slot, place)

    def filled(ring: Array, kept: Array) -> Array:
        return kept.at[place].get(mode="clip")[None].astype(ring.dtype)

    recent = tuple(
        old if old is None or new is None else Recent(*map(filled, recent_arrays(old), new))
        for old, new in zip(cache.recent, exact, strict=True)
    )
    return dataclasses.replace(cache, recent=recent)
