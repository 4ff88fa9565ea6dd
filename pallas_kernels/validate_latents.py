"""The rules of attention over latents: shapes and dtypes, before tracing."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from kvjax.pallas_kernels.packed_pages import PackedPages
from kvjax.pallas_kernels.validate import (
    MAX_INT32,
    PAGE_SIZES,
    check_float,
    check_int32,
    check_positive,
)


def check_latents(
    q_latent: Float[Array, "T H Dc"],
    q_rope: Float[Array, "T H Dr"],
    latents: Any,
    ropes: Any,
    block_tables: Int32[Array, "B M"],
    *,
    scale: float,
    page_stats: bool,
    **per_sequence: Int32[Array, "B"] | Int32[Array, "B+1"],
) -> float:
    """Check the arguments of one call of `latent_attention` or `ragged_latent_attention`.

    Args:
        q_latent: [T, H, Dc], float32, bfloat16 or float16.
        q_rope: [T, H, Dr], the same dtype.
        latents: [N, P, Dc], or packed, [N, 1, P, Dc].
        ropes: [N, P, Dr], or packed, [N, 1, P, Dr].
        block_tables: int32 [B, M].
        scale: factor of the scores.
        page_stats: whether page statistics are returned.
        **per_sequence: int32 [B] under the caller's own argument names; `cu_q_lengths` is [B + 1].
            Without `cu_q_lengths`, T must be B.

    Returns:
        The scale to use.

    Raises:
        ValueError: any rule is broken; the message names the argument.
    """
    batch = _check_sequences(block_tables, per_sequence)
    scale = _check_operands(q_latent, q_rope, latents, ropes, scale, page_stats)
    if "cu_q_lengths" not in per_sequence and q_latent.shape[0] != batch:
        raise ValueError(
            f"q_latent has {q_latent.shape[0]} rows and block_tables has {batch}; latent_attention "
            "takes one query a sequence (ragged_latent_attention takes several)"
        )
    return scale


def check_expanded(
    q: Float[Array, "T H D"],
    latents: Float[Array, "N P Dc"],
    ropes: Float[Array, "N P Dr"],
    block_tables: Int32[Array, "B M"],
    *,
    scale: float,
    implementation: str | None,
    **per_sequence: Int32[Array, "B"] | Int32[Array, "B+1"],
) -> float:
    """Check the arguments of one call of `expanded_latent_attention`.

    Args:
        q: [T, H, D].
        latents: [N, P, Dc].
        ropes: [N, P, Dr].
        block_tables: int32 [B, M].
        scale: factor of the scores.
        implementation: None, "reference" or "xla".
        **per_sequence: int32 [B] under the caller's own argument names; `cu_q_lengths` is [B + 1].

    Returns:
        The scale to use.

    Raises:
        ValueError: any rule is broken; the message names the argument.
    """
    _check_sequences(block_tables, per_sequence)
    check_float("q", q, "[T, H, D]")
    check_float("latents", latents, "[N, P, Dc]")
    check_float("ropes", ropes, "[N, P, Dr]")
    if latents.shape[:2] != ropes.shape[:2]:
        raise ValueError(
            f"latents has shape {latents.shape} and ropes {ropes.shape}; they must be [N, P, Dc] "
            "and [N, P, Dr]: latents and position keys of the same pages"
        )
    if implementation not in (None, "reference", "xla"):
        raise ValueError(
            f"implementation={implementation!r} must be None, 'reference' or 'xla': there is no "
            "other kernel of the expanded form"
        )
    return check_positive("scale", scale)


def _check_sequences(
    block_tables: Int32[Array, "B M"],
    per_sequence: Mapping[str, Int32[Array, "B"] | Int32[Array, "B+1"]],
) -> int:
    """Check block tables and what there is one of a sequence; returns B."""
    check_int32("block_tables", block_tables, "[B, M]")
    if 0 in block_tables.shape:
        raise ValueError(
            f"block_tables has shape {block_tables.shape}; every axis needs at least one entry"
        )
    batch = block_tables.shape[0]
    for name, rows in per_sequence.items():
        ends = name == "cu_q_lengths"
        check_int32(name, rows, "[B + 1]" if ends else "[B]")
        if rows.shape != (batch + ends,):
            raise ValueError(
                f"{name} has shape {rows.shape}; block_tables has {batch} rows, so it must be "
                f"({batch + ends},)"
            )
    return batch


def check_latent_lists(
    q_latent: Float[Array, "B H Dc"],
    q_rope: Float[Array, "B H Dr"],
    latents: Any,
    ropes: Any,
    page_ids: Int32[Array, "B K"],
    page_tokens: Int32[Array, "B K"] | Bool[Array, "B K P"],
    *,
    scale: float,
    page_stats: bool,
) -> float:
    """Check the arguments of one call of `sparse_latent_attention`.

    Args:
        q_latent: [B, H, Dc], float32, bfloat16 or float16.
        q_rope: [B, H, Dr], the same dtype.
        latents: [N, P, Dc], or packed, [N, 1, P, Dc].
        ropes: [N, P, Dr], or packed, [N, 1, P, Dr].
        page_ids: int32 [B, K].
        page_tokens: int32 [B, K] or bool [B, K, P].
        scale: factor of the scores.
        page_stats: whether page statistics are returned.

    Returns:
        The scale to use.

    Raises:
        ValueError: any rule is broken; the message names the argument.
    """
    check_int32("page_ids", page_ids, "[B, K]")
    if 0 in page_ids.shape:
        raise ValueError(
            f"page_ids has shape {page_ids.shape}; every axis needs at least one entry"
        )
    scale = _check_operands(q_latent, q_rope, latents, ropes, scale, page_stats)
    if page_ids.shape[0] != q_latent.shape[0]:
        raise ValueError(
            f"page_ids has {page_ids.shape[0]} rows and q_latent {q_latent.shape[0]}; every query "
            "has a list of its own, which all heads share"
        )
    wanted: dict[str, tuple[int, ...]] = {
        "int32": page_ids.shape,
        "bool": (*page_ids.shape, latents.shape[-2]),
    }
    kind, shape = (getattr(page_tokens, name, None) for name in ("dtype", "shape"))
    if kind is None or wanted.get(np.dtype(kind).name) != shape:
        held = type(page_tokens).__name__ if kind is None else f"{kind} {shape}"
        raise ValueError(
            f"page_tokens is {held}; it must be int32 {wanted['int32']}, how many of the first "
            f"tokens of a page count, or bool {wanted['bool']}, which do"
        )
    return scale


def check_latent_tokens(
    q_latent: Float[Array, "B H Dc"],
    q_rope: Float[Array, "B H Dr"],
    latents: Any,
    ropes: Any,
    token_ids: Int32[Array, "B T"],
    block_tables: Int32[Array, "B M"],
    *,
    scale: float,
) -> float:
    """Check the arguments of one call of `token_latent_attention`.

    Args:
        q_latent: [B, H, Dc], float32, bfloat16 or float16.
        q_rope: [B, H, Dr], the same dtype.
        latents: [N, P, Dc], or packed, [N, 1, P, Dc].
        ropes: [N, P, Dr], or packed, [N, 1, P, Dr].
        token_ids: int32 [B, T].
        block_tables: int32 [B, M].
        scale: factor of the scores.

    Returns:
        The scale to use.

    Raises:
        ValueError: any rule is broken; the message names the argument.
    """
    scale = _check_operands(q_latent, q_rope, latents, ropes, scale, page_stats=False)
    for name, lists, axes in (
        ("token_ids", token_ids, "[B, T]"),
        ("block_tables", block_tables, "[B, M]"),
    ):
        check_int32(name, lists, axes)
        if 0 in lists.shape:
            raise ValueError(f"{name} has shape {lists.shape}; every axis needs at least one entry")
        if lists.shape[0] != q_latent.shape[0]:
            raise ValueError(
                f"{name} has {lists.shape[0]} rows and q_latent {q_latent.shape[0]}; every query "
                "has a list and a table of its own"
            )
    return scale


def _check_operands(
    q_latent: Any, q_rope: Any, latents: Any, ropes: Any, scale: float, page_stats: bool
) -> float:
    """Check queries and pools against each other, and the options; return the scale."""
    check_float("q_latent", q_latent, "[B, H, Dc]")
    check_float("q_rope", q_rope, "[B, H, Dr]")
    if q_rope.shape[:2] != q_latent.shape[:2] or q_rope.dtype != q_latent.dtype:
        raise ValueError(
            f"q_rope is {q_rope.dtype} {q_rope.shape} and q_latent {q_latent.dtype} "
            f"{q_latent.shape}; they are two parts of the same queries: rows, heads and dtype must "
            "be equal"
        )
    for name, pool, q in (("latents", latents, q_latent), ("ropes", ropes, q_rope)):
        _check_pool(name, pool, q)
    if latents.shape[0] != ropes.shape[0] or latents.shape[-2] != ropes.shape[-2]:
        raise ValueError(
            f"ropes has shape {ropes.shape} and latents {latents.shape}; they must have the same "
            "pages and tokens a page"
        )
    packed = isinstance(latents, PackedPages) or isinstance(ropes, PackedPages)
    if not packed and latents.dtype != ropes.dtype:
        raise ValueError(
            f"ropes is {ropes.dtype} and latents is {latents.dtype}; they must be the same"
        )
    if not isinstance(page_stats, bool):
        raise ValueError(f"page_stats is {page_stats!r}; it must be True or False")
    return check_positive("scale", scale)


def _check_pool(name: str, pool: Any, q: Any) -> None:
    """Check one pool, against the queries that score it."""
    letter = "c" if name == "latents" else "r"
    if isinstance(pool, PackedPages):
        if pool.shape[1] != 1:
            raise ValueError(
                f"{name} is packed with {pool.shape[1]} heads; latents have none: pack "
                f"[N, 1, P, D{letter}]"
            )
    else:
        check_float(name, pool, f"[N, P, D{letter}]")
    for label, array in ((name, pool), (f"q_{name[:-1]}", q)):
        if 0 in array.shape:
            raise ValueError(
                f"{label} has shape {array.shape}; every axis needs at least one entry"
            )
    if pool.shape[-1] != q.shape[2]:
        raise ValueError(
            f"q_{name[:-1]} has {q.shape[2]} elements a head and {name} {pool.shape[-1]} a token; "
            "they must be equal"
        )
    if not PAGE_SIZES[0] <= pool.shape[-2] <= PAGE_SIZES[1]:
        raise ValueError(
            f"page_size (axis {len(pool.shape) - 2} of {name}) is {pool.shape[-2]}; it must be "
            f"from {PAGE_SIZES[0]} to {PAGE_SIZES[1]} tokens"
        )
    elements = max(int(leaf.size) for leaf in jax.tree.leaves(pool))
    if elements > MAX_INT32:
        most = MAX_INT32 // (elements // pool.shape[0])
        raise ValueError(
            f"{name} has {pool.shape[0]} pages, {elements} elements; int32 offsets overflow at "
            f"2**31, so at most {most} pages of this shape fit one pool: split it"
        )
