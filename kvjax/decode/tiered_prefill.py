"""Prefill layer by layer: the device holds the pages of one layer at a time.

What a layer leaves behind on the device is its index and the pages that the prompt's last tokens
attend to most (KVDrive, arXiv:2605.18071); all its pages go where they live. A layer with a sliding
window leaves its last pages.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache.residency import Residency
from kvjax.decode.attend_chosen import Chosen, ChunkChoice
from kvjax.decode.latents_as_one_head import AsOneHead
from kvjax.decode.tiered_attention import attend_prompt, attend_tokens
from kvjax.decode.tiered_fetch import put_prompt
from kvjax.decode.tiered_index import build_index
from kvjax.decode.tiered_packed import as_bytes, as_kept, sent
from kvjax.decode.tiered_sinks import of_prompt
from kvjax.decode.tiered_sliding import keep_last
from kvjax.decode.tiered_state import TieredCache, TieredShapes, slot_rows, with_layer
from kvjax.models import Decoder, Indexed, ModelConfig
from kvjax.policies import ExactKeys, select


def prefill_row(
    decoder: Decoder,
    shapes: TieredShapes,
    cache: TieredCache,
    tokens: Int32[Array, " T"],
    length: Int32[Array, ""],
    count: Int32[Array, ""],
    row: Int32[Array, ""],
) -> tuple[TieredCache, Float[Array, " d"]]:
    """Prefill one row's prompt.

    Args:
      decoder: the model.
      shapes: the program's.
      cache: with this row empty.
      tokens: int32 [T], the prompt, padded with anything.
      length: int32, its tokens, at least 1.
      count: int32, pages that the row chooses in a step.
      row: int32, which.

    Returns:
      The cache, and the last token's hidden state.
    """
    size = shapes.page_size
    held = tokens.shape[0] // size  # pages that the prompt has room for
    full = length // size
    table = jnp.arange(held, dtype=jnp.int32)[None]
    first = jnp.clip(length - shapes.observe, 0, None)
    last = first + jnp.arange(min(shapes.observe, tokens.shape[0]), dtype=jnp.int32)

    def paged(x: Array, dtype: jnp.dtype) -> Array:
        return x.astype(dtype).reshape(held, size, *x.shape[1:]).swapaxes(1, 2)

    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    chunk = _of_row(cache.lengths.shape[0], positions, length, row)

    def choose(
        layer: int, indexed: Indexed, cache: TieredCache
    ) -> tuple[Chosen | None, TieredCache]:
        assert cache.index_keys is not None
        choice = ChunkChoice(decoder.config, *chunk, shapes.attention)
        chosen, index_keys = choice(layer, indexed, cache.index_keys)
        if chosen is not None:
            tables = jnp.broadcast_to(table, (tokens.shape[0], held))
            chosen = chosen._replace(tables=tables)
        return chosen, dataclasses.replace(cache, index_keys=index_keys)

    def attend(
        layer: int, q: Array, k: Array, v: Array, cache: TieredCache, chosen: Chosen | None
    ) -> tuple[Array, TieredCache]:
        pool = cache.keys[layer]
        keys, values = paged(k, pool.dtype), paged(v, pool.dtype)
        if chosen is None:
            out = attend_prompt(shapes, decoder.config, layer, q, (keys, values), table, length)
        else:
            named = chosen.token_ids, chosen.tables
            found = attend_tokens(shapes, decoder.config, layer, q, (keys, values), *named)
            out = chosen.sounded(found).out
        scored = shapes.scored(keys, values)
        written = cache.written
        if layer not in shapes.selecting:
            if shapes.fetches and layer in shapes.leaving:
                at = shapes.leaving.index(layer)
                written = put_prompt(cache.handle, written, at, row, *sent(shapes, keys, values))
            cache = keep_last(shapes, cache, layer, row, length, keys, values)
            return out, dataclasses.replace(cache, written=written)
        near_keys, near_values = keys, values
        if shapes.format is not None:
            page = jnp.arange(held, dtype=jnp.int32)
            kept = as_bytes(shapes, layer, keys, values, page * size)
            near_keys, near_values = as_kept(shapes, layer, keys, values, page, page < full, kept)
        if shapes.fetches:
            pages = sent(shapes, keys, values) if shapes.format is None else kept
            written = put_prompt(cache.handle, written, shapes.leaving.index(layer), row, *pages)
        observed = q.at[last].get(mode="clip"), last < length
        limits = cache.limits[shapes.place(layer)]
        ids, mass = _first_pages(shapes, decoder.config, layer, scored, *observed, length, limits)
        near, slots = _first_near(shapes, layer, ids, mass)
        to = slot_rows(shapes, layer, slots[None], row[None])[0]
        return out, dataclasses.replace(
            with_layer(
                cache,
                layer,
                keys=_put(pool, to, near_keys, ids),
                values=_put(cache.values[layer], to, near_values, ids),
                sinks=of_prompt(cache.sinks[layer], row, keys, values),
                near=jax.tree.map(
                    lambda old, new: lax.dynamic_update_index_in_dim(old, new, row, 0),
                    cache.near[layer],
                    near,
                ),
                index=_with_row(cache, shapes, layer, scored, values, full, row),
            ),
            written=written,
        )

    hidden, cache = decoder(tokens, positions, AsOneHead(attend, choose), cache)
    cache = dataclasses.replace(
        cache,
        lengths=cache.lengths.at[row].set(length),
        counts=cache.counts.at[row].set(count),
    )
    return cache, hidden.at[length - 1].get(mode="clip")


def _of_row(
    batch: int,
    positions: Int32[Array, " T"],
    length: Int32[Array, ""],
    row: Int32[Array, ""],
) -> tuple[Int32[Array, " T"], Int32[Array, " T"], Int32[Array, " B"], Int32[Array, " B1"]]:
    """A prompt of one row as a ragged chunk: sequences, indices, lengths and where rows start."""
    rows = jnp.arange(batch + 1, dtype=jnp.int32)
    return (
        jnp.where(positions < length, row, batch),
        positions,
        jnp.where(rows[:-1] == row, length, 0),
        jnp.where(rows > row, length, 0),
    )


def _first_pages(
    shapes: TieredShapes,
    config: ModelConfig,
    layer: int,
    keys: Float[Array, "n Hkv P D"],
    queries: Float[Array, "observe Hq D"],
    valid: Bool[Array, " observe"],
    length: Int32[Array, ""],
    limits: Int32[Array, " Hkv"],
) -> tuple[Int32[Array, "Hkv s"], Float[Array, "Hkv n"]]:
    """The pages of the first slots, N for none, and the attention that each page got."""
    held, heads, size, _ = keys.shape
    full = length // size
    open_page = jnp.where(length % size > 0, full, shapes.pages)
    mass = jnp.zeros((heads, held))
    if not shapes.fetches:
        ids = jnp.arange(held, dtype=jnp.int32)
        ids = jnp.where((ids < full) | (ids == open_page), ids, shapes.pages)
        return jnp.broadcast_to(ids, (heads, held)), mass
    first = jnp.broadcast_to(open_page, (heads, 1))
    if not shapes.keeps:
        return first, mass
    by_query_head = ExactKeys().page_mass(
        {"keys": keys.swapaxes(0, 1)},
        queries,
        valid,
        full,
        config.scale(layer),
        soft_cap=config.attn_soft_cap,
    )
    by_query_head = by_query_head.reshape(heads, -1, held)

    def best(mass: Array, count: Array) -> Array:
        return select(
            mass,
            full,
            room=min(shapes.most_slots(layer) - 1, held),
            kv_heads=1,
            count=count,
            choice=dataclasses.replace(shapes.choice, first=0, last=0),
        )[0]

    ids = jax.vmap(best)(by_query_head, limits - 1)
    ids = jnp.where(ids < full, ids, shapes.pages)
    return jnp.concatenate([first, ids], axis=1), jnp.sum(by_query_head, axis=1)


def _first_near(
    shapes: TieredShapes, layer: int, ids: Int32[Array, "Hkv s"], mass: Float[Array, "Hkv n"]
) -> tuple[Residency, Int32[Array, "Hkv s"]]:
    """A row whose slots hold these pages, in order; and the slots, S where there is no page."""
    heads, count = ids.shape
    most = shapes.most_slots(layer)
    head = jnp.arange(heads, dtype=jnp.int32)[:, None]
    slot = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), ids.shape)
    rest = ((0, 0), (0, most - count))
    slot_of = jnp.full((heads, shapes.pages), most, jnp.int32)
    rank = jnp.take_along_axis(mass, jnp.clip(ids, 0, mass.shape[1] - 1), axis=1)
    rank = rank / (1 + rank)  # below 1, what the first step that reads a page gives it
    near = Residency(
        slot_of=slot_of.at[head, ids].set(slot, mode="drop"),
        page_in=jnp.pad(ids, rest, constant_values=shapes.pages),
        rank=jnp.pad(rank.astype(jnp.float32), rest),
    )
    return near, jnp.where(ids < shapes.pages, slot, most)


def _put(
    pool: Float[Array, "F 1 P D"],
    at: Int32[Array, "Hkv s"],
    pages: Float[Array, "n Hkv P D"],
    ids: Int32[Array, "Hkv s"],
) -> Float[Array, "F 1 P D"]:
    """The pool with pages of each head at these places; what is past the pool is dropped."""
    head = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    own = pages[jnp.clip(ids, 0, pages.shape[0] - 1), head]
    return pool.at[at.reshape(-1)].set(own.reshape(-1, *pool.shape[1:]), mode="drop")


def _with_row(
    cache: TieredCache,
    shapes: TieredShapes,
    layer: int,
    keys: Float[Array, "n Hkv P D"],
    values: Float[Array, "n Hkv P Dv"],
    full: Int32[Array, ""],
    row: Int32[Array, ""],
) -> dict[str, Array]:
    """A layer's index of all rows with this row's built from its pages."""
    index, of_layer = cache.index[layer], shapes.index_of(layer, cache.learned)
    if of_layer is None:
        return index
    widths = ((0, shapes.pages - keys.shape[0]), (0, 0), (0, 0), (0, 0))
    padded = jnp.pad(keys, widths), jnp.pad(values, widths)
    built = build_index(of_layer, *padded, full)
    return {
        name: lax.dynamic_update_index_in_dim(array, built[name], row, 0)
        for name, array in index.items()
    }
