"""Index keys (DSA) in a cache's pages: rounded as they are kept, and written."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from kvjax.cache.pages import put_rows
from kvjax.cache.state import IndexPages, PagedKVCache

_LARGEST = 448.0  # float8_e4m3fn
_LEAST = 1e-4  # a key below it is stored as if this were its greatest element, as DeepGEMM does


class IndexKeys(NamedTuple):
    """Index keys of T tokens as a layer's pages hold them.

    Attributes:
      keys: [T, Di], in the dtype of the pool.
      scales: float32 [T], what float8 keys are multiplied by; else None.
    """

    keys: Float[Array, "T Di"]
    scales: Float32[Array, " T"] | None

    @property
    def values(self) -> Float32[Array, "T Di"]:
        """What they stand for."""
        keys = self.keys.astype(jnp.float32)
        return keys if self.scales is None else keys * self.scales[:, None]


def kept_index_keys(cache: PagedKVCache, layer: int, keys: Float[Array, "T Di"]) -> IndexKeys:
    """Round index keys to what the layer's pages hold.

    A float8 key has a scale of its own, a power of two, rounded up so that no element overflows
    (DeepSeek-V3.2's ue8m0 scales of blocks of 128). A key that is not finite stays so.

    Args:
      cache: for what the layer keeps.
      layer: index of the layer; one with index keys.
      keys: [T, Di].
    """
    pages = _pages(cache, layer)
    if pages.scales is None:
        return IndexKeys(keys.astype(pages.keys.dtype), None)
    greatest = jnp.maximum(jnp.max(jnp.abs(keys), axis=1), _LEAST) / _LARGEST
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
    written = IndexPages(put_rows(pages.keys, new.keys[:, None], page, offset), scales)
    return dataclasses.replace(
        cache, index_pages=(*cache.index_pages[:layer], written, *cache.index_pages[layer + 1 :])
    )


def _pages(cache: PagedKVCache, layer: int) -> IndexPages:
    pages = cache.index_pages[layer]
    assert pages is not None
    return pages
