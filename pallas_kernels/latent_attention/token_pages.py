"""A choice of tokens as the page reads that it takes."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


class TokenPages(NamedTuple):
    """The pages of chosen tokens, as `sparse_latent_attention` takes them.

    `pages * P / tokens` is the amplification: tokens read for each one that was chosen.

    Attributes:
        page_ids: int32 [B, K], the pages that hold a chosen token, in the order of the table; N
            where there are no more.
        page_tokens: bool [B, K, P], which of their tokens are chosen.
        pages: int32 [B], pages that are read.
        tokens: int32 [B], tokens that were chosen, each once.
    """

    page_ids: Int32[Array, "B K"]
    page_tokens: Bool[Array, "B K P"]
    pages: Int32[Array, "B"]
    tokens: Int32[Array, "B"]


def pages_of_tokens(
    token_ids: Int32[Array, "B T"],
    block_tables: Int32[Array, "B M"],
    *,
    num_pages: int,
    page_size: int,
) -> TokenPages:
    """Find the pages of chosen tokens.

    Args:
        token_ids: int32 [B, T], slots of each row's sequence, in any order; a slot named twice
            counts once, and what is not from 0 to M * P - 1 names none (-1 fills a list up).
        block_tables: int32 [B, M], page ids.
        num_pages: N, pages in the pool.
        page_size: P, tokens a page.

    Returns:
        The `TokenPages`; K is min(T, M), so that no choice is cut short.
    """
    batch, width = block_tables.shape
    slots = width * page_size
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    # -1 would wrap around, even where what is out of range is dropped.
    at = jnp.where(token_ids < 0, slots, token_ids)
    chosen = jnp.zeros((batch, slots), bool).at[row, at].set(True, mode="drop")
    by_page = chosen.reshape(batch, width, page_size)
    used = by_page.any(axis=2)
    room = min(token_ids.shape[1], width)
    order = jnp.argsort(~used, axis=1, stable=True)[:, :room].astype(jnp.int32)
    listed = jnp.take_along_axis(used, order, axis=1)
    return TokenPages(
        page_ids=jnp.where(listed, jnp.take_along_axis(block_tables, order, axis=1), num_pages),
        page_tokens=jnp.take_along_axis(by_page, order[..., None], axis=1),
        pages=used.sum(axis=1, dtype=jnp.int32),
        tokens=chosen.sum(axis=1, dtype=jnp.int32),
    )
