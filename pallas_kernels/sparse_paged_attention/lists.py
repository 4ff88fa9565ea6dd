"""Page lists as every implementation takes them: ids that exist, counts that fit."""

import jax.numpy as jnp
from jaxtyping import Array, Int32


def bounded_lists(
    page_ids: Int32[Array, "B Hkv K"],
    page_tokens: Int32[Array, "B Hkv K"],
    num_pages: int,
    page_size: int,
) -> tuple[Int32[Array, "B Hkv K"], Int32[Array, "B Hkv K"]]:
    """Make lists that no implementation can read out of bounds by.

    Args:
        page_ids: int32 [B, Hkv, K]; what is not from 0 to num_pages - 1 names no page.
        page_tokens: int32 [B, Hkv, K], tokens that count.
        num_pages: pages in the pool.
        page_size: tokens a page.

    Returns:
        Ids, 0 where there is no page, and counts from 0 to `page_size`, 0 where there is none.
    """
    named = (page_ids >= 0) & (page_ids < num_pages)
    tokens = jnp.clip(page_tokens, 0, page_size)
    return jnp.where(named, page_ids, 0), jnp.where(named, tokens, 0)
