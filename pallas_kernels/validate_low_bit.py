"""The rules of low-bit pages: shapes and dtypes, before tracing."""

import math
from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.pallas_kernels.packed_bits import PLANES, tokens_sharing_a_byte
from kvjax.pallas_kernels.validate import (
    MAX_INT32,
    PAGE_SIZES,
    check_float,
    check_int32,
    check_positive,
    check_rank,
)


def check_low_bit(
    q: Float[Array, "B Hq D"],
    pages: Mapping[str, Array],
    page_ids: Int32[Array, "B Hkv M"] | None,
    page_counts: Int32[Array, "B Hkv"],
    *,
    bits: int,
    scale: float | None,
    soft_cap: float | None,
) -> tuple[float, int]:
    """Check the arguments of one call of `low_bit_scores`.

    Args:
        q: [B, Hq, D], float32, bfloat16 or float16.
        pages: `codes` (at 3 bits also `top`), `step`, `middle` and `unit`.
        page_ids: int32 [B, Hkv, M], or None.
        page_counts: int32 [B, Hkv].
        bits: 2, 3 or 4.
        scale: factor of the scores; None means D ** -0.5.
        soft_cap: bound of the scores, or None.

    Returns:
        The scale to use, and the tokens of a page.

    Raises:
        ValueError: any rule is broken; the message names the argument.
    """
    if isinstance(bits, bool) or bits not in PLANES:
        raise ValueError(f"bits is {bits!r}; it must be 2, 3 or 4")
    check_float("q", q, "[B, Hq, D]")
    if page_ids is not None:
        check_int32("page_ids", page_ids, "[B, Hkv, M]")
    check_int32("page_counts", page_counts, "[B, Hkv]")
    for name, array in (("q", q), ("page_ids", page_ids)):
        if array is not None and 0 in array.shape:
            raise ValueError(f"{name} has shape {array.shape}; every axis needs at least one entry")
    page_size = _check_pages(pages, bits, q.shape[2])
    kv_heads = pages["step"].shape[0]
    if q.shape[1] % kv_heads:
        raise ValueError(
            f"q has {q.shape[1]} heads and pages has {kv_heads} KV heads; the query heads must be "
            "a multiple of the KV heads"
        )
    wanted = (q.shape[0], kv_heads)
    lists = None if page_ids is None else page_ids.shape
    if (lists or wanted)[:2] != wanted or page_counts.shape != wanted:
        raise ValueError(
            f"page_ids has shape {lists} and page_counts {page_counts.shape}; q has "
            f"{wanted[0]} rows and pages {wanted[1]} KV heads, so they must be {wanted} and how "
            f"many pages a list has room for, and {wanted}: broadcast what heads share"
        )
    if soft_cap is not None:
        check_positive("soft_cap", soft_cap)
    scale = float(q.shape[2] ** -0.5) if scale is None else check_positive("scale", scale)
    return scale, page_size


def _check_pages(pages: Mapping[str, Array], bits: int, head_dim: int) -> int:
    """Check the pool's arrays against each other; return the tokens of a page."""
    names = (*PLANES[bits], "step", "middle", "unit")
    if not isinstance(pages, Mapping) or set(pages) != set(names):
        held = sorted(pages) if isinstance(pages, Mapping) else type(pages).__name__
        raise ValueError(f"pages holds {held}; {bits}-bit keys are {', '.join(names)}, by name")
    check_rank("pages['step']", pages["step"], "[Hkv, N, D]")
    kv_heads, num_pages, dim = pages["step"].shape
    if 0 in pages["step"].shape:
        raise ValueError(
            f"pages['step'] has shape {pages['step'].shape}; every axis needs at least one entry"
        )
    if dim != head_dim:
        raise ValueError(f"q has head_dim {head_dim} and pages['step'] {dim}; they must be equal")
    check_rank("pages['codes']", pages["codes"], "[Hkv, N, rows, D]")
    page_size = pages["codes"].shape[2] * 8 // PLANES[bits]["codes"]
    least, most = PAGE_SIZES
    if not least <= page_size <= most or page_size % tokens_sharing_a_byte(bits):
        raise ValueError(
            f"pages['codes'] has {pages['codes'].shape[2]} rows, {page_size} tokens of {bits} "
            f"bits; a page must hold from {least} to {most} tokens, a multiple of "
            f"{tokens_sharing_a_byte(bits)}"
        )
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        name: ((kv_heads, num_pages, page_size * wide // 8, dim), "uint8")
        for name, wide in PLANES[bits].items()
    }
    shapes["step"] = shapes["middle"] = ((kv_heads, num_pages, dim), "float8_e4m3fn")
    shapes["unit"] = ((kv_heads, num_pages, 2), "bfloat16")
    for name, (shape, dtype) in shapes.items():
        check_rank(f"pages[{name!r}]", pages[name], f"[{', '.join('x' * len(shape))}]")
        if pages[name].shape != shape or jnp.dtype(pages[name].dtype).name != dtype:
            raise ValueError(
                f"pages[{name!r}] is {pages[name].dtype} {pages[name].shape}; it must be {dtype} "
                f"{shape}, as `LowBitKeys({bits}).build` makes it"
            )
        if math.prod(shape) > MAX_INT32:
            raise ValueError(
                f"pages[{name!r}] has {math.prod(shape)} elements; int32 offsets overflow at "
                f"2**31, so at most {MAX_INT32 // (math.prod(shape) // num_pages)} pages of this "
                "shape fit one pool: split it"
            )
    return page_size
