"""Time of attention over pages of a format, and of encoding them, over all layers' pages.

All layers' pages stand in one pool, more than a processor's cache holds, and are attended to layer
by layer in a loop within one program.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import PagedKVCache, gather
from kvjax.cache.pages import set_page
from kvjax.formats import Format, LayerFormat, empty_pages
from kvjax.models import ModelConfig
from kvjax.pallas_kernels import paged_attention
from kvjax.pallas_kernels.packed_pages import PackedPages

TOGETHER = 32
"""Pages that are encoded at once, as many as a prefill chunk of 512 tokens fills."""


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds a page of 16 tokens of one layer, all heads."""

    attention: float
    encode: float


@dataclasses.dataclass(frozen=True)
class Tokens:
    """All layers' keys and values of one sequence, one layer after the other."""

    keys: Float[Array, "LT Hkv D"]
    values: Float[Array, "LT Hkv Dv"]
    layers: int


def tokens_of(cache: PagedKVCache, count: int) -> Tokens:
    """The first tokens of the only sequence of a cache whose pools are plain.

    Args:
      cache: whose layers are all of one shape.
      count: tokens, all of them stored.
    """
    pairs = [gather(cache, layer)[:2] for layer in range(len(cache.k_pages))]
    keys, values = (jnp.concatenate([pair[i][0, :count] for pair in pairs]) for i in (0, 1))
    return Tokens(keys, values, len(pairs))


def measure(
    tokens: Tokens, config: ModelConfig, chosen: Format | None, page_size: int, repeats: int = 3
) -> Times:
    """Time one format, or bf16; the least of some runs.

    Args:
      tokens: what pages hold.
      config: the model's.
      chosen: the format, whose first packed layer's packing is taken for all; None is bf16.
      page_size: tokens a page.
      repeats: runs.
    """
    pages = tuple(_paged(x, page_size).astype(jnp.bfloat16) for x in (tokens.keys, tokens.values))
    a_page = pages[0].shape[0] * page_size / 16
    encode_s = float("nan")
    pools: Any = pages
    if chosen is not None:
        layer = LayerFormat(chosen.keys, chosen.values)
        encode = jax.jit(_encode, static_argnums=0).lower(layer, *pages).compile()
        pools, encode_s = _best(lambda: encode(*pages), repeats)
    dims = config.layers[0]
    q = jax.random.normal(jax.random.key(0), (1, dims.num_heads, dims.head_dim))
    static = (tokens.layers, config.scale(0))
    attend = jax.jit(_attend, static_argnums=0).lower(static, q, *pools).compile()
    _, attention_s = _best(lambda: attend(q, *pools), repeats)
    return Times(attention_s / a_page, encode_s / a_page)


def _paged(rows: Float[Array, "T Hkv D"], size: int) -> Float[Array, "N Hkv P D"]:
    return rows.reshape(-1, size, *rows.shape[1:]).swapaxes(1, 2)


def _best(function: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    found, best = jax.block_until_ready(function()), float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        found = jax.block_until_ready(function())
        best = min(best, time.perf_counter() - began)
    return found, best


def _encode(
    layer: LayerFormat, keys: Float[Array, "N Hkv P D"], values: Float[Array, "N Hkv P Dv"]
) -> tuple[PackedPages, PackedPages]:
    """Encode pages some at a time, each lot into its place in a pool."""
    count, heads, size, _ = keys.shape
    together = min(TOGETHER, count)

    def step(index: Array, pools: tuple[PackedPages, ...]) -> tuple[PackedPages, ...]:
        first = jnp.minimum(index * together, count - together)
        positions = (first + jnp.arange(together, dtype=jnp.int32)) * size
        packed = [
            packing.encode(jax.lax.dynamic_slice_in_dim(x, first, together), positions)
            for packing, x in ((layer.keys, keys), (layer.values, values))
        ]
        return tuple(
            pool.map_stored(lambda x, y: set_page(x, y, first), new)
            for pool, new in zip(pools, packed, strict=True)
        )

    pools = tuple(
        empty_pages(packing, count, heads, size, x.shape[3])
        for packing, x in ((layer.keys, keys), (layer.values, values))
    )
    keys_pool, values_pool = jax.lax.fori_loop(0, -(-count // together), step, pools)
    return keys_pool, values_pool


def _attend(static: tuple[int, float], q: Float[Array, "1 Hq D"], keys: Any, values: Any) -> Array:
    layers, scale = static
    each = keys.shape[0] // layers
    lengths = jnp.full((1,), each * keys.shape[2], jnp.int32)

    def step(layer: Array, q: Array) -> Array:
        tables = (layer * each + jnp.arange(each, dtype=jnp.int32))[None]
        return q + paged_attention(q, keys, values, tables, lengths, scale=scale).out

    answer: Array = jax.lax.fori_loop(0, layers, step, q)
    return answer
