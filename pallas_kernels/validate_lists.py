"""The rules of lists of pages: shapes before tracing, values outside jit."""

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int32

from kvjax.pallas_kernels.validate import check_float, check_int32, check_pools, concrete


def check_lists(
    q: Float[Array, "B Hq D"],
    k_pages: Float[Array, "N Hkv P D"],
    v_pages: Float[Array, "N Hkv P Dv"],
    page_ids: Int32[Array, "B Hkv K"],
    page_tokens: Int32[Array, "B Hkv K"],
) -> None:
    """Check ranks, dtypes and shapes of one call of `sparse_paged_attention`.

    Args:
        q: [B, Hq, D], float32, bfloat16 or float16.
        k_pages: [N, Hkv, P, D], float32, bfloat16 or float16.
        v_pages: [N, Hkv, P, Dv], the keys' dtype.
        page_ids: int32 [B, Hkv, K].
        page_tokens: int32 [B, Hkv, K].

    Raises:
        ValueError: any rule is broken; the message names the argument.
    """
    check_float("q", q, "[B, Hq, D]")
    check_float("k_pages", k_pages, "[N, Hkv, P, D]")
    check_float("v_pages", v_pages, "[N, Hkv, P, Dv]")
    check_int32("page_ids", page_ids, "[B, Hkv, K]")
    check_int32("page_tokens", page_tokens, "[B, Hkv, K]")
    for name, array in (
        ("q", q),
        ("k_pages", k_pages),
        ("v_pages", v_pages),
        ("page_ids", page_ids),
    ):
        if 0 in array.shape and not (name.endswith("_pages") and array.shape[2] == 0):
            raise ValueError(f"{name} has shape {array.shape}; every axis needs at least one entry")
    check_pools(q, k_pages, v_pages)
    wanted = (q.shape[0], k_pages.shape[1])
    if page_ids.shape[:2] != wanted:
        raise ValueError(
            f"page_ids has shape {page_ids.shape}; q has {wanted[0]} rows and k_pages {wanted[1]} "
            f"KV heads, so it must be {wanted} and how many pages a list has room for"
        )
    if page_tokens.shape != page_ids.shape:
        raise ValueError(
            f"page_tokens has shape {page_tokens.shape}; it must be page_ids', {page_ids.shape}"
        )


def check_page_lists(
    page_ids: ArrayLike, page_tokens: ArrayLike, num_pages: int, page_size: int
) -> None:
    """Check the values of page lists.

    Args:
        page_ids: int32 [B, Hkv, K], concrete; `num_pages` and more name no page.
        page_tokens: int32 [B, Hkv, K], concrete, tokens of each page that count.
        num_pages: pages in the pool.
        page_size: tokens a page.

    Raises:
        ValueError: an id is negative, a list names a page twice with tokens, or a count is not
            from 0 to `page_size`; the message names the first entry. Also under jit, where there
            are no values to look at.
    """
    ids = concrete("page_ids", page_ids, rank=3)
    tokens = concrete("page_tokens", page_tokens, rank=3)
    if tokens.shape != ids.shape:
        raise ValueError(f"page_tokens has shape {tokens.shape}; it must be {ids.shape}")
    wrong = np.argwhere(ids < 0)
    if wrong.size:
        row, head, entry = wrong[0]
        raise ValueError(
            f"page_ids[{row}, {head}, {entry}] is {ids[row, head, entry]}; write num_pages "
            f"({num_pages}) where there is no page"
        )
    wrong = np.argwhere((tokens < 0) | (tokens > page_size))
    if wrong.size:
        row, head, entry = wrong[0]
        raise ValueError(
            f"page_tokens[{row}, {head}, {entry}] is {tokens[row, head, entry]}; it must be from 0 "
            f"to {page_size}, the tokens of a page"
        )
    for row, head in np.ndindex(ids.shape[:2]):
        counted = ids[row, head][(tokens[row, head] > 0) & (ids[row, head] < num_pages)]
        pages, times = np.unique(counted, return_counts=True)
        if (times > 1).any():
            raise ValueError(
                f"page_ids[{row}, {head}] names page {pages[times > 1][0]} twice; its tokens would "
                "count twice: name each page once"
            )
