"""Attention to a sequence's tokens that stand beside its packed pages as they are."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache import PagedKVCache, recent_slots
from kvjax.decode.attend_latents import scored_keys
from kvjax.models import ModelConfig
from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.residual import encoded_before

QUERY_BLOCK = 128
"""Queries of a chunk that attend together."""


def attend_ring(
    config: ModelConfig,
    cache: PagedKVCache,
    layer: int,
    q: Float[Array, "B Hq D"],
    active: Bool[Array, " B"],
) -> AttentionOutput:
    """Attend one query a sequence to the tokens before it that are not encoded.

    Args:
      config: the model's.
      cache: the cache before the query's own token is stored.
      layer: one that has a format.
      q: [B, Hq, D].
      active: bool [B]; the others see nothing.
    """
    recent = cache.recent[layer]
    assert recent is not None
    slots, counts = recent_slots(cache)
    window = config.layers[layer].window
    seen = counts & active[:, None]
    if window is not None:
        seen &= slots > cache.lengths[:, None] - window

    def row(q: Array, keys: Array, values: Array, seen: Array) -> AttentionOutput:
        return _attend(config, layer, q[None], keys, values, seen[None])

    keys = scored_keys(cache, layer, recent.keys, recent.values)
    out = jax.vmap(row)(q, keys, recent.values, seen)
    return AttentionOutput(out.out[:, 0], out.lse[:, 0])


class Chunk(NamedTuple):
    """A ragged chunk's tokens: whose they are, and where in their sequences they stand."""

    sequences: Int32[Array, " T"]  # B for padding
    slots: Int32[Array, " T"]
    keys: Float[Array, "T Hkv D"]
    values: Float[Array, "T Hkv Dv"]


def attend_chunk(
    config: ModelConfig,
    cache: PagedKVCache,
    stored: PagedKVCache,
    layer: int,
    q: Float[Array, "T Hq D"],
    chunk: Chunk,
) -> AttentionOutput:
    """Attend a chunk's queries to the tokens that were not encoded when each query came.

    These are at most R before the query, of the chunk itself or of what stood in `recent`, the
    query's own, and the sinks.

    Args:
      config: the model's.
      cache: the cache before the chunk.
      stored: the cache with the chunk's tokens of this layer stored.
      layer: one that has a format.
      q: [T, Hq, D].
      chunk: what queries score of the chunk (`scored_keys`), and its values, as the cache keeps
        them.
    """
    batch, room, sinks = cache.batch, cache.recent_tokens, cache.sink_tokens
    tokens, size = q.shape[0], cache.page_size
    window = config.layers[layer].window
    slots, counts = (x[:, sinks:] for x in recent_slots(cache))
    newest = _rows(cache, layer, slice(sinks, None), jnp.where(counts, slots, -1))
    first = jnp.arange(sinks, dtype=jnp.int32)[None, :]
    firsts = _rows(stored, layer, slice(sinks), jnp.broadcast_to(first, (batch, sinks)))
    held = Chunk(*(jnp.concatenate(pair) for pair in zip(newest, firsts, strict=True)))
    block = min(QUERY_BLOCK, tokens)
    blocks = -(-tokens // block)
    after = blocks * block - tokens
    queries = jnp.pad(q, ((0, after), (0, 0), (0, 0))).reshape(blocks, block, *q.shape[1:])

    def padded(x: Array, before: int, fill: int) -> Array:
        rest = [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, [(before, after), *rest], constant_values=fill)

    # A query's sequence is contiguous in the chunk, so what it sees of it is just before it; but
    # for sinks, which `stored` has.
    column = jnp.arange(batch * (room + sinks) + room + block, dtype=jnp.int32)
    is_sink = (column >= batch * room) & (column < batch * (room + sinks))
    behind = Chunk(
        *(padded(x, room, fill) for x, fill in zip(chunk, (batch, -1, 0, 0), strict=True))
    )

    def attend_block(inputs: tuple[Array, Array]) -> AttentionOutput:
        index, queries = inputs

        def near(x: Array, before: int, count: int) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, index * block + room - before, count)

        own = Chunk(*(near(x, room, room + block) for x in behind))
        keys = Chunk(*(jnp.concatenate(pair) for pair in zip(held, own, strict=True)))
        sequence, slot = near(behind.sequences, 0, block), near(behind.slots, 0, block)
        first = jnp.maximum(encoded_before(slot, room, size), sinks)
        seen = (sequence[:, None] == keys.sequences[None, :]) & (sequence < batch)[:, None]
        seen &= (keys.slots[None, :] >= first[:, None]) | is_sink[None, :]
        seen &= keys.slots[None, :] <= slot[:, None]
        if window is not None:
            seen &= keys.slots[None, :] > slot[:, None] - window
        return _attend(config, layer, queries, keys.keys, keys.values, seen)

    out = jax.lax.map(attend_block, (jnp.arange(blocks, dtype=jnp.int32), queries))
    heads = q.shape[1]
    return AttentionOutput(
        out.out.reshape(blocks * block, heads, -1)[:tokens],
        out.lse.reshape(blocks * block, heads)[:tokens],
    )


def _rows(cache: PagedKVCache, layer: int, rows: slice, slots: Int32[Array, "B n"]) -> Chunk:
    """Some rows of every sequence's `recent`, as a chunk; slots below 0 are of no token."""
    recent = cache.recent[layer]
    assert recent is not None
    row = jnp.arange(cache.batch, dtype=jnp.int32)[:, None]
    sequences = jnp.where(slots < 0, cache.batch, row).reshape(-1)
    keys, values = (x[:, rows].reshape(-1, *x.shape[2:]) for x in (recent.keys, recent.values))
    flat = scored_keys(cache, layer, keys, values), values
    return Chunk(sequences, slots.reshape(-1), *flat)


def _attend(
    config: ModelConfig,
    layer: int,
    q: Float[Array, "T Hq D"],
    keys: Float[Array, "S Hkv D"],
    values: Float[Array, "S Hkv Dv"],
    seen: Bool[Array, "T S"],
) -> AttentionOutput:
    """Attention over rows, in float32; what a query does not see does not reach it."""
    tokens, heads, dim = q.shape
    f32, highest = jnp.float32, jax.lax.Precision.HIGHEST
    used = seen.any(axis=0)[:, None, None]
    k, v = (jnp.where(used, x.astype(f32), 0.0) for x in (keys, values))
    grouped = q.astype(f32).reshape(tokens, k.shape[1], -1, dim)
    scores = config.scale(layer) * jnp.einsum("thgd,shd->hgts", grouped, k, precision=highest)
    if config.attn_soft_cap is not None:
        scores = config.attn_soft_cap * jnp.tanh(scores / config.attn_soft_cap)
    scores = jnp.where(seen[None, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    # Queries of other sequences have weight 0 for a row, and 0 * NaN is NaN.
    bad = ~jnp.isfinite(v).all(axis=-1)
    spoiled = jnp.einsum("ts,sh->th", seen.astype(f32), bad.astype(f32)) > 0
    v = jnp.where(bad[..., None], 0.0, v)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None])
    out = jnp.einsum("hgts,shd->thgd", weights, v, precision=highest)
    out = jnp.where(spoiled[:, :, None, None], jnp.nan, out)
    return AttentionOutput(
        out.reshape(tokens, heads, -1), jnp.moveaxis(lse, 2, 0).reshape(tokens, heads)
    )
