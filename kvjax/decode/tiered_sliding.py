"""Layers with a sliding window over tiers: their last pages, kept on the device in a ring.

Nothing is chosen there and nothing fetched: a step reads what the window reaches, and all of it is
here. Page j of a row is at place j modulo R of its R; what a page overwrites is behind the window.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kvjax.decode.tiered_state import TieredCache, TieredShapes, with_pools
from kvjax.models import ModelConfig
from kvjax.pallas_kernels import paged_attention
from kvjax.pallas_kernels.output import AttentionOutput


def keep_last(
    shapes: TieredShapes,
    cache: TieredCache,
    layer: int,
    row: Int32[Array, ""],
    length: Int32[Array, ""],
    keys: Float[Array, "n Hkv P D"],
    values: Float[Array, "n Hkv P Dv"],
) -> TieredCache:
    """Put a prompt's last pages into the ring.

    Args:
      shapes: the program's.
      cache: with this row empty.
      layer: with a sliding window.
      row: int32, whose.
      length: int32, tokens of the prompt.
      keys: [n, Hkv, P, D], all pages that the prompt has room for.
      values: [n, Hkv, P, Dv].
    """
    count = shapes.ring_pages(layer)
    page = _first(shapes, layer, length) + jnp.arange(count, dtype=jnp.int32)
    at = row * count + page % count
    at = jnp.where(page < keys.shape[0], at, shapes.batch * count)
    pools = (
        pool.at[at].set(pages.at[page].get(mode="clip"), mode="drop")
        for pool, pages in ((cache.keys[layer], keys), (cache.values[layer], values))
    )
    return with_pools(cache, layer, *pools)


def attend_window(
    shapes: TieredShapes,
    config: ModelConfig,
    layer: int,
    q: Float[Array, "B Hq D"],
    cache: TieredCache,
    active: Bool[Array, " B"],
) -> AttentionOutput:
    """Attention of each row's new token to those before it that its window reaches.

    Positions are counted from the first page of the ring: a window only knows distances.

    Args:
      shapes: the program's.
      config: the model's.
      layer: with a sliding window.
      q: [B, Hq, D].
      cache: the token is not in it yet.
      active: bool [B]; other rows read nothing.
    """
    count = shapes.ring_pages(layer)
    first = _first(shapes, layer, cache.lengths)
    place = (first[:, None] + jnp.arange(count, dtype=jnp.int32)[None]) % count
    lengths = jnp.where(active, cache.lengths - first * shapes.page_size, 0)
    return paged_attention(
        q,
        cache.keys[layer],
        cache.values[layer],
        jnp.arange(shapes.batch, dtype=jnp.int32)[:, None] * count + place,
        lengths,
        scale=config.scale(layer),
        window=config.layers[layer].window,
        soft_cap=config.attn_soft_cap,
        query_positions=lengths,
        implementation=shapes.attention,
    )


def put_token(
    shapes: TieredShapes,
    cache: TieredCache,
    layer: int,
    token: tuple[Float[Array, "B Hkv D"], Float[Array, "B Hkv Dv"]],
    sound: Bool[Array, " B"],
) -> TieredCache:
    """The cache with each row's token in the ring.

    Args:
      shapes: the program's.
      cache: before.
      layer: with a sliding window.
      token: its key and value.
      sound: bool [B], rows to write; it must depend on what was read before, or XLA might write
        first, into a copy.
    """
    at, offset = _written_to(shapes, cache, layer, sound)
    head = jnp.arange(token[0].shape[1], dtype=jnp.int32)[None]
    pools = (
        pool.at[at[:, None], head, offset[:, None]].set(new, mode="drop")
        for pool, new in zip((cache.keys[layer], cache.values[layer]), token, strict=True)
    )
    return with_pools(cache, layer, *pools)


def newest_pages(
    shapes: TieredShapes, cache: TieredCache, layer: int
) -> tuple[Float[Array, "B Hkv P D"], Float[Array, "B Hkv P Dv"]]:
    """The page of each row that its token went to.

    Args:
      shapes: the program's.
      cache: after `put_token`, with lengths from before it.
      layer: with a sliding window.
    """
    at, _ = _written_to(shapes, cache, layer, jnp.ones_like(cache.lengths, bool))
    return cache.keys[layer][at], cache.values[layer][at]


def _first(shapes: TieredShapes, layer: int, length: Array) -> Array:
    """The page that the ring begins with, if the next token goes to position `length`."""
    last = length // shapes.page_size
    return jnp.maximum(last - shapes.ring_pages(layer) + 1, 0)


def _written_to(
    shapes: TieredShapes, cache: TieredCache, layer: int, rows: Bool[Array, " B"]
) -> tuple[Int32[Array, " B"], Int32[Array, " B"]]:
    """Page in the pool and offset of each row's token; past the pool for other rows."""
    count = shapes.ring_pages(layer)
    row = jnp.arange(shapes.batch, dtype=jnp.int32)
    at = row * count + cache.lengths // shapes.page_size % count
    return jnp.where(rows, at, shapes.batch * count), cache.lengths % shapes.page_size
