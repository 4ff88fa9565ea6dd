"""Pages over tiers as they leave the program, in a format as bytes, and back inside it."""

import functools
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Num, UInt8

from kvjax.decode.page_bytes import packed_bytes, page_bytes, pages_of
from kvjax.decode.tiered_state import TieredShapes
from kvjax.formats import PagePacking


def page_shape(shapes: TieredShapes) -> tuple[tuple[int, int], str]:
    """Shape and dtype of one KV head's page of keys, and of values, as it leaves the program.

    Bytes where there is a format, in P rows: keys and values of a page together, in two halves.
    Of latents, both halves of their rows.
    """
    spec = shapes.spec
    if shapes.format is None and shapes.latents is not None:
        return (shapes.page_size, shapes.latents.width), spec.dtype
    if shapes.format is None:
        return (shapes.page_size, spec.layers[shapes.leaving[0]].head_dim), spec.dtype
    most = max(sum(_part_bytes(shapes, index)) for index in shapes.leaving)
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
    parts = zip(_parts(shapes, layer), (keys, values), strict=True)
    kept = [packed_bytes(packing.encode(pages, positions)) for (packing, _), pages in parts]
    flat = jnp.concatenate(kept, axis=-1)
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
    size, begin, both = shapes.page_size, 0, []
    for (packing, dim), width in zip(
        _parts(shapes, layer), _part_bytes(shapes, layer), strict=True
    ):
        packed = pages_of(packing, flat[:, :, begin : begin + width], size, dim)
        both.append(packed.values().astype(dtype))
        begin += width
    return both[0], both[1]


def sent(
    shapes: TieredShapes,
    keys: Float[Array, "n Hkv P D"],
    values: Float[Array, "n Hkv P Dv"],
) -> tuple[Array, Array]:
    """Pages as they leave the program where there is no format.

    Args:
      shapes: the program's.
      keys: [n, Hkv, P, D].
      values: [n, Hkv, P, Dv].
    """
    return (keys, values) if shapes.latents is None else shapes.latents.halves(keys, values)


def back(
    shapes: TieredShapes, layer: int, keys: Num[Array, "n Hkv P W"], values: Num[Array, "n Hkv P W"]
) -> tuple[Float[Array, "n Hkv P D"], Float[Array, "n Hkv P Dv"]]:
    """Pages that came back, as pools hold them.

    Args:
      shapes: the program's.
      layer: whose pages.
      keys: as `as_bytes` or `sent` gave them.
      values: likewise.
    """
    if shapes.format is not None:
        return from_bytes(shapes, layer, keys, values)
    if shapes.latents is not None:
        return shapes.latents.parts(layer, keys, values)
    return keys, values


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


def means_of(
    shapes: TieredShapes,
    keys: UInt8[np.ndarray, "L n Hkv P W"],
    values: UInt8[np.ndarray, "L n Hkv P W"],
) -> Float[np.ndarray, "L n Hkv 1 Dm"]:
    """Mean keys of pages that have left as bytes; of latents, means of all that a query scores.

    Layers whose rows are shorter have zeros behind them.

    Args:
      shapes: the program's, with a format.
      keys: of all layers that leave, as `as_bytes` gave them.
      values: likewise.
    """
    found = []
    for layer, *both in zip(shapes.leaving, keys, values, strict=True):
        key, value = from_bytes(shapes, layer, *(jnp.asarray(half) for half in both))
        rows = key if shapes.latents is None else jnp.concatenate([value, key], axis=-1)
        found.append(np.asarray(rows.astype(jnp.float32).mean(axis=2, keepdims=True)))
    most = max(mean.shape[-1] for mean in found)
    return np.stack([np.pad(x, [(0, 0)] * 3 + [(0, most - x.shape[-1])]) for x in found])


def _parts(
    shapes: TieredShapes, layer: int
) -> tuple[tuple[PagePacking, int], tuple[PagePacking, int]]:
    """How a layer's keys and values are packed, and the elements of a head's row of each."""
    assert shapes.format is not None
    chosen, of = shapes.format.layer(shapes.spec, layer), shapes.spec.layers[layer]
    assert chosen is not None
    _, width, value_width = of.pool_dims
    return (chosen.keys, width), (chosen.values, value_width)


@functools.lru_cache(maxsize=256)
def _part_bytes(shapes: TieredShapes, layer: int) -> tuple[int, int]:
    """Bytes that one KV head's page of a layer's keys takes, and of its values."""
    (heads, _, _), size = shapes.spec.layers[layer].pool_dims, shapes.page_size
    keys, values = (page_bytes(packing, heads, size, dim) for packing, dim in _parts(shapes, layer))
    return keys, values
