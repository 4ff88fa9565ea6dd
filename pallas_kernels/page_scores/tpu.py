"""Scores of pages as a Mosaic TPU kernel (for a TPU, or interpreted)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32

from kvjax.pallas_kernels.mosaic.work import SCALAR_WORDS
from kvjax.pallas_kernels.page_scores.parts import products
from kvjax.pallas_kernels.page_walk import padded_tables

BLOCK_PAGES = 128
"""Pages scored together: a lane each."""


def page_scores_tpu(
    q: Float32[Array, "B Hq D"],
    representatives: tuple[Float[Array, "N Hkv D"], ...],
    page_ids: Int32[Array, "B M"],
    page_counts: Int32[Array, "B"],
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float32[Array, "B Hq M"]:
    """Score pages for every query head.

    The pools stay in HBM; a page's representative, all KV heads, is one copy, and one block of
    pages is scored while the next arrives. A gather in XLA would write what it read, and read it
    again. Representatives of head_dim below 128 need the layout of `pallas_kernels.mosaic.layout`,
    or XLA copies them before the kernel.

    Args:
        q: float32 [B, Hq, D], scaled.
        representatives: `(mean,)` or `(low, high)`, each [N, Hkv, D].
        page_ids: int32 [B, M], all from 0 to N - 1.
        page_counts: int32 [B], entries of each row that exist; the others' scores are anything.
        interpret: whether, and how, to interpret the kernel instead of compiling it.

    Returns:
        float32 [B, Hq, M].

    Raises:
        ValueError: not even one row of the tables fits a TPU's scalar memory.
    """
    batch, width = page_ids.shape
    tables = padded_tables(page_ids, BLOCK_PAGES)
    most = SCALAR_WORDS // (tables.shape[1] + 1)
    if most < 1:
        raise ValueError(
            f"block_tables has {width} entries a row; a TPU's scalar memory holds "
            f"{SCALAR_WORDS // BLOCK_PAGES * BLOCK_PAGES - BLOCK_PAGES}: use larger pages"
        )
    parts = [
        _score_rows(
            q[start : start + most],
            representatives,
            tables[start : start + most],
            page_counts[start : start + most],
            interpret,
        )
        for start in range(0, batch, most)
    ]
    return jnp.concatenate(parts)[:, :, :width]


def _score_rows(
    q: Float32[Array, "B Hq D"],
    representatives: tuple[Float[Array, "N Hkv D"], ...],
    tables: Int32[Array, "B columns"],
    page_counts: Int32[Array, "B"],
    interpret: bool | pltpu.InterpretParams,
) -> Float32[Array, "B Hq columns"]:
    batch, query_heads, dim = q.shape
    kv_heads = representatives[0].shape[1]
    columns = tables.shape[1] // BLOCK_PAGES
    pairs = products(q, representatives)
    whole_row = pl.BlockSpec((1, query_heads, dim), lambda row, column, *_: (row, 0, 0))
    scores: Array = pl.pallas_call(
        functools.partial(_body, pairs=len(pairs), columns=columns),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, columns),
            in_specs=[whole_row] * len(pairs) + [pl.BlockSpec(memory_space=pl.ANY)] * len(pairs),
            out_specs=pl.BlockSpec(
                (1, query_heads, BLOCK_PAGES), lambda row, column, *_: (row, 0, column)
            ),
            scratch_shapes=[
                *(
                    pltpu.VMEM((2, BLOCK_PAGES, kv_heads, dim), rows.dtype)
                    for rows in representatives
                ),
                pltpu.SemaphoreType.DMA((2, len(pairs))),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, query_heads, tables.shape[1]), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            # A block leaves the next one's rows in flight: the order is part of the program.
            dimension_semantics=("arbitrary", "arbitrary"),
        ),
        interpret=interpret,
        name="page_scores",
    )(
        page_counts,
        tables.reshape(-1),
        *(part for part, _ in pairs),
        *(rows for _, rows in pairs),
    )
    return scores


def _body(counts: Any, tables: Any, *refs: Any, pairs: int, columns: int) -> None:
    """Score one block of pages of one sequence."""
    queries, pools = refs[:pairs], refs[pairs : 2 * pairs]
    scores, buffers, semaphores = refs[2 * pairs], refs[2 * pairs + 1 : -1], refs[-1]
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
        kv_heads = buffers[0].shape[2]
        group = queries[0].shape[1] // kv_heads
        held = [buffer[slot].astype(jnp.float32) for buffer in buffers]
        for head in range(kv_heads):
            mine = slice(head * group, (head + 1) * group)
            found = [
                lax.dot_general(
                    query[0, mine],
                    rows[:, head],
                    (((1,), (1,)), ((), ())),
                    precision=lax.Precision.HIGHEST,
                    preferred_element_type=jnp.float32,
                )
                for query, rows in zip(queries, held, strict=True)
            ]
            scores[0, mine] = sum(found[1:], found[0])
