"""Scores of a lightning indexer as a Mosaic TPU kernel (for a TPU, or interpreted)."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32, UInt8

from kvjax.pallas_kernels.lightning_indexer.float4 import float4_page
from kvjax.pallas_kernels.lightning_indexer.rectify import rectified
from kvjax.pallas_kernels.mosaic.work import SCALAR_WORDS
from kvjax.pallas_kernels.packed_bits import float8_values
from kvjax.pallas_kernels.page_walk import padded_tables
from kvjax.pallas_kernels.validate_indexer import tokens_a_page

BLOCK_TOKENS = 512
"""Tokens scored together, a lane each; more where pages make no whole vectors of lanes of it."""

LANES, SUBLANES = 128, 8


def lightning_scores_tpu(
    q: Float[Array, "G R Hi Di"],
    weights: Float32[Array, "G R Hi"],
    keys: Float[Array, "N P Di"] | UInt8[Array, "N half Di"],
    key_scales: Float32[Array, "N P"] | None,
    page_ids: Int32[Array, "G M"],
    page_counts: Int32[Array, "G"],
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float32[Array, "G R S"]:
    """Score the slots of each tile's pages.

    The keys stay in HBM; a page is one copy, read once for all queries of a tile, and one block of
    pages is scored while the next arrives. Float8 and float4 keys are multiplied as bfloat16, which
    holds them exactly, where queries are bfloat16. Their scales are rows too small to copy one by
    one: XLA gathers those of the tables. Keys of fewer than 128 elements need the layout of
    `pallas_kernels.mosaic.layout`, or XLA copies them before the kernel.

    Args:
        q: [G, R, Hi, Di], tiles of queries that look at the same pages.
        weights: float32 [G, R, Hi], scaled.
        keys: [N, P, Di], or float4 codes, uint8 [N, P / 2, Di].
        key_scales: float32 [N, P], or None.
        page_ids: int32 [G, M], all from 0 to N - 1.
        page_counts: int32 [G], entries of each table that count; what others score is anything.
        interpret: whether, and how, to interpret the kernel instead of compiling it.

    Returns:
        float32 [G, R, M * P].

    Raises:
        ValueError: not even one row of the tables fits a TPU's scalar memory.
    """
    tiles, rows, heads, dim = q.shape
    size, width = tokens_a_page(keys), page_ids.shape[1]
    least = LANES // math.gcd(size, LANES)  # pages whose tokens fill whole vectors of lanes
    pages = least * max(1, BLOCK_TOKENS // (least * size))
    tables = padded_tables(page_ids, pages)
    most = SCALAR_WORDS // (tables.shape[1] + 1)
    if most < 1:
        raise ValueError(
            f"block_tables has {width} entries a row; a TPU's scalar memory holds "
            f"{SCALAR_WORDS // pages * pages - pages}: use larger pages"
        )
    # A head of zeros adds nothing; whole groups of heads are cut out without moving sublanes.
    extra = -heads % SUBLANES
    q = jnp.pad(q, ((0, 0), (0, 0), (0, extra), (0, 0))).reshape(tiles, -1, dim)
    weights = jnp.pad(weights, ((0, 0), (0, 0), (0, extra))).reshape(tiles, -1, 1)
    by_tile = [q, weights]
    if key_scales is not None:
        by_tile.append(key_scales[tables].reshape(tiles, 1, -1))
    parts = [
        _score_tiles(
            page_counts[start : start + most],
            tables[start : start + most],
            [each[start : start + most] for each in by_tile],
            keys,
            rows,
            pages,
            interpret,
        )
        for start in range(0, tiles, most)
    ]
    return jnp.concatenate(parts)[:, :, : width * size]


def _score_tiles(
    page_counts: Int32[Array, "G"],
    tables: Int32[Array, "G entries"],
    by_tile: list[Array],
    keys: Array,
    rows: int,
    pages: int,
    interpret: bool | pltpu.InterpretParams,
) -> Float32[Array, "G R slots"]:
    """Score some tiles: `by_tile` are queries, weights and, of float8 keys, scales."""
    tiles, entries = tables.shape
    columns, size, (_, held, dim) = entries // pages, tokens_a_page(keys), keys.shape

    def whole(array: Array) -> pl.BlockSpec:
        return pl.BlockSpec((1, *array.shape[1:]), lambda tile, column, *_: (tile, 0, 0))

    def slots(count: int) -> pl.BlockSpec:
        """A block of pages' share of an array [G, count, slots]."""
        return pl.BlockSpec((1, count, pages * size), lambda tile, column, *_: (tile, 0, column))

    specs = [whole(each) for each in by_tile[:2]] + [slots(1)] * (len(by_tile) - 2)
    scores: Array = pl.pallas_call(
        functools.partial(_body, columns=columns, pages=pages),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(tiles, columns),
            in_specs=[*specs, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=slots(rows),
            scratch_shapes=[
                pltpu.VMEM((2, pages, held, dim), keys.dtype),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((tiles, rows, entries * size), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            # A block leaves the next one's keys in flight: the order is part of the program.
            dimension_semantics=("arbitrary", "arbitrary"),
        ),
        interpret=interpret,
        name="lightning_indexer",
    )(page_counts, tables.reshape(-1), *by_tile, keys)
    return scores


def _body(
    counts: Any, tables: Any, q_ref: Any, weights_ref: Any, *refs: Any, columns: int, pages: int
) -> None:
    """Score one block of pages for one tile."""
    *scales, pool, scores_ref, buffer, semaphores = refs
    step = pl.program_id(0) * columns + pl.program_id(1)

    def pages_of(step: Any) -> Any:
        left = counts[lax.div(step, columns)] - lax.rem(step, columns) * pages
        return jnp.clip(left, 0, pages)

    def copy(step: Any, page: Any, page_id: Any) -> Any:
        slot = lax.rem(step, 2)
        return pltpu.make_async_copy(pool.at[page_id], buffer.at[slot, page], semaphores.at[slot])

    def start(step: Any) -> None:
        def begin(page: Any, _: None) -> None:
            copy(step, page, tables[step * pages + page]).start()

        lax.fori_loop(0, pages_of(step), begin, None)

    @pl.when(step == 0)
    def _() -> None:
        start(step)

    @pl.when(step + 1 < pl.num_programs(0) * columns)
    def _() -> None:
        start(step + 1)

    def arrived(page: Any, _: None) -> None:
        # Only the size counts in a wait, so any page may stand for the one that was copied.
        copy(step, page, 0).wait()

    lax.fori_loop(0, pages_of(step), arrived, None)

    @pl.when(pages_of(step) > 0)
    def _() -> None:
        held, q, weights = buffer[lax.rem(step, 2)], q_ref[0], weights_ref[0]
        exact = q.dtype == jnp.bfloat16 and held.dtype != jnp.float32
        if held.dtype == jnp.uint8:
            values = float4_page(held.astype(jnp.int32), axis=1)
        elif held.dtype == jnp.float8_e4m3fn:
            values = float8_values(lax.bitcast_convert_type(held, jnp.uint8).astype(jnp.int32))
        else:
            values = held.astype(jnp.float32)
        # Tokens become rows as float32, whose vectors no page's end cuts.
        values = values.reshape(-1, values.shape[-1])
        kind = jnp.bfloat16 if exact else jnp.float32
        products = lax.dot_general(
            q.astype(kind),
            values.astype(kind),
            (((1,), (1,)), ((), ())),
            precision=None if exact else lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        weighted = rectified(products) * weights
        rows = scores_ref.shape[1]
        heads = weighted.shape[0] // rows
        for row in range(rows):
            mine = weighted[row * heads : (row + 1) * heads]
            found = jnp.sum(mine, axis=0, keepdims=True)
            scores_ref[0, row : row + 1] = found * scales[0][0] if scales else found
