"""Scores of low-bit pages as a Mosaic TPU kernel (for a TPU, or interpreted)."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32, UInt8

from kvjax.pallas_kernels.mosaic.work import SCALAR_WORDS
from kvjax.pallas_kernels.packed_bits import PLANES, float8_values, token_code
from kvjax.pallas_kernels.page_walk import padded_tables

BLOCK_PAGES = 128
"""Pages scored together: a lane each."""


def low_bit_scores_tpu(
    q: Float[Array, "B Hq D"],
    pages: Mapping[str, Array],
    page_ids: Int32[Array, "B Hkv M"],
    page_counts: Int32[Array, "B Hkv"],
    *,
    bits: int,
    scale: float,
    soft_cap: float | None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float32[Array, "B Hq M"]:
    """Score listed pages for every query head; the contract is that of `low_bit_scores`.

    The codes stay in HBM; a page of one KV head is one copy a plane, and one block of pages is
    unpacked and scored, token by token with a page a lane, while the next arrives. What a page has
    once (step, middle and their units) is gathered by XLA as the bytes it is: a row of it is less
    than a TPU's copies can take from a pool. Codes of head_dim below 128 need the layout of
    `pallas_kernels.mosaic.layout`, or XLA copies them before the kernel.

    Args:
        q: [B, Hq, D].
        pages: see `low_bit_scores`.
        page_ids: int32 [B, Hkv, M], all from 0 to N - 1.
        page_counts: int32 [B, Hkv], entries of each list that exist; the others' scores are
            anything.
        bits: 2, 3 or 4.
        scale: factor of the scores.
        soft_cap: bound of the scores, or None.
        interpret: whether, and how, to interpret the kernel instead of compiling it.

    Returns:
        float32 [B, Hq, M].

    Raises:
        ValueError: not even one list fits a TPU's scalar memory.
    """
    batch, query_heads, dim = q.shape
    kv_heads, num_pages, _ = pages["step"].shape
    width = page_ids.shape[2]
    lists = batch * kv_heads
    ids = padded_tables(page_ids.reshape(lists, width), BLOCK_PAGES)
    head = jnp.arange(lists, dtype=jnp.int32)[:, None] % kv_heads
    tables = ids + head * num_pages  # rows of pools that are flat from here on
    most = SCALAR_WORDS // (tables.shape[1] + 1)
    if most < 1:
        raise ValueError(
            f"page_ids has {width} entries a list; a TPU's scalar memory holds "
            f"{SCALAR_WORDS // BLOCK_PAGES * BLOCK_PAGES - BLOCK_PAGES}: use larger pages, or "
            "score parts of the list"
        )
    rows = q.reshape(lists, query_heads // kv_heads, dim)
    counts = page_counts.reshape(lists)
    names = tuple(PLANES[bits])
    planes = [pages[name].reshape(kv_heads * num_pages, *pages[name].shape[2:]) for name in names]
    once = [
        lax.bitcast_convert_type(pages[name][head, ids], jnp.uint8) for name in ("step", "middle")
    ]
    # One at a time: to gather pairs, XLA would lay the pool's units out anew, 64 times as large.
    units = jnp.stack([pages["unit"][..., which][head, ids] for which in (0, 1)], axis=1)
    by_list = (rows, units.astype(jnp.float32), *once)
    parts = [
        _score_lists(
            counts[start : start + most],
            tables[start : start + most],
            [each[start : start + most] for each in by_list],
            planes,
            bits,
            scale,
            soft_cap,
            interpret,
        )
        for start in range(0, lists, most)
    ]
    return jnp.concatenate(parts).reshape(batch, query_heads, -1)[:, :, :width]


def _score_lists(
    page_counts: Int32[Array, "L"],
    tables: Int32[Array, "L columns"],
    by_list: list[Array],
    planes: list[UInt8[Array, "rows_of_pool _ D"]],
    bits: int,
    scale: float,
    soft_cap: float | None,
    interpret: bool | pltpu.InterpretParams,
) -> Float32[Array, "L G columns"]:
    """Score some lists: `by_list` are queries, units, steps and middles, as `_body` takes them."""
    lists, group, dim = by_list[0].shape
    columns = tables.shape[1] // BLOCK_PAGES

    def pages_last(rows: int) -> pl.BlockSpec:
        """A block of pages' share of an array [L, rows, columns]."""
        return pl.BlockSpec((1, rows, BLOCK_PAGES), lambda row, column, *_: (row, 0, column))

    by_page = pl.BlockSpec((1, BLOCK_PAGES, dim), lambda row, column, *_: (row, column, 0))
    scores: Array = pl.pallas_call(
        functools.partial(_body, columns=columns, bits=bits, scale=scale, soft_cap=soft_cap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(lists, columns),
            in_specs=[
                pl.BlockSpec((1, group, dim), lambda row, column, *_: (row, 0, 0)),
                pages_last(2),
                by_page,
                by_page,
                *[pl.BlockSpec(memory_space=pl.ANY)] * len(planes),
            ],
            out_specs=pages_last(group),
            scratch_shapes=[
                *(pltpu.VMEM((2, BLOCK_PAGES, *each.shape[1:]), jnp.uint8) for each in planes),
                pltpu.SemaphoreType.DMA((2, len(planes))),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((lists, group, tables.shape[1]), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            # A block leaves the next one's pages in flight: the order is part of the program.
            dimension_semantics=("arbitrary", "arbitrary"),
        ),
        interpret=interpret,
        name="low_bit_scores",
    )(page_counts, tables.reshape(-1), *by_list, *planes)
    return scores


def _body(
    counts: Any,
    tables: Any,
    q_ref: Any,
    unit_ref: Any,
    step_ref: Any,
    middle_ref: Any,
    *refs: Any,
    columns: int,
    bits: int,
    scale: float,
    soft_cap: float | None,
) -> None:
    """Score one block of pages of one list."""
    names = tuple(PLANES[bits])
    pools, scores_ref = refs[: len(names)], refs[len(names)]
    buffers, semaphores = refs[len(names) + 1 : -1], refs[-1]
    step = pl.program_id(0) * columns + pl.program_id(1)

    def pages_of(step: Any) -> Any:
        left = counts[lax.div(step, columns)] - lax.rem(step, columns) * BLOCK_PAGES
        return jnp.clip(left, 0, BLOCK_PAGES)

    def copies(step: Any, page: Any, page_id: Any) -> list[Any]:
        slot = lax.rem(step, 2)
        return [
            pltpu.make_async_copy(
                pool.at[page_id], buffer.at[slot, page], semaphores.at[slot, which]
            )
            for which, (pool, buffer) in enumerate(zip(pools, buffers, strict=True))
        ]

    def start(step: Any) -> None:
        def copy(page: Any, _: None) -> None:
            for dma in copies(step, page, tables[step * BLOCK_PAGES + page]):
                dma.start()

        lax.fori_loop(0, pages_of(step), copy, None)

    @pl.when(step == 0)
    def _() -> None:
        start(step)

    @pl.when(step + 1 < pl.num_programs(0) * columns)
    def _() -> None:
        start(step + 1)

    def arrived(page: Any, _: None) -> None:
        # Only the size counts in a wait, so any page may stand for the one that was copied.
        for dma in copies(step, page, 0):
            dma.wait()

    lax.fori_loop(0, pages_of(step), arrived, None)

    @pl.when(pages_of(step) > 0)
    def _() -> None:
        slot = lax.rem(step, 2)
        planes = {
            name: buffer[slot].astype(jnp.int32)
            for name, buffer in zip(names, buffers, strict=True)
        }
        q, units = q_ref[0], unit_ref[0]
        width = float8_values(step_ref[0].astype(jnp.int32))
        centre = _dot(q, float8_values(middle_ref[0].astype(jnp.int32))) * units[1:]
        tokens = buffers[0].shape[2] * 8 // PLANES[bits][names[0]]
        scores = []
        for token in range(tokens):
            code = token_code(planes, token, bits).astype(jnp.float32)
            offsets = (code - (2**bits - 1) / 2) * width
            score = (_dot(q, offsets) * units[:1] + centre) * scale
            scores.append(score if soft_cap is None else soft_cap * jnp.tanh(score / soft_cap))
        top = functools.reduce(jnp.maximum, scores)
        total = sum(jnp.exp(score - top) for score in scores)
        scores_ref[0] = top + jnp.log(total)


def _dot(q: Any, rows: Any) -> Any:
    """Multiply queries [G, D] with rows [BLOCK_PAGES, D] to float32 [G, BLOCK_PAGES].

    Rows have at most 8 significant bits, as products of an odd code and a float8: bfloat16 holds
    them exactly, and so one pass suffices where queries are bfloat16.
    """
    exact = q.dtype == jnp.bfloat16
    return lax.dot_general(
        q,
        rows.astype(q.dtype),
        (((1,), (1,)), ((), ())),
        precision=None if exact else lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
