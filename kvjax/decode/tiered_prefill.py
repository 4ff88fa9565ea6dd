"""Prefill layer by layer: the device holds the pages of one layer at a time.

What a layer leaves behind on the device is its index and the pages that the prompt's last tokens
attend to most (KVDrive, arXiv:2605.18071); all its pages go where they live.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache.residency import Residency
from kvjax.decode.tiered_fetch import put_prompt
from kvjax.decode.tiered_index import build_index
from kvjax.decode.tiered_state import TieredCache, TieredShapes, with_layer
from kvjax.models import Decoder, ModelConfig
from kvjax.pallas_kernels import ragged_paged_attention
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
    size, slots = shapes.page_size, shapes.slots
    held = tokens.shape[0] // size  # pages that the prompt has room for
    full = length // size
    cu = jnp.stack([jnp.int32(0), length])
    table = jnp.arange(held, dtype=jnp.int32)[None]
    first = jnp.clip(length - shapes.observe, 0, None)
    last = first + jnp.arange(min(shapes.observe, tokens.shape[0]), dtype=jnp.int32)

    def paged(x: Array, dtype: jnp.dtype) -> Array:
        return x.astype(dtype).reshape(held, size, *x.shape[1:]).swapaxes(1, 2)

    def attend(
        layer: int, q: Array, k: Array, v: Array, cache: TieredCache
    ) -> tuple[Array, TieredCache]:
        pool = cache.keys[layer]
        keys, values = paged(k, pool.dtype), paged(v, pool.dtype)
        out = ragged_paged_attention(
            q,
            keys,
            values,
            table,
            length[None],
            cu,
            scale=decoder.config.scale(layer),
            soft_cap=decoder.config.attn_soft_cap,
            implementation=shapes.attention,
        ).out
        written = cache.written
        if shapes.fetches:
            written = put_prompt(cache.handle, written, layer, row, keys, values)
        ids, mass = _first_pages(
            shapes, decoder.config, layer, keys, q.at[last].get(mode="clip"), last < length, length
        )
        near, rows = _first_near(shapes, ids, mass), _rows_of(keys, values, ids)
        return out, dataclasses.replace(
            with_layer(
                cache,
                layer,
                keys=_put_rows(pool, rows[0], row * slots),
                values=_put_rows(cache.values[layer], rows[1], row * slots),
                near=jax.tree.map(
                    lambda old, new: lax.dynamic_update_index_in_dim(old, new, row, 0),
                    cache.near[layer],
                    near,
                ),
                index=_with_row(cache.index[layer], shapes, keys, values, full, row),
            ),
            written=written,
        )

    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    hidden, cache = decoder(tokens, positions, attend, cache)
    cache = dataclasses.replace(
        cache,
        lengths=cache.lengths.at[row].set(length),
        counts=cache.counts.at[row].set(count),
    )
    return cache, hidden.at[length - 1].get(mode="clip")


def _first_pages(
    shapes: TieredShapes,
    config: ModelConfig,
    layer: int,
    keys: Float[Array, "n Hkv P D"],
    queries: Float[Array, "observe Hq D"],
    valid: Bool[Array, " observe"],
    length: Int32[Array, ""],
) -> tuple[Int32[Array, "Hkv s"], Float[Array, "Hkv n"]]:
    """Pages that are near at first, N for none, and the attention that each page got."""
    held, heads, size, _ = keys.shape
    full = length // size
    open_page = jnp.where(length % size > 0, full, shapes.pages)
    mass = jnp.zeros((heads, held))
    if not shapes.fetches:
        ids = jnp.arange(held, dtype=jnp.int32)
        ids = jnp.where((ids < full) | (ids == open_page), ids, shapes.pages)
        return jnp.broadcast_to(ids, (heads, held)), mass
    ids = jnp.full((heads, 1), shapes.pages, jnp.int32)
    if shapes.keeps:
        by_query_head = ExactKeys().page_mass(
            {"keys": keys.swapaxes(0, 1)},
            queries,
            valid,
            full,
            config.scale(layer),
            soft_cap=config.attn_soft_cap,
        )
        mass = jnp.sum(by_query_head.reshape(heads, -1, held), axis=1)
        ids = select(
            by_query_head,
            full,
            room=min(shapes.slots - 1, held),
            kv_heads=heads,
            choice=dataclasses.replace(shapes.choice, first=0, last=0),
        )
    ids = jnp.where(ids < full, ids, shapes.pages)
    return jnp.concatenate([ids, jnp.broadcast_to(open_page, (heads, 1))], axis=1), mass


def _first_near(
    shapes: TieredShapes, ids: Int32[Array, "Hkv s"], mass: Float[Array, "Hkv n"]
) -> Residency:
    """A row whose slots hold these pages, in order."""
    heads, count = ids.shape
    head = jnp.arange(heads, dtype=jnp.int32)[:, None]
    slot = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), ids.shape)
    rest = ((0, 0), (0, shapes.slots - count))
    slot_of = jnp.full((heads, shapes.pages), shapes.slots, jnp.int32)
    rank = jnp.take_along_axis(mass, jnp.clip(ids, 0, mass.shape[1] - 1), axis=1)
    rank = rank / (1 + rank)  # below 1, what the first step that reads a page gives it
    return Residency(
        slot_of=slot_of.at[head, ids].set(slot, mode="drop"),
        page_in=jnp.pad(ids, rest, constant_values=shapes.pages),
        rank=jnp.pad(rank.astype(jnp.float32), rest),
    )


def _rows_of(keys: Array, values: Array, ids: Int32[Array, "Hkv s"]) -> tuple[Array, Array]:
    """Each head's pages as rows of a pool, [s, Hkv, P, D]."""
    head = jnp.arange(ids.shape[0], dtype=jnp.int32)[None]
    at = jnp.clip(ids.T, 0, keys.shape[0] - 1)
    return keys[at, head], values[at, head]


def _put_rows(pool: Array, rows: Array, start: Int32[Array, ""]) -> Array:
    zero = jnp.int32(0)
    updated: Array = lax.dynamic_update_slice(pool, rows, (start, zero, zero, zero))
    return updated


def _with_row(
    index: dict[str, Array],
    shapes: TieredShapes,
    keys: Float[Array, "n Hkv P D"],
    values: Float[Array, "n Hkv P Dv"],
    full: Int32[Array, ""],
    row: Int32[Array, ""],
) -> dict[str, Array]:
    """The index of all rows with this row's built from its pages."""
    widths = ((0, shapes.pages - keys.shape[0]), (0, 0), (0, 0), (0, 0))
    built = build_index(shapes.index, jnp.pad(keys, widths), jnp.pad(values, widths), full)
    return {
        name: lax.dynamic_update_index_in_dim(array, built[name], row, 0)
        for name, array in index.items()
    }
