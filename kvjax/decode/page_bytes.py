"""Packed pages of one layer as plain bytes, one KV head's page after another, and back."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, UInt8

from kvjax.formats import PagePacking, abstract_pages, empty_pages
from kvjax.pallas_kernels import PackedPages


def page_bytes(packing: PagePacking, heads: int, page_size: int, dim: int) -> int:
    """Bytes that one KV head's page is kept in: codes, scales and all that pages do not share.

    Args:
      packing: of the pages.
      heads: Hkv.
      page_size: P, tokens a page.
      dim: D.
    """
    stored = abstract_pages(packing, 2, heads, page_size, dim).stored()
    return sum(math.prod(x.shape[2:]) * x.dtype.itemsize for x in jax.tree.leaves(stored))


def packed_bytes(packed: PackedPages) -> UInt8[Array, "n Hkv w"]:
    """The arrays of packed pages that pages do not share, after one another.

    Args:
      packed: of n pages, as `PagePacking.encode` gives them.
    """
    return jnp.concatenate([array_bytes(x) for x in jax.tree.leaves(packed.stored())], axis=-1)


def pages_of(
    packing: PagePacking, raw: UInt8[Array, "n Hkv w"], page_size: int, dim: int
) -> PackedPages:
    """Undo `packed_bytes`.

    Args:
      packing: of the pages.
      raw: as `packed_bytes` gave them.
      page_size: P, tokens a page.
      dim: D.
    """
    heads = raw.shape[1]
    wanted = abstract_pages(packing, 2, heads, page_size, dim).stored()
    leaves, structure = jax.tree.flatten(wanted)
    arrays, begin = [], 0
    for leaf in leaves:
        size = math.prod(leaf.shape[2:]) * leaf.dtype.itemsize
        arrays.append(bytes_array(raw[:, :, begin : begin + size], leaf.shape[2:], leaf.dtype))
        begin += size
    template = empty_pages(packing, 1, heads, page_size, dim)
    return template.with_stored(jax.tree.unflatten(structure, arrays))


def array_bytes(array: Array) -> UInt8[Array, "n Hkv w"]:
    """An array [n, Hkv, ...] as the bytes that it is."""
    raw = lax.bitcast_convert_type(array, jnp.uint8)
    return raw.reshape(*array.shape[:2], -1)


def bytes_array(raw: UInt8[Array, "n Hkv w"], shape: tuple[int, ...], dtype: Any) -> Array:
    """Undo `array_bytes`.

    Args:
      raw: its bytes, no more.
      shape: of the array behind its first two axes.
      dtype: of the array.
    """
    size = jnp.dtype(dtype).itemsize
    whole = (*raw.shape[:2], *shape)
    return lax.bitcast_convert_type(raw.reshape(whole if size == 1 else (*whole, size)), dtype)
