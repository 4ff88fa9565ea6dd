"""Pages of which some are near: only the others are read, in a program."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, Shaped

from kvjax.decode.fetch import Worth, collect, issue_missing
from kvjax.decode.near_memory import Near, read_pinned


def read_missing(
    near: Near,
    handle: Int32[Array, ""],
    layer: int,
    ids: Int32[Array, "Hkv K"],
    worth: Worth,
    page: jax.ShapeDtypeStruct,
) -> Shaped[Array, "two K Hkv P D"]:
    """Gather a layer's pages from near memory, and what is not there through a callback.

    What is not there is packed to the front, and as much is transferred as the next of a few
    sizes: K, K / 2, K / 4, K / 8 pages a head, or nothing.

    Args:
      near: units in memory that the program reads.
      handle: of the open `PageReads`.
      layer: whose pages.
      ids: pages of the prefix for each KV head; N or more is none.
      worth: of these pages.
      page: [P, D], shape and dtype of one head's page.

    Returns:
      Keys and values, zero where `ids` names no page.
    """
    ticket, rows, missing = issue_missing(handle, layer, ids, worth)
    heads, room = ids.shape
    resident = jnp.zeros((2, room, heads, *page.shape), page.dtype)
    device_rows = 0
    if near.device is not None:
        resident, device_rows = _gather(near.device, rows, layer), len(near.device)
    if near.pinned is not None:
        resident = read_pinned(near.pinned, rows - device_rows, layer, resident)
    order = jnp.argsort(~missing, axis=1, stable=True).astype(jnp.int32)
    front = jnp.take_along_axis(missing, order, axis=1)
    packed = jnp.where(front, jnp.take_along_axis(ids, order, axis=1), NO_PAGE)
    column = jnp.where(front, order, room)
    most = jnp.max(jnp.sum(missing, axis=1, dtype=jnp.int32))
    sizes = sorted({0, -(-room // 8), -(-room // 4), -(-room // 2), room})

    def transfer(size: int) -> Array:
        if not size:
            return resident
        some = packed[:, :size]
        got = collect(handle, ticket, layer, some, page)
        head = jnp.arange(heads, dtype=jnp.int32)[None, :]
        return resident.at[:, column[:, :size].T, head].set(got, mode="drop")

    index = jnp.searchsorted(jnp.asarray(sizes, jnp.int32), most).astype(jnp.int32)
    both: Array = lax.switch(index, [lambda size=size: transfer(size) for size in sizes])
    return both


NO_PAGE = 2**31 - 1
"""Past every page of a prefix."""


def _gather(device: Array, rows: Int32[Array, "two Hkv K"], layer: int) -> Array:
    """[2, K, Hkv, P, D], zero where a row is past those of device memory."""
    _, layers, heads, kinds, _, _ = device.shape
    kind = jnp.minimum(jnp.arange(2, dtype=jnp.int32), kinds - 1)[:, None, None]
    head = (jnp.arange(rows.shape[1], dtype=jnp.int32) % heads)[None, :, None]
    both = device.at[rows, layer % layers, head, kind].get(mode="fill", fill_value=0)
    return both.swapaxes(1, 2)
