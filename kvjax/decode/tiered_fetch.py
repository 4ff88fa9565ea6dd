"""Pages that are elsewhere, inside a program: written, asked for, waited for by host callbacks.

Callbacks only see NumPy arrays. Integers order them by data dependence: a read takes what the last
write returned, a wait takes what the read returned.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jaxtyping import Array, Bool, Float32, Int32, Num

from kvjax.storage.handles import held

_INT = jax.ShapeDtypeStruct((), jnp.int32)


def put_prompt(
    handle: Int32[Array, ""],
    written: Int32[Array, ""],
    layer: int,
    row: Int32[Array, ""],
    keys: Num[Array, "n Hkv P D"],
    values: Num[Array, "n Hkv P D"],
) -> Int32[Array, ""]:
    """Write a prompt's pages of a layer; returns the next `written`.

    Args:
      handle: of the open `SequencePages`.
      written: what the last write returned.
      layer: whose pages.
      row: int32, which sequence.
      keys: [n, Hkv, P, D], from page 0, or the bytes that are kept of them.
      values: as keys.
    """
    done: Array = io_callback(
        functools.partial(_put, layer), _INT, handle, written, row, keys, values
    )
    return done


def put_filled(
    handle: Int32[Array, ""],
    written: Int32[Array, ""],
    layer: int,
    page: Int32[Array, " B"],
    keys: Num[Array, "B Hkv P D"],
    values: Num[Array, "B Hkv P D"],
) -> Int32[Array, ""]:
    """Write the pages that rows have just filled; returns the next `written`.

    Args:
      handle: of the open `SequencePages`.
      written: what the last write returned.
      layer: whose pages.
      page: int32 [B], their numbers; N or more where none was filled.
      keys: [B, Hkv, P, D], or bytes.
      values: as keys.
    """
    done: Array = io_callback(
        functools.partial(_append, layer), _INT, handle, written, page, keys, values
    )
    return done


def issue(
    handle: Int32[Array, ""],
    written: Int32[Array, ""],
    layer: int,
    ids: Int32[Array, "B Hkv K"],
    worth: Float32[Array, "B Hkv K"],
    *,
    first_row: int = 0,
) -> Int32[Array, ""]:
    """Start reading pages; returns a ticket at once.

    Args:
      handle: of the open `SequencePages`.
      written: what the last write returned.
      layer: whose pages.
      ids: int32 [B, Hkv, K]; N or more is none.
      worth: float32 [B, Hkv, K], attention that each gets.
      first_row: which sequence the first row of `ids` is.
    """
    begin = functools.partial(_issue, layer, first_row)
    ticket: Array = io_callback(begin, _INT, handle, written, ids, worth)
    return ticket


def collect(
    handle: Int32[Array, ""],
    ticket: Int32[Array, ""],
    layer: int,
    ids: Int32[Array, "B Hkv K"],
    missing: Bool[Array, "B Hkv K"],
    page: jax.ShapeDtypeStruct,
    *,
    first_row: int = 0,
) -> Num[Array, "two B K Hkv P D"]:
    """Wait for a ticket's pages: as many as the next of a few sizes, K, K/2, K/4, K/8 or none.

    Args:
      handle: of the open `SequencePages`.
      ticket: of `issue`.
      layer: as given to `issue`.
      ids: as given to `issue`, what is no page after all that are.
      missing: bool [B, Hkv, K], which of them are pages.
      page: [P, D], shape and dtype of one head's page, or of its bytes.
      first_row: as given to `issue`.

    Returns:
      Keys and values; zero where `ids` names no page.
    """
    batch, heads, room = ids.shape
    most = jnp.max(jnp.sum(missing, axis=2, dtype=jnp.int32))
    sizes = sorted({0, -(-room // 8), -(-room // 4), -(-room // 2), room})

    def transfer(size: int) -> Array:
        shape = (2, batch, room, heads, *page.shape)
        if not size:
            return jnp.zeros(shape, page.dtype)
        wanted = jax.ShapeDtypeStruct((2, batch, size, *shape[3:]), page.dtype)
        wait = functools.partial(_collect, layer, first_row)
        got: Array = io_callback(wait, wanted, handle, ticket, ids[:, :, :size])
        return jnp.pad(got, ((0, 0), (0, 0), (0, room - size), (0, 0), (0, 0), (0, 0)))

    index = jnp.searchsorted(jnp.asarray(sizes, jnp.int32), most).astype(jnp.int32)
    both: Array = lax.switch(index, [lambda size=size: transfer(size) for size in sizes])
    return both


def _put(layer: int, handle: Any, written: Any, row: Any, keys: Any, values: Any) -> np.int32:
    held(int(handle)).put(layer, int(row), np.asarray(keys), np.asarray(values))
    return np.int32(int(written) + 1)


def _append(layer: int, handle: Any, written: Any, page: Any, keys: Any, values: Any) -> np.int32:
    held(int(handle)).append(layer, np.asarray(page), np.asarray(keys), np.asarray(values))
    return np.int32(int(written) + 1)


def _issue(layer: int, first_row: int, handle: Any, written: Any, ids: Any, worth: Any) -> np.int32:
    del written
    pages = held(int(handle))
    return np.int32(pages.issue(layer, np.asarray(ids), np.asarray(worth), first_row=first_row))


def _collect(layer: int, first_row: int, handle: Any, ticket: Any, ids: Any) -> Any:
    return held(int(handle)).collect(int(ticket), layer, np.asarray(ids), first_row=first_row)
