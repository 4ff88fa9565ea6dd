"""Attention to a sequence's newest tokens, which stand beside its packed pages as they are."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache import PagedKVCache, recent_slots
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

    out = jax.vmap(row)(q, recent.keys, recent.values, seen)
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
    layer: int,
    q: Float[Array, "T Hq D"],
    chunk: Chunk,
) -> AttentionOutput:
    """Attend a chunk's queries to the tokens that were not encoded when each query came.

    These are at most R before the query, of the chunk itself or of what stood in `recent`, and the
    query's own.

    Args:
      config: the model's.
      cache: the cache before the chunk.
      layer: one that has a format.
      q: [T, Hq, D].
      chunk: the chunk's keys and values, as the cache keeps them.
    """
    recent = cache.recent[layer]
    assert recent is not None
    batch, room = recent.keys.shape[:2]
    tokens, size = q.shape[0], cache.page_size
    window = config.layers[layer].window
    ring_slots, ring_counts = recent_slots(cache)
    ring_rows = jnp.repeat(
        jnp.arange(batch, dtype=jnp.int32), room, total_repeat_length=batch * room
    )
    ring = Chunk(
        jnp.where(ring_counts.reshape(-1), ring_rows, batch),
        ring_slots.reshape(-1),
        recent.keys.reshape(batch * room, *recent.keys.shape[2:]),
        recent.values.reshape(batch * room, *recent.values.shape[2:]),
    )
    block = min(QUERY_BLOCK, tokens)
    blocks = -(-tokens // block)
    after = blocks * block - tokens
    queries = jnp.pad(q, ((0, after), (0, 0), (0, 0))).reshape(blocks, block, *q.shape[1:])

    def padded(x: Array, before: int, fill: int) -> Array:
        rest = [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, [(before, after), *rest], constant_values=fill)

    # A query's sequence is contiguous in the chunk, so what it sees of it is just before it.
    behind = Chunk(
        *(padded(x, room, fill) for x, fill in zip(chunk, (batch, -1, 0, 0), strict=True))
    )

    def attend_block(inputs: tuple[Array, Array]) -> AttentionOutput:
        index, queries = inputs

        def near(x: Array, before: int, count: int) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, index * block + room - before, count)

        own = Chunk(*(near(x, room, room + block) for x in behind))
        keys = Chunk(*(jnp.concatenate(pair) for pair in zip(ring, own, strict=True)))
        sequence, slot = near(behind.sequences, 0, block), near(behind.slots, 0, block)
        first = encoded_before(slot, room, size)
        if window is not None:
            first = jnp.maximum(first, slot - window + 1)
        seen = (sequence[:, None] == keys.sequences[None, :]) & (sequence < batch)[:, None]
        seen &= (keys.slots[None, :] >= first[:, None]) & (keys.slots[None, :] <= slot[:, None])
        return _attend(config, layer, queries, keys.keys, keys.values, seen)

    out = jax.lax.map(attend_block, (jnp.arange(blocks, dtype=jnp.int32), queries))
    heads = q.shape[1]
    return AttentionOutput(
        out.out.reshape(blocks * block, heads, -1)[:tokens],
        out.lse.reshape(blocks * block, heads)[:tokens],
    )


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
