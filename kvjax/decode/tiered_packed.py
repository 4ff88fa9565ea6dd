"""Pages over tiers in fewer bits: as bytes for the host, and back inside the program."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt8

from kvjax.decode.tiered_state import TieredShapes
from kvjax.formats import PagePacking, abstract_pages, empty_pages
from kvjax.pallas_kernels import PackedPages


def page_shape(shapes: TieredShapes) -> tuple[tuple[int, int], str]:
    """Shape and dtype of one KV head's page of keys, and of values, as it leaves the program.

    Bytes where there is a format, in P rows: keys and values of a page together, in two halves.
    """
    spec = shapes.spec
    if shapes.format is None:
        return (shapes.page_size, spec.layers[shapes.leaving[0]].head_dim), spec.dtype
    most = 0
    for index in shapes.leaving:
        parts = _parts(shapes, index)
        most = max(most, sum(_packed_bytes(packing, shapes, dim) for packing, dim in parts))
    return (shapes.page_size, -(-most // (2 * shapes.page_size))), "uint8"


def as_bytes(
    shapes: TieredShapes,
    layer: int,
    keys: Float[Array, "n Hkv P D"],
    values: Float[Array, "n Hkv P Dv"],
    positions: Int32[Array, " n"],
) -> tuple[UInt8[Array, "n Hkv P W"], UInt8[Array, "n Hkv P W"]]:
    """Whole pages as the bytes that are kept of them.

    Args:
      shapes: the program's, with a format.
      layer: whose pages.
      keys: [n, Hkv, P, D].
      values: [n, Hkv, P, Dv].
      positions: int32 [n], of each page's first token.
    """
    page, _ = page_shape(shapes)
    kept = []
    for (packing, _), pages in zip(_parts(shapes, layer), (keys, values), strict=True):
        kept += jax.tree.leaves(_stored(packing, packing.encode(pages, positions)))
    flat = jnp.concatenate([_bytes(x) for x in kept], axis=-1)
    flat = jnp.pad(flat, ((0, 0), (0, 0), (0, 2 * math.prod(page) - flat.shape[-1])))
    halves = flat.reshape(*flat.shape[:2], 2, *page)
    return halves[:, :, 0], halves[:, :, 1]


def from_bytes(
    shapes: TieredShapes,
    layer: int,
    keys: UInt8[Array, "n Hkv P W"],
    values: UInt8[Array, "n Hkv P W"],
) -> tuple[Float[Array, "n Hkv P D"], Float[Array, "n Hkv P Dv"]]:
    """What bytes stand for, in the cache's dtype.

    Args:
      shapes: the program's, with a format.
      layer: whose pages.
      keys: as `as_bytes` gave them.
      values: as `as_bytes` gave them.
    """
    dtype = jnp.dtype(shapes.spec.dtype)
    count, heads = keys.shape[:2]
    flat = jnp.stack([keys, values], axis=2).reshape(count, heads, -1)
    both, begin = [], 0
    for packing, dim in _parts(shapes, layer):
        wanted = _stored(packing, abstract_pages(packing, 2, heads, shapes.page_size, dim))
        leaves, structure = jax.tree.flatten(wanted)
        arrays = []
        for leaf in leaves:
            size = math.prod(leaf.shape[2:]) * leaf.dtype.itemsize
            leaf = jax.ShapeDtypeStruct((count, heads, *leaf.shape[2:]), leaf.dtype)
            arrays.append(_array(flat[:, :, begin : begin + size], leaf))
            begin += size
        template = empty_pages(packing, 1, heads, shapes.page_size, dim)
        packed = template.with_stored(jax.tree.unflatten(structure, arrays))
        both.append(packed.values().astype(dtype))
    return both[0], both[1]


def as_kept(
    shapes: TieredShapes,
    layer: int,
    keys: Float[Array, "n Hkv P D"],
    values: Float[Array, "n Hkv P Dv"],
    pages: Int32[Array, " n"],
    whole: Bool[Array, " n"],
    kept: tuple[Array, Array],
) -> tuple[Float[Array, "n Hkv P D"], Float[Array, "n Hkv P Dv"]]:
    """Pages as steps read them while they are near: whole ones as what is kept of them stands for.

    So that it does not matter whether a page stayed near or came back; but the first are as the
    model made them if the format says so, and where hot pages are to stay exact, others are until
    they leave.

    Args:
      shapes: the program's, with a format.
      layer: whose pages.
      keys: [n, Hkv, P, D].
      values: [n, Hkv, P, Dv].
      pages: int32 [n], which of its row each is.
      whole: bool [n], which pages are full.
      kept: of `as_bytes`.
    """
    if shapes.hot_exact:
        return keys, values
    mask = (whole & (pages >= shapes.sink_pages))[:, None, None, None]
    new_keys, new_values = from_bytes(shapes, layer, *kept)
    return jnp.where(mask, new_keys, keys), jnp.where(mask, new_values, values)


def _parts(
    shapes: TieredShapes, layer: int
) -> tuple[tuple[PagePacking, int], tuple[PagePacking, int]]:
    """How a layer's keys and values are packed, and the elements of a head's row of each."""
    assert shapes.format is not None
    chosen, of = shapes.format.layer(shapes.spec, layer), shapes.spec.layers[layer]
    assert chosen is not None
    return (chosen.keys, of.head_dim), (chosen.values, of.value_dim)


@functools.lru_cache(maxsize=64)
def _packed_bytes(packing: PagePacking, shapes: TieredShapes, dim: int) -> int:
    """Bytes that one KV head's page is kept in."""
    heads = shapes.spec.layers[shapes.leaving[0]].kv_heads
    packed = _stored(packing, abstract_pages(packing, 2, heads, shapes.page_size, dim))
    leaves = jax.tree.leaves(packed)
    return sum(math.prod(x.shape[2:]) * x.dtype.itemsize for x in leaves)


def _stored(packing: PagePacking, packed: PackedPages) -> dict[str, Any]:
    """The arrays of packed pages that are not shared by all."""
    _, heads, size, dim = packed.shape
    names = abstract_pages(packing, 2, heads, size, dim).stored()
    return {name: getattr(packed, name) for name in names}


def _bytes(array: Array) -> UInt8[Array, "n Hkv w"]:
    """An array [n, Hkv, ...] as the bytes that it is."""
    raw = lax.bitcast_convert_type(array, jnp.uint8)
    return raw.reshape(*array.shape[:2], -1)


def _array(raw: UInt8[Array, "n Hkv w"], wanted: jax.ShapeDtypeStruct) -> Array:
    """Undo `_bytes`."""
    size = wanted.dtype.itemsize
    shape = wanted.shape if size == 1 else (*wanted.shape, size)
    length = math.prod(wanted.shape[2:]) * size
    return lax.bitcast_convert_type(raw[:, :, :length].reshape(shape), wanted.dtype)
