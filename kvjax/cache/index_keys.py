"""Index keys (DSA) in a cache's pages: rounded as they are kept, and written."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt8

from kvjax.cache.pages import put_rows
from kvjax.cache.state import IndexPages, PagedKVCache
from kvjax.pallas_kernels.lightning_indexer.float4 import (
    FLOAT4_LARGEST,
    float4_codes,
    float4_values,
)

_LARGEST = 448.0  # of float8_e4m3fn
_LEAST = 1e-4  # a key below it is stored as if this were its greatest element, as DeepGEMM does


class IndexKeys(NamedTuple):
    """Index keys of T tokens as a layer's pages hold them.

    Attributes:
      keys: [T, Di], in the dtype of the pool; of 4 bits the codes, uint8 from 0 to 15.
      scales: float32 [T], what keys of 8 or 4 bits are multiplied by; else None.
    """

    keys: Float[Array, "T Di"] | UInt8[Array, "T Di"]
    scales: Float32[Array, " T"] | None

    @property
    def values(self) -> Float32[Array, "T Di"]:
        """What they stand for."""
        codes = self.keys.dtype == jnp.uint8
        keys = float4_values(self.keys.astype(jnp.int32)) if codes else self.keys
        keys = keys.astype(jnp.float32)
        return keys if self.scales is None else keys * self.scales[:, None]


def kept_index_keys(cache: PagedKVCache, layer: int, keys: Float[Array, "T Di"]) -> IndexKeys:
    """Round index keys to what the layer's pages hold.

    A float8 key has a scale of its own, a power of two, rounded up so that no element overflows
    (DeepSeek-V3.2's ue8m0 scales of blocks of 128); a float4 key's takes its greatest element to 6,
    the greatest there is. A key that is not finite stays so.

    Args:
      cache: for what the layer keeps.
      layer: index of the layer; one with index keys.
      keys: [T, Di].
    """
    pages = _pages(cache, layer)
    if pages.scales is None:
        return IndexKeys(keys.astype(pages.keys.dtype), None)
    greatest = jnp.maximum(jnp.max(jnp.abs(keys), axis=1), _LEAST)
    if pages.keys.dtype == jnp.uint8:
        scales = jnp.where(jnp.isfinite(greatest), greatest / FLOAT4_LARGEST, jnp.nan)
        return IndexKeys(float4_codes(keys / scales[:, None]), scales)
    greatest /= _LARGEST
    part, exponent = jnp.frexp(greatest)
    scales = jnp.ldexp(jnp.float32(1), exponent - (part == 0.5).astype(exponent.dtype))
    scales = jnp.where(jnp.isfinite(greatest), scales, jnp.nan)
    return IndexKeys((keys / scales[:, None]).astype(pages.keys.dtype), scales)


def write_index(
    cache: PagedKVCache,
    layer: int,
    new: IndexKeys,
    slots: tuple[Int32[Array, " T"], Int32[Array, " T"]],
) -> PagedKVCache:
    """Store one layer's index keys of T tokens.

    Args:
      cache: the cache.
      layer: index of the layer, static; one with index keys.
      new: what `kept_index_keys` returned.
      slots: what `token_slots` said. A slot must not occur twice.
    """
    pages, (page, offset) = _pages(cache, layer), slots
    scales = pages.scales
    if scales is not None and new.scales is not None:
        scales = scales.at[page, 0, offset].set(new.scales, mode="drop")
    rows, keys = pages.keys.shape[2], pages.keys
    if keys.dtype != jnp.uint8:
        keys = put_rows(keys, new.keys[:, None], page, offset)
    else:
        # Two tokens of a chunk may share a byte, so those of the low bits are written first.
        for shift in (0, 4):
            mine = offset // rows == shift // 4
            at = jnp.where(mine, page, cache.num_pages), offset % rows
            beside = keys.at[at[0], 0, at[1]].get(mode="clip") & (0xF0 >> shift)
            keys = put_rows(keys, (beside | new.keys << shift)[:, None], *at)
    written = IndexPages(keys, scales)
    return dataclasses.replace(
        cache, index_pages=(*cache.index_pages[:layer], written, *cache.index_pages[layer + 1 :])
    )


def _pages(cache: PagedKVCache, layer: int) -> IndexPages:
    pages = cache.index_pages[layer]
    assert pages is not None
    return pages
