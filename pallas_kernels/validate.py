"""Every rule of the attention arguments: shapes and options before tracing, values outside jit."""

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int32

from kvjax.pallas_kernels.packed_pages import KeyPool, PackedPages, ValuePool, pool_elements

PAGE_SIZES = (8, 128)
FLOATS = ("float32", "bfloat16", "float16")
# Kernels and XLA gathers address pool elements with int32.
MAX_INT32 = 2**31 - 1


def check_arrays(
    q: Float[Array, "T Hq D"],
    k_pages: KeyPool,
    v_pages: ValuePool,
    block_tables: Int32[Array, "B M"],
    **per_sequence: Int32[Array, "B"] | Int32[Array, "B+1"] | None,
) -> None:
    """Check ranks, dtypes and shapes of one call.

    Args:
        q: [T, Hq, D], float32, bfloat16 or float16.
        k_pages: [N, Hkv, P, D], float32, bfloat16 or float16.
        v_pages: [N, Hkv, P, Dv], the keys' dtype.
        block_tables: int32 [B, M].
        **per_sequence: int32 [B] under the caller's own argument names, or None where it was not
            given; `cu_q_lengths` is [B + 1]. Without `cu_q_lengths`, T must be B.

    Raises:
        ValueError: any rule is broken; the message names the argument.
    """
    check_float("q", q, "[T, Hq, D]")
    check_pool("k_pages", k_pages, "[N, Hkv, P, D]")
    check_pool("v_pages", v_pages, "[N, Hkv, P, Dv]")
    check_int32("block_tables", block_tables, "[B, M]")
    for name, array in (
        ("q", q),
        ("k_pages", k_pages),
        ("v_pages", v_pages),
        ("block_tables", block_tables),
    ):
        if 0 in array.shape and not (name.endswith("_pages") and array.shape[2] == 0):
            raise ValueError(f"{name} has shape {array.shape}; every axis needs at least one entry")
    check_pools(q, k_pages, v_pages)
    batch = block_tables.shape[0]
    for name, rows in per_sequence.items():
        if rows is None:
            continue
        wanted = batch + 1 if name == "cu_q_lengths" else batch
        check_int32(name, rows, "[B + 1]" if name == "cu_q_lengths" else "[B]")
        if rows.shape != (wanted,):
            raise ValueError(
                f"{name} has shape {rows.shape}; block_tables has {batch} rows, so it must be "
                f"({wanted},)"
            )
    if "cu_q_lengths" not in per_sequence and q.shape[0] != batch:
        raise ValueError(
            f"q has {q.shape[0]} rows and block_tables has {batch}; paged_attention takes one "
            "query a sequence (ragged_paged_attention takes several)"
        )


def check_pools(q: Array, k_pages: KeyPool, v_pages: ValuePool) -> None:
    """Check queries and pools, of the right ranks and dtypes, against each other."""
    packed = isinstance(k_pages, PackedPages)
    if packed != isinstance(v_pages, PackedPages):
        one, other = ("k_pages", "v_pages") if packed else ("v_pages", "k_pages")
        raise ValueError(f"{one} is packed and {other} is not; pack both or none")
    if not packed and k_pages.dtype != v_pages.dtype:
        raise ValueError(
            f"v_pages is {v_pages.dtype} and k_pages is {k_pages.dtype}; they must be the same"
        )
    if k_pages.shape[:3] != v_pages.shape[:3]:
        raise ValueError(
            f"v_pages has shape {v_pages.shape} and k_pages {k_pages.shape}; they may differ only "
            "in the last axis"
        )
    num_pages, kv_heads, page_size, head_dim = k_pages.shape
    if not PAGE_SIZES[0] <= page_size <= PAGE_SIZES[1]:
        raise ValueError(
            f"page_size (axis 2 of k_pages) is {page_size}; it must be from {PAGE_SIZES[0]} to "
            f"{PAGE_SIZES[1]} tokens"
        )
    if q.shape[2] != head_dim:
        raise ValueError(
            f"q has head_dim {q.shape[2]} and k_pages has {head_dim}; they must be equal"
        )
    if q.shape[1] % kv_heads:
        raise ValueError(
            f"q has {q.shape[1]} heads and k_pages has {kv_heads} KV heads; the query heads must "
            "be a multiple of the KV heads"
        )
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        elements = pool_elements(pages)
        if elements > MAX_INT32:
            most = MAX_INT32 // (elements // num_pages)
            raise ValueError(
                f"{name} has {num_pages} pages, {elements} elements; int32 offsets "
                f"overflow at 2**31, so at most {most} pages of this shape fit one pool: split it"
            )


def check_options(
    *,
    num_heads: int,
    head_dim: int,
    scale: float | None,
    window: int | None,
    sink_tokens: int,
    sink_logits: Float[Array, "Hq"] | None,
    soft_cap: float | None,
    page_stats: bool,
) -> float:
    """Check the options that both operations share.

    Args:
        num_heads: query heads.
        head_dim: width of a query.
        scale: factor of the scores; None means head_dim ** -0.5.
        window: how many of the newest positions a query sees, in tokens, itself included.
        sink_tokens: how many of the first tokens stay visible outside the window.
        sink_logits: [Hq], one logit a query head in the softmax's denominator.
        soft_cap: bound of the scores.
        page_stats: whether page statistics are returned.

    Returns:
        The scale to use.

    Raises:
        ValueError: any rule is broken; the message names the argument.
    """
    scale = head_dim**-0.5 if scale is None else check_positive("scale", scale)
    if soft_cap is not None:
        check_positive("soft_cap", soft_cap)
    if window is not None:
        check_at_least("window", window, 1, "; pass None for no window")
    check_at_least("sink_tokens", sink_tokens, 0, "")
    if not isinstance(page_stats, bool):
        raise ValueError(f"page_stats is {page_stats!r}; it must be True or False")
    if sink_logits is not None:
        check_float("sink_logits", sink_logits, "[Hq]")
        if sink_logits.shape != (num_heads,):
            raise ValueError(
                f"sink_logits has shape {sink_logits.shape}; q has {num_heads} heads, so it must "
                f"be ({num_heads},)"
            )
    return scale


def check_tables(
    block_tables: ArrayLike, lengths: ArrayLike, num_pages: int, page_size: int
) -> None:
    """Check the values of block tables against the lengths they must hold.

    Only entries that hold tokens (the first ceil(length / page_size) of a row) must name a page;
    the others may be anything from 0 up.

    Args:
        block_tables: int32 [B, M], concrete.
        lengths: int32 [B], concrete, cached tokens a sequence.
        num_pages: pages in the pool.
        page_size: tokens a page.

    Raises:
        ValueError: an invariant is broken; the message names the first row that breaks it. Also
            under jit, where there are no values to look at.
    """
    tables = concrete("block_tables", block_tables, rank=2)
    tokens = concrete("lengths", lengths, rank=1)
    batch, width = tables.shape
    if tokens.shape != (batch,):
        raise ValueError(f"lengths has shape {tokens.shape}; it must be ({batch},)")
    _no_negative("lengths", tokens)
    too_long = np.flatnonzero(tokens > width * page_size)
    if too_long.size:
        row = too_long[0]
        raise ValueError(
            f"lengths[{row}] is {tokens[row]}; its table has {width} entries of {page_size} tokens "
            f"and holds at most {width * page_size}: widen block_tables"
        )
    negative = np.argwhere(tables < 0)
    if negative.size:
        row, column = negative[0]
        raise ValueError(
            f"block_tables[{row}, {column}] is {tables[row, column]}; negative ids wrap around in "
            f"JAX: write num_pages ({num_pages}) into unused entries"
        )
    pages_used = -(-tokens // page_size)
    live = np.arange(width)[None, :] < pages_used[:, None]
    outside = np.argwhere(live & (tables >= num_pages))
    if outside.size:
        row, column = outside[0]
        raise ValueError(
            f"block_tables[{row}, {column}] is {tables[row, column]}; the row's {tokens[row]} "
            f"tokens need a page there, from 0 to {num_pages - 1}"
        )


def check_ragged(
    kv_lengths: ArrayLike, cu_q_lengths: ArrayLike, num_queries: int | None = None
) -> None:
    """Check the values of a ragged batch.

    Args:
        kv_lengths: int32 [B], concrete, cached tokens a sequence, its queries' own included.
        cu_q_lengths: int32 [B + 1], concrete, where each sequence's queries start.
        num_queries: rows of `q`; None skips that check.

    Raises:
        ValueError: an invariant is broken; the message names the first row that breaks it. Also
            under jit, where there are no values to look at.
    """
    tokens = concrete("kv_lengths", kv_lengths, rank=1)
    starts = concrete("cu_q_lengths", cu_q_lengths, rank=1)
    if starts.shape != (tokens.size + 1,):
        raise ValueError(
            f"cu_q_lengths has shape {starts.shape}; kv_lengths has {tokens.size} entries, so it "
            f"must be ({tokens.size + 1},)"
        )
    _no_negative("kv_lengths", tokens)
    if starts[0] != 0:
        raise ValueError(f"cu_q_lengths[0] is {starts[0]}; it must be 0")
    queries = np.diff(starts)
    falling = np.flatnonzero(queries < 0)
    if falling.size:
        row = falling[0]
        raise ValueError(
            f"cu_q_lengths falls from {starts[row]} to {starts[row + 1]} at entry {row + 1}; it "
            "must never fall"
        )
    too_many = np.flatnonzero(queries > tokens)
    if too_many.size:
        row = too_many[0]
        raise ValueError(
            f"sequence {row} has {queries[row]} queries and kv_lengths[{row}] is {tokens[row]}; "
            "queries are a sequence's last cached tokens, so there cannot be more: append first"
        )
    if num_queries is not None and starts[-1] > num_queries:
        raise ValueError(
            f"cu_q_lengths ends at {starts[-1]} and q has {num_queries} rows; it must not go past"
        )


def check_parts(out: Float[Array, "n *rows D"], lse: Float[Array, "n *rows"]) -> None:
    """Check ranks, dtypes and shapes of a merge.

    Args:
        out: [n, ..., D], float32, bfloat16 or float16.
        lse: float32 [n, ...], the axes of `out` without the last.

    Raises:
        ValueError: any rule is broken; the message names the argument.
    """
    for name, array, kinds in (("out", out, FLOATS), ("lse", lse, FLOATS[:1])):
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise ValueError(
                f"{name} is a {type(array).__name__}; it must be one array of all parts: stack them"
            )
        if jnp.dtype(array.dtype).name not in kinds:
            raise ValueError(f"{name} is {array.dtype}; it must be {' or '.join(kinds)}")
        if 0 in array.shape:
            raise ValueError(f"{name} has shape {array.shape}; every axis needs at least one entry")
    if len(out.shape) < 2:
        raise ValueError(f"out has shape {out.shape}; it must be [n, ..., D]")
    if lse.shape != out.shape[:-1]:
        raise ValueError(
            f"lse has shape {lse.shape} and out {out.shape}; it must be out's without the last "
            f"axis, {out.shape[:-1]}"
        )


def check_rank(name: str, array: Any, axes: str) -> None:
    """Check that something is an array of as many axes as `axes`, such as "[B, M]", names."""
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise ValueError(f"{name} is a {type(array).__name__}; it must be an array {axes}")
    if len(array.shape) != axes.count(",") + 1:
        raise ValueError(f"{name} has shape {array.shape}; it must be {axes}")


def check_float(name: str, array: Any, axes: str) -> None:
    """Check an array's rank, and that its dtype is one of `FLOATS`."""
    check_rank(name, array, axes)
    if jnp.dtype(array.dtype).name not in FLOATS:
        raise ValueError(f"{name} is {array.dtype}; it must be one of {', '.join(FLOATS)}")


def check_pool(name: str, pool: Any, axes: str) -> None:
    """Check the rank and dtype of a pool; a packed one has been checked where it was made."""
    if not isinstance(pool, PackedPages):
        check_float(name, pool, axes)


def check_int32(name: str, array: Any, axes: str) -> None:
    """Check an array's rank, and that its dtype is int32."""
    check_rank(name, array, axes)
    if array.dtype != np.int32:
        raise ValueError(f"{name} is {array.dtype}; it must be int32: use {name}.astype('int32')")


def check_positive(name: str, value: float) -> float:
    """Check that a value is a finite Python number above 0, and return it as a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} is {value!r}; it must be a Python number above 0")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value}; it must be finite and above 0")
    return float(value)


def check_at_least(name: str, value: int, least: int, hint: str) -> None:
    """Check that a value is a Python integer from `least` on that fits an int32."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or not least <= value <= MAX_INT32:
        raise ValueError(
            f"{name} is {value!r}; it must be an integer, at least {least} and below 2**31{hint}"
        )


def concrete(name: str, value: ArrayLike, rank: int) -> np.ndarray:
    """Take an int32 array's values; refuse one that is traced or of another rank or dtype."""
    if isinstance(value, jax.core.Tracer):
        raise ValueError(f"{name} is traced and has no values; check it before calling jit")
    array = np.asarray(value)
    if array.ndim != rank:
        raise ValueError(f"{name} has shape {array.shape}; it must have {rank} axes")
    if array.dtype != np.int32:
        raise ValueError(f"{name} is {array.dtype}; it must be int32: use {name}.astype('int32')")
    return array


def _no_negative(name: str, values: np.ndarray) -> None:
    negative = np.flatnonzero(values < 0)
    if negative.size:
        raise ValueError(f"{name}[{negative[0]}] is {values[negative[0]]}; it must be at least 0")
