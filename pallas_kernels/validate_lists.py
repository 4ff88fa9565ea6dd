"""The rules of lists of pages: shapes before tracing, values outside jit."""

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from kvjax.pallas_kernels.packed_pages import KeyPool, ValuePool
from kvjax.pallas_kernels.validate import (
    MAX_INT32,
    check_at_least,
    check_float,
    check_int32,
    check_pool,
    check_pools,
    check_positive,
    check_rank,
    concrete,
)

AGGREGATES = ("max", "sum", "mean", "none")


def check_lists(
    q: Float[Array, "B Hq D"],
    k_pages: KeyPool,
    v_pages: ValuePool,
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
    check_pool("k_pages", k_pages, "[N, Hkv, P, D]")
    check_pool("v_pages", v_pages, "[N, Hkv, P, Dv]")
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


def check_representatives(
    q: Float[Array, "B Hq D"],
    representatives: tuple[Float[Array, "N Hkv D"], ...],
    block_tables: Int32[Array, "B M"],
    page_counts: Int32[Array, "B"],
    *,
    aggregate: str,
    scale: float | None,
) -> float:
    """Check the arguments of one call of `page_scores`.

    Args:
        q: [B, Hq, D], float32, bfloat16 or float16.
        representatives: one or two arrays [N, Hkv, D] of one dtype.
        block_tables: int32 [B, M].
        page_counts: int32 [B].
        aggregate: one of `AGGREGATES`.
        scale: factor of the scores; None means D ** -0.5.

    Returns:
        The scale to use.

    Raises:
        ValueError: any rule is broken; the message names the argument.
    """
    check_float("q", q, "[B, Hq, D]")
    if not isinstance(representatives, tuple) or len(representatives) not in (1, 2):
        raise ValueError(
            f"representatives is a {type(representatives).__name__}; it must be a tuple, (mean,) "
            "or (low, high)"
        )
    check_int32("block_tables", block_tables, "[B, M]")
    check_int32("page_counts", page_counts, "[B]")
    named = [(f"representatives[{at}]", each) for at, each in enumerate(representatives)]
    for name, each in named:
        check_float(name, each, "[N, Hkv, D]")
    for name, array in (("q", q), *named, ("block_tables", block_tables)):
        if 0 in array.shape:
            raise ValueError(f"{name} has shape {array.shape}; every axis needs at least one entry")
    first, last = representatives[0], representatives[-1]
    if first.shape != last.shape or first.dtype != last.dtype:
        raise ValueError(
            f"representatives are {first.dtype} {first.shape} and {last.dtype} {last.shape}; low "
            "and high must be alike"
        )
    if q.shape[2] != first.shape[2] or q.shape[1] % first.shape[1]:
        raise ValueError(
            f"q has shape {q.shape} and representatives {first.shape}; head_dim must be equal and "
            "the query heads a multiple of the KV heads"
        )
    if block_tables.shape[0] != q.shape[0] or page_counts.shape != q.shape[:1]:
        raise ValueError(
            f"block_tables has shape {block_tables.shape} and page_counts {page_counts.shape}; q "
            f"has {q.shape[0]} rows, and so must they"
        )
    if aggregate not in AGGREGATES:
        raise ValueError(f"aggregate is {aggregate!r}; it must be one of {', '.join(AGGREGATES)}")
    return float(q.shape[2] ** -0.5) if scale is None else check_positive("scale", scale)


def check_selection(
    scores: Float32[Array, "B Hkv M"],
    page_counts: Int32[Array, "B"],
    *,
    room: int,
    sink_pages: int,
    recent_pages: int,
    open_tail: Bool[Array, "B"] | None,
    budgets: Int32[Array, "B Hkv"] | None,
    implementation: str | None,
) -> None:
    """Check the arguments of one call of `select_pages`.

    Args:
        scores: float32 [B, Hkv, M].
        page_counts: int32 [B].
        room: the most pages a head can choose.
        sink_pages: first pages that are always in.
        recent_pages: last pages that are always in.
        open_tail: bool [B] or None.
        budgets: int32 [B, Hkv] or None.
        implementation: "reference", "xla" or None.

    Raises:
        ValueError: any rule is broken; the message names the argument.
    """
    check_float("scores", scores, "[B, Hkv, M]")
    if scores.dtype != np.float32:
        raise ValueError(f"scores is {scores.dtype}; it must be float32")
    if 0 in scores.shape:
        raise ValueError(f"scores has shape {scores.shape}; every axis needs at least one entry")
    check_int32("page_counts", page_counts, "[B]")
    if budgets is not None:
        check_int32("budgets", budgets, "[B, Hkv]")
    if open_tail is not None:
        check_rank("open_tail", open_tail, "[B]")
        if open_tail.dtype != np.bool_:
            raise ValueError(f"open_tail is {open_tail.dtype}; it must be bool")
    for name, array, shape in (
        ("page_counts", page_counts, scores.shape[:1]),
        ("open_tail", open_tail, scores.shape[:1]),
        ("budgets", budgets, scores.shape[:2]),
    ):
        if array is not None and array.shape != shape:
            raise ValueError(
                f"{name} has shape {array.shape}; scores has {scores.shape}, so it must be {shape}"
            )
    check_at_least("sink_pages", sink_pages, 0, "")
    check_at_least("recent_pages", recent_pages, 0, "")
    check_at_least("room", room, 1, "")
    always = sink_pages + recent_pages + (open_tail is not None)
    if room < always:
        raise ValueError(
            f"room is {room}; it must be from {always}, the pages that are always in (sink_pages "
            f"{sink_pages}, recent_pages {recent_pages}"
            f"{', and the open one' if open_tail is not None else ''}), to {MAX_INT32}"
        )
    if implementation not in (None, "reference", "xla"):
        raise ValueError(
            f"implementation is {implementation!r}; select_pages has no kernel of its own, so it "
            'must be None, "reference" or "xla"'
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
