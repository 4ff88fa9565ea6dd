"""The rules of a lightning indexer's arguments: shapes and dtypes, before tracing."""

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from kvjax.pallas_kernels.validate import (
    FLOATS,
    MAX_INT32,
    PAGE_SIZES,
    check_at_least,
    check_float,
    check_int32,
    check_positive,
    check_rank,
)

FLOAT8_KEYS, FLOAT4_KEYS = "float8_e4m3fn", "uint8"


def tokens_a_page(keys: Any) -> int:
    """P: of float4 keys a row holds two tokens.

    Args:
        keys: [N, P, Di], or uint8 [N, P / 2, Di].
    """
    rows: int = keys.shape[1]
    return 2 * rows if jnp.dtype(keys.dtype).name == FLOAT4_KEYS else rows


def check_indexer(
    q: Float[Array, "T Hi Di"],
    weights: Float32[Array, "T Hi"],
    keys: Any,
    block_tables: Int32[Array, "B M"],
    *,
    scale: float,
    key_scales: Float32[Array, "N P"] | None,
    **per_sequence: Int32[Array, "B"] | Int32[Array, "B+1"],
) -> float:
    """Check the arguments of one call of `lightning_scores` or `ragged_lightning_scores`.

    Args:
        q: [T, Hi, Di], float32, bfloat16 or float16.
        weights: float32 [T, Hi].
        keys: [N, P, Di], one of these dtypes, or float8_e4m3fn; or uint8 [N, P / 2, Di].
        block_tables: int32 [B, M].
        scale: factor of the scores.
        key_scales: float32 [N, P] with float8 and float4 keys, else None.
        **per_sequence: int32 [B] under the caller's own argument names; `cu_q_lengths` is [B + 1].
            Without `cu_q_lengths`, T must be B.

    Returns:
        The scale to use.

    Raises:
        ValueError: any rule is broken; the message names the argument.
    """
    check_float("q", q, "[T, Hi, Di]")
    check_rank("weights", weights, "[T, Hi]")
    check_rank("keys", keys, "[N, P, Di]")
    check_int32("block_tables", block_tables, "[B, M]")
    for name, array in (("q", q), ("keys", keys), ("block_tables", block_tables)):
        if 0 in array.shape:
            raise ValueError(f"{name} has shape {array.shape}; every axis needs at least one entry")
    if jnp.dtype(weights.dtype).name != "float32" or weights.shape != q.shape[:2]:
        raise ValueError(
            f"weights is {weights.dtype} {weights.shape}; it must be float32 {q.shape[:2]}, one "
            "number a query and index head"
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
    if "cu_q_lengths" not in per_sequence and q.shape[0] != batch:
        raise ValueError(
            f"q has {q.shape[0]} rows and block_tables has {batch}; lightning_scores takes one "
            "query a sequence (ragged_lightning_scores takes several)"
        )
    _check_keys(keys, key_scales, q.shape[2])
    return check_positive("scale", scale)


def _check_keys(keys: Any, key_scales: Float32[Array, "N P"] | None, head_dim: int) -> None:
    """Check the pool of keys, and the scales that those of few bits need and others have not."""
    num_pages, rows, dim = keys.shape
    kind, page_size = jnp.dtype(keys.dtype).name, tokens_a_page(keys)
    scaled = (FLOAT8_KEYS, FLOAT4_KEYS)
    if kind not in (*FLOATS, *scaled):
        raise ValueError(
            f"keys is {kind}; it must be {', '.join(FLOATS)} or {FLOAT8_KEYS}, or {FLOAT4_KEYS} "
            "that holds float4_e2m1fn codes"
        )
    if dim != head_dim:
        raise ValueError(f"q has head_dim {head_dim} and keys {dim}; they must be equal")
    if not PAGE_SIZES[0] <= page_size <= PAGE_SIZES[1]:
        raise ValueError(
            f"page_size (axis 1 of keys) is {page_size}; it must be from {PAGE_SIZES[0]} to "
            f"{PAGE_SIZES[1]} tokens"
        )
    if math.prod(keys.shape) > MAX_INT32:
        raise ValueError(
            f"keys has {num_pages} pages, {math.prod(keys.shape)} elements; int32 offsets overflow "
            f"at 2**31, so at most {MAX_INT32 // (rows * dim)} pages of this shape fit one "
            "pool: split it"
        )
    if (kind in scaled) != (key_scales is not None):
        held = "None" if key_scales is None else "given"
        raise ValueError(
            f"keys is {kind} and key_scales is {held}; {' and '.join(scaled)} keys have a scale a "
            "token, others have none"
        )
    if key_scales is not None:
        check_rank("key_scales", key_scales, "[N, P]")
        name = jnp.dtype(key_scales.dtype).name
        if name != "float32" or key_scales.shape != (num_pages, page_size):
            raise ValueError(
                f"key_scales is {name} {key_scales.shape}; it must be float32 "
                f"{(num_pages, page_size)}, one number a token"
            )


def check_choice(
    scores: Float32[Array, "T S"],
    visible: Int32[Array, "T"],
    *,
    k: int,
    implementation: str | None,
) -> None:
    """Check the arguments of one call of `top_tokens`.

    Args:
        scores: float32 [T, S].
        visible: int32 [T].
        k: tokens to choose.
        implementation: None, "reference" or "xla".

    Raises:
        ValueError: any rule is broken; the message names the argument.
    """
    check_rank("scores", scores, "[T, S]")
    if jnp.dtype(scores.dtype).name != "float32" or 0 in scores.shape:
        raise ValueError(
            f"scores is {scores.dtype} {scores.shape}; it must be float32, every axis with at "
            "least one entry"
        )
    check_int32("visible", visible, "[T]")
    if visible.shape != scores.shape[:1]:
        raise ValueError(
            f"visible has shape {visible.shape}; scores has {scores.shape[0]} rows, so it must be "
            f"({scores.shape[0]},)"
        )
    check_at_least("k", k, 1, "")
    if implementation not in (None, "reference", "xla"):
        raise ValueError(
            f"implementation is {implementation!r}; it must be None, 'reference' or 'xla'"
        )
