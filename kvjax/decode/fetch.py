"""Pages from storage inside a program: `issue` starts a read, `collect` waits for it.

Both are host callbacks that only see NumPy arrays. A ticket orders them by data dependence, so they
also work in loops and under `shard_map`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, Shaped

from kvjax.decode.host_calls import call_host
from kvjax.storage.handles import held


class Worth(NamedTuple):
    """What chosen pages are worth keeping in memory for."""

    mass: Float32[Array, "Hkv K"]  # attention each got, summed over queries and query heads
    important: Float32[Array, "Hkv K"]  # the share of its tokens that are attended to


def issue(
    handle: Int32[Array, ""], layer: int, ids: Int32[Array, "Hkv K"], worth: Worth | None
) -> Int32[Array, ""]:
    """Start reading pages of a layer; returns at once.

    Args:
      handle: of the open `PageReads`.
      layer: whose pages.
      ids: pages of the prefix for each KV head; N or more is none.
      worth: of these pages; None if only their keys are wanted, to choose pages by.

    Returns:
      A ticket for `collect`.
    """
    results = (jax.ShapeDtypeStruct((), jnp.int32),)
    return call_host(functools.partial(_issue, layer), results, handle, ids, *(worth or ()))[0]


def issue_missing(
    handle: Int32[Array, ""], layer: int, ids: Int32[Array, "Hkv K"], worth: Worth
) -> tuple[Int32[Array, ""], Int32[Array, "two Hkv K"], Bool[Array, "Hkv K"]]:
    """Start reading those pages of a layer that are not near; returns at once.

    Args:
      handle: of the open `PageReads`.
      layer: whose pages.
      ids: pages of the prefix for each KV head; N or more is none.
      worth: of these pages.

    Returns:
      A ticket for `collect`, -1 once a read has failed; the rows of near memory with each page's
      keys and values, past all rows where it is not there; and which pages are to be collected.
    """
    shapes = (
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((2, *ids.shape), jnp.int32),
        jax.ShapeDtypeStruct(ids.shape, jnp.bool_),
    )
    start = functools.partial(_issue_missing, layer)
    ticket, found, missing = call_host(start, shapes, handle, ids, *worth)
    return ticket, found, missing


def collect(
    handle: Int32[Array, ""],
    ticket: Int32[Array, ""],
    layer: int,
    ids: Int32[Array, "Hkv K"],
    page: jax.ShapeDtypeStruct,
    *,
    to_choose: bool = False,
) -> Shaped[Array, "kinds K Hkv P D"]:
    """Wait for a ticket's pages.

    Args:
      handle: of the open `PageReads`.
      ticket: of `issue`.
      layer: as given to `issue`.
      ids: as given to `issue`.
      page: [P, D], shape and dtype of one head's page.
      to_choose: whether `issue` was given no worth: only keys are wanted.

    Returns:
      Keys and values, or only keys; zero where `ids` names no page, and everywhere once a read has
      failed: the session knows.
    """
    heads, count = ids.shape
    kinds = 1 if to_choose else 2
    pages = jax.ShapeDtypeStruct((kinds, count, heads, *page.shape), page.dtype)
    wait = functools.partial(_collect, layer, to_choose)
    return call_host(wait, (pages,), handle, ticket, ids)[0]


def _issue(
    layer: int, ticket: Any, handle: Any, ids: Any, mass: Any = None, important: Any = None
) -> None:
    reads = held(int(handle))
    if mass is None:
        ticket[...] = reads.issue(layer, ids, to_choose=True)
    else:
        ticket[...] = reads.issue(layer, ids, mass=mass, important=important)


def _issue_missing(
    layer: int,
    ticket: Any,
    rows: Any,
    missing: Any,
    handle: Any,
    ids: Any,
    mass: Any,
    important: Any,
) -> None:
    ticket[...], rows[...], missing[...] = held(int(handle)).issue_missing(
        layer, ids, mass=mass, important=important
    )


def _collect(layer: int, to_choose: bool, pages: Any, handle: Any, ticket: Any, ids: Any) -> None:
    pages[...] = held(int(handle)).collect(int(ticket), layer, ids, to_choose=to_choose)
