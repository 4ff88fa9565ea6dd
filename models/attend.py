"""Attention without pages: over the stream itself, or over one contiguous cache.

These are yardsticks. They favour being obviously right over speed; memory is bounded by
handling queries in blocks.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from kvjax.models.attention import Attend
from kvjax.models.choosing_attend import CausalAttend
from kvjax.models.config import ModelConfig
from kvjax.models.linear import soft_cap

_LOWEST = -3.4e38  # a float32 score no key can have; finite, so that a blind query makes no NaN


def dense_attention(
    q: Float[Array, "T Hq D"],
    k: Float[Array, "S Hkv D"],
    v: Float[Array, "S Hkv Dv"],
    *,
    query_segments: Int32[Array, " T"],
    query_positions: Int32[Array, " T"],
    key_segments: Int32[Array, " S"],
    key_positions: Int32[Array, " S"],
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    block: int = 256,
) -> Float32[Array, "T Hq Dv"]:
    """Causal attention of each query to the keys of its own segment, in float32.

    A key is visible if it has the query's segment, its position is not after the query's, and,
    under a window, it is one of the last `window` positions. `block` queries are scored at a time.
    """
    count, heads, _ = q.shape
    keys, groups = k.shape[1], heads // k.shape[1]
    block = max(1, min(block, count))
    blocks = -(-count // block)
    padding = blocks * block - count

    def padded(x: Array, value: int) -> Array:
        widths = [(0, padding)] + [(0, 0)] * (x.ndim - 1)
        x = jnp.pad(x, widths, constant_values=value)
        return x.reshape((blocks, block, *x.shape[1:]))

    k, v = k.astype(jnp.float32), v.astype(jnp.float32)

    def attend_block(queries: tuple[Array, Array, Array]) -> Array:
        rows, segments, positions = queries
        rows = rows.reshape(block, keys, groups, rows.shape[-1])
        scores = jnp.einsum("thgd,shd->hgts", rows, k, precision=lax.Precision.HIGHEST)
        scores = soft_cap(scores * scale, cap)
        visible = segments[:, None] == key_segments[None, :]
        visible &= key_positions[None, :] <= positions[:, None]
        if window is not None:
            visible &= key_positions[None, :] > positions[:, None] - window
        weights = jax.nn.softmax(jnp.where(visible[None, None], scores, _LOWEST), axis=-1)
        out = jnp.einsum("hgts,shd->thgd", weights, v, precision=lax.Precision.HIGHEST)
        flat: Array = out.reshape(block, heads, -1)
        return flat

    out = lax.map(
        attend_block,
        (
            padded(q.astype(jnp.float32), 0),
            padded(query_segments, 0),
            padded(query_positions, 0),
        ),
    )
    flat_out: Array = out.reshape(blocks * block, heads, -1)[:count]
    return flat_out


def causal_attend(
    config: ModelConfig, segments: Int32[Array, " T"], positions: Int32[Array, " T"]
) -> CausalAttend:
    """An `attend` with no cache: a token sees the tokens of its segment in the same stream.

    In layers with an indexer it sees those of them that the indexer chooses.

    Args:
        config: whose scale, windows and soft cap to use.
        segments: which sequence each token belongs to; padding may use an id of its own.
        positions: each token's logical position in its sequence.
    """

    def attend(
        layer: int, q: Array, k: Array, v: Array, state: None
    ) -> tuple[Float32[Array, "T Hq Dv"], None]:
        out = dense_attention(
            q,
            k,
            v,
            query_segments=segments,
            query_positions=positions,
            key_segments=segments,
            key_positions=positions,
            scale=config.scale(layer),
            window=config.layers[layer].window,
            cap=config.attn_soft_cap,
        )
        return out, state

    return CausalAttend(config, segments, positions, attend)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContiguousCache:
    """Keys and values of B sequences, each with room for C tokens, one array a layer."""

    keys: tuple[Float[Array, "B C Hkv D"], ...]
    values: tuple[Float[Array, "B C Hkv Dv"], ...]


def contiguous_cache(
    config: ModelConfig, batch: int, capacity: int, dtype: DTypeLike = jnp.float32
) -> ContiguousCache:
    """An empty cache of `batch` sequences of up to `capacity` tokens."""
    if batch < 1 or capacity < 1:
        raise ValueError(f"batch={batch} and capacity={capacity} must both be at least 1")

    def empty(heads: int, dim: int) -> Array:
        return jnp.zeros((batch, capacity, heads, dim), dtype)

    return ContiguousCache(
        keys=tuple(empty(layer.num_kv_heads, layer.head_dim) for layer in config.layers),
        values=tuple(empty(layer.num_kv_heads, layer.value_dim) for layer in config.layers),
    )


def contiguous_attend(
    config: ModelConfig, segments: Int32[Array, " T"], positions: Int32[Array, " T"]
) -> Attend[ContiguousCache]:
    """An `attend` over a `ContiguousCache`: writes each token at its position, then attends.

    Args:
        config: whose scale, windows and soft cap to use.
        segments: the cache row each token belongs to; ids outside 0..B-1 are padding, not written.
        positions: where in its row each token goes, 0..C-1.
    """

    def attend(
        layer: int, q: Array, k: Array, v: Array, cache: ContiguousCache
    ) -> tuple[Float32[Array, "T Hq Dv"], ContiguousCache]:
        old_k, old_v = cache.keys[layer], cache.values[layer]
        batch, capacity = old_k.shape[:2]
        rows = jnp.where(segments < 0, batch, segments)  # a negative index would wrap
        new_k = old_k.at[rows, positions].set(k.astype(old_k.dtype), mode="drop")
        new_v = old_v.at[rows, positions].set(v.astype(old_v.dtype), mode="drop")
        slots = jnp.arange(batch * capacity, dtype=jnp.int32)
        out = dense_attention(
            q,
            new_k.reshape((batch * capacity, *new_k.shape[2:])),
            new_v.reshape((batch * capacity, *new_v.shape[2:])),
            query_segments=segments,
            query_positions=positions,
            key_segments=slots // capacity,
            key_positions=slots % capacity,
            scale=config.scale(layer),
            window=config.layers[layer].window,
            cap=config.attn_soft_cap,
        )
        return out, ContiguousCache(
            keys=(*cache.keys[:layer], new_k, *cache.keys[layer + 1 :]),
            values=(*cache.values[:layer], new_v, *cache.values[layer + 1 :]),
        )

    return attend
