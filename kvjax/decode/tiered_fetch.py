"""Pages that are elsewhere, inside a program: written, asked for, waited for by host callbacks.

Callbacks only see NumPy arrays. Integers order them by data dependence: a read takes what the last
write returned, a wait takes what the read returned.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, Num

from kvjax.decode.host_calls import call_host, writes_in_place
from kvjax.storage.handles import held

_INT = (jax.ShapeDtypeStruct((), jnp.int32),)


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
    put = functools.partial(_put, layer)
    return call_host(put, _INT, handle, written, row, keys, values)[0]


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
    append = functools.partial(_append, layer)
    return call_host(append, _INT, handle, written, page, keys, values)[0]


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
    return call_host(begin, _INT, handle, written, ids, worth)[0]


def collect(
    handle: Int32[Array, ""],
    ticket: Int32[Array, ""],
    layer: int,
    ids: Int32[Array, "B Hkv K"],
    missing: Bool[Array, "B Hkv K"],
    page: jax.ShapeDtypeStruct,
    *,
    first_row: int = 0,
    after: tuple[Array, ...] = (),
) -> tuple[Num[Array, "B K Hkv P D"], Num[Array, "B K Hkv P D"]]:
    """Wait for a ticket's pages.

    Where they are copied to a device they are as many as the next of a few sizes, K, K/2, K/4, K/8
    or none.

    Args:
      handle: of the open `SequencePages`.
      ticket: of `issue`.
      layer: as given to `issue`.
      ids: as given to `issue`, what is no page after all that are.
      missing: bool [B, Hkv, K], which of them are pages.
      page: [P, D], shape and dtype of one head's page, or of its bytes.
      first_row: as given to `issue`.
      after: what must have been computed before anybody waits. A barrier says no such thing: on
        CPUs none is left when XLA decides what runs first.

    Returns:
      Keys and values; anything where `ids` names no page.
    """
    batch, heads, room = ids.shape
    most = jnp.max(jnp.sum(missing, axis=2, dtype=jnp.int32))
    parts = () if writes_in_place() else (-(-room // 8), -(-room // 4), -(-room // 2))
    sizes = sorted({0, *parts, room})

    def transfer(size: int) -> tuple[Array, Array]:
        rest = (heads, *page.shape)
        if not size:
            nothing = jnp.zeros((batch, room, *rest), page.dtype)
            return nothing, nothing
        wanted = jax.ShapeDtypeStruct((batch, size, *rest), page.dtype)
        wait = functools.partial(_collect, layer, first_row)
        keys, values = call_host(wait, (wanted, wanted), handle, ticket, ids[:, :, :size], *after)
        padding = ((0, 0), (0, room - size), (0, 0), (0, 0), (0, 0))
        return jnp.pad(keys, padding), jnp.pad(values, padding)

    index = jnp.sum(jnp.asarray(sizes, jnp.int32) < most, dtype=jnp.int32)
    both: tuple[Array, Array] = lax.switch(
        index, [lambda size=size: transfer(size) for size in sizes]
    )
    return both


def _put(
    layer: int, number: Any, handle: Any, written: Any, row: Any, keys: Any, values: Any
) -> None:
    held(int(handle)).put(layer, int(row), keys, values)
    number[...] = written + 1


def _append(
    layer: int, number: Any, handle: Any, written: Any, page: Any, keys: Any, values: Any
) -> None:
    held(int(handle)).append(layer, page, keys, values)
    number[...] = written + 1


def _issue(
    layer: int, first_row: int, ticket: Any, handle: Any, written: Any, ids: Any, worth: Any
) -> None:
    del written
    ticket[...] = held(int(handle)).issue(layer, ids, worth, first_row=first_row)


def _collect(
    layer: int,
    first_row: int,
    keys: Any,
    values: Any,
    handle: Any,
    ticket: Any,
    ids: Any,
    *after: Any,
) -> None:
    del after
    held(int(handle)).collect(int(ticket), layer, ids, out=(keys, values), first_row=first_row)
