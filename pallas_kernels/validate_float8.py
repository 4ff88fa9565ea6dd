"""The rules of attention in float8: shapes, dtypes and options, before tracing."""

from typing import Any

from jaxtyping import Array, Float, Int32

from kvjax.pallas_kernels.packed_pages import PackedPages
from kvjax.pallas_kernels.validate import (
    check_at_least,
    check_float,
    check_int32,
    check_pools,
    check_positive,
)

CODES = "float8_e4m3fn"
ACCUMULATORS = ("native", "hopper")


def check_float8(
    q: Float[Array, "B Hq D"],
    k_pages: PackedPages,
    v_pages: PackedPages,
    block_tables: Int32[Array, "B M"],
    lengths: Int32[Array, " B"],
    *,
    scale: float | None,
    flush_every: int | None,
    accumulator: str,
    implementation: str | None,
) -> float:
    """Check the arguments of one call of `float8_paged_attention`.

    Args:
        q: [B, Hq, D], float32, bfloat16 or float16.
        k_pages: float8 pages [N, Hkv, P, D].
        v_pages: float8 pages [N, Hkv, P, Dv].
        block_tables: int32 [B, M].
        lengths: int32 [B].
        scale: factor of the scores; None means D ** -0.5.
        flush_every: tiles, or None.
        accumulator: one of `ACCUMULATORS`.
        implementation: what the caller asked for.

    Returns:
        The scale to use.

    Raises:
        ValueError: any rule is broken; the message names the argument.
    """
    check_float("q", q, "[B, Hq, D]")
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        check_float8_pages(name, pages)
    check_int32("block_tables", block_tables, "[B, M]")
    check_int32("lengths", lengths, "[B]")
    for name, array in (
        ("q", q),
        ("k_pages", k_pages),
        ("v_pages", v_pages),
        ("block_tables", block_tables),
    ):
        if 0 in array.shape:
            raise ValueError(f"{name} has shape {array.shape}; every axis needs at least one entry")
    check_pools(q, k_pages, v_pages)
    if block_tables.shape[0] != q.shape[0] or lengths.shape != q.shape[:1]:
        raise ValueError(
            f"block_tables has shape {block_tables.shape} and lengths {lengths.shape}; q has "
            f"{q.shape[0]} rows, and so must they"
        )
    if flush_every is not None:
        check_at_least("flush_every", flush_every, 1, "; pass None to never flush")
    if accumulator not in ACCUMULATORS:
        raise ValueError(
            f"accumulator is {accumulator!r}; it must be one of {', '.join(ACCUMULATORS)}"
        )
    if accumulator == "hopper" and implementation in ("tpu", "gpu"):
        raise ValueError(
            f"accumulator is 'hopper' and implementation {implementation!r}; a model of Hopper's "
            "sums is what 'reference' and 'xla' compute, kernels add as their machine does: pass "
            "accumulator='native', or implementation=None"
        )
    return float(q.shape[2] ** -0.5) if scale is None else check_positive("scale", scale)


def check_float8_pages(name: str, pages: Any) -> None:
    """Check that a pool holds float8 codes whose scales a product can leave for later.

    Args:
        name: of the pool, for the message.
        pages: the pool, concrete or abstract.

    Raises:
        ValueError: it does not.
    """
    if not isinstance(pages, PackedPages):
        raise ValueError(
            f"{name} is a {type(pages).__name__}; it must be PackedPages of {CODES} codes, as "
            "kvjax.formats.float8() encodes pages (paged_attention reads plain pools)"
        )
    if pages.dtype.name != CODES:
        raise ValueError(
            f"{name} holds {pages.dtype} codes of {pages.bits} bits; they must be {CODES}: encode "
            "with kvjax.formats.float8(), or read these with paged_attention"
        )
    for what in ("middle", "unit", "levels", "outlier_at", "position"):
        if getattr(pages, what) is not None:
            raise ValueError(
                f"{name} has {what}; an element must be its code times a scale and nothing else, "
                "for codes are multiplied as they are: read these pages with paged_attention"
            )
    count, heads = pages.shape[:2]
    kept = pages.scale.shape
    if (
        len(kept) != 4
        or kept[0] not in (1, count)
        or kept[1] not in (1, heads)
        or kept[2:] != (1, 1)
    ):
        raise ValueError(
            f"{name}.scale has shape {kept}; a page's head must have one scale, so it must be "
            f"[{count} or 1, {heads} or 1, 1, 1]: encode with kvjax.formats.float8(per='page'), or "
            "read these pages with paged_attention"
        )
