"""The few elements of a page's head that are kept as they are, beside codes for all of them."""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float16, Float32, UInt16

from kvjax.errors import KvjaxError

MOST_PLACES = 2**16 - 1
"""Elements of a page's head that a uint16 can tell apart, beside "none"."""

GREATEST = float(jnp.finfo(jnp.float16).max)


def room(share: float, page_size: int, dim: int) -> int:
    """Outliers that a page's head has places for.

    Args:
      share: of the elements.
      page_size: tokens a page.
      dim: elements of a head's row.
    """
    return math.ceil(share * page_size * dim)


def check_places(what: str, page_size: int, dim: int) -> None:
    """Refuse pages whose elements outliers cannot name.

    Raises:
      KvjaxError: there are too many.
    """
    if page_size * dim > MOST_PLACES:
        raise KvjaxError(
            f"page_size is {page_size}: pages of {what} of {dim} elements have "
            f"{page_size * dim} elements a head, and outliers are found among at most "
            f"{MOST_PLACES}; use a smaller page_size"
        )


def largest(
    pages: Float32[Array, "N Hkv P D"], deviation: Float32[Array, "N Hkv P D"], count: int
) -> tuple[UInt16[Array, "N Hkv E"], Float16[Array, "N Hkv E"]]:
    """The elements that deviate most.

    Args:
      pages: the elements, finite.
      deviation: of each, 0 or more; 0 is never chosen.
      count: E, most of a page's head.

    Returns:
      Where they are, token * D + channel, in ascending order, and P * D where there is none; and
      what they are.
    """
    pages_count, heads, size, dim = pages.shape
    found, at = lax.top_k(deviation.reshape(pages_count, heads, size * dim), count)
    at = jnp.sort(jnp.where(found > 0, at, size * dim), axis=2)
    flat = pages.reshape(pages_count, heads, size * dim)
    value = jnp.take_along_axis(flat, jnp.minimum(at, size * dim - 1), axis=2)
    value = jnp.where(at < size * dim, jnp.clip(value, -GREATEST, GREATEST), 0.0)
    return at.astype(jnp.uint16), value.astype(jnp.float16)


def marked(at: UInt16[Array, "N Hkv E"], size: int, dim: int) -> Bool[Array, "N Hkv P D"]:
    """Which elements of pages are outliers.

    Args:
      at: their places, as `largest` returns them.
      size: P.
      dim: D.
    """
    pages, heads, _ = at.shape
    page = jnp.arange(pages, dtype=jnp.int32)[:, None, None]
    head = jnp.arange(heads, dtype=jnp.int32)[None, :, None]
    none = jnp.zeros((pages, heads, size * dim), bool)
    flat = none.at[page, head, at.astype(jnp.int32)].set(True, mode="drop")
    return flat.reshape(pages, heads, size, dim)
