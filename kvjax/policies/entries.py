"""An index's arrays, one entry a page, so held that one page's can be written in place.

XLA:CPU converts all of an array of 16-bit or 8-bit floats to float32 and back to write a part of
it, so such arrays are held as the unsigned integers of the same bits: `mean` of bfloat16 is uint16,
by the name of `mean.bfloat16`. Reading them costs nothing.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

_BITS = {1: jnp.uint8, 2: jnp.uint16}


def hold(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays as an index holds them.

    Args:
      arrays: any, by names without a dot.
    """
    held = {}
    for name, array in arrays.items():
        size = array.dtype.itemsize
        if jnp.issubdtype(array.dtype, jnp.floating) and size in _BITS:
            held[f"{name}.{array.dtype.name}"] = lax.bitcast_convert_type(array, _BITS[size])
        else:
            held[name] = array
    return held


def loose(held: Mapping[str, Array]) -> dict[str, Array]:
    """The inverse of `hold`.

    Args:
      held: what `hold` gave.
    """
    arrays = {}
    for name, array in held.items():
        name, _, dtype = name.partition(".")
        arrays[name] = lax.bitcast_convert_type(array, jnp.dtype(dtype)) if dtype else array
    return arrays


def write_page(
    held: Mapping[str, Array], page: Int32[Array, ""], entries: Mapping[str, Array]
) -> dict[str, Array]:
    """The arrays with one page's entries replaced; unchanged if there is no such page.

    Args:
      held: what `hold` gave, each [Hkv, N, ...].
      page: int32 scalar, 0 or more; N or more is no page.
      entries: the page's, each [Hkv, 1, ...], not held; the arrays that they do not name stay.
    """
    written = {
        name: held[name].at[:, page].set(entry[:, 0], mode="drop")
        for name, entry in hold(entries).items()
    }
    return {**held, **written}
