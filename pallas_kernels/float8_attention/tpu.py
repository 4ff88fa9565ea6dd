"""Float8 attention as a Mosaic TPU kernel (for a TPU, or interpreted)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from kvjax.pallas_kernels.float8_attention.operands import (
    WEIGHT_UNIT,
    float8_queries,
    scales_of_slots,
    tile_pages,
)
from kvjax.pallas_kernels.mosaic.flash import HIDDEN, NOTHING
from kvjax.pallas_kernels.mosaic.work import SCALAR_WORDS
from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_bits import float8_values
from kvjax.pallas_kernels.packed_pages import PackedPages
from kvjax.pallas_kernels.page_walk import padded_tables


def float8_paged_attention_tpu(
    q: Float[Array, "B Hq D"],
    k_pages: PackedPages,
    v_pages: PackedPages,
    block_tables: Int32[Array, "B M"],
    lengths: Int32[Array, " B"],
    *,
    scale: float,
    flush_every: int | None,
    interpret: bool | pltpu.InterpretParams = False,
) -> AttentionOutput:
    """Attend one query a sequence to its pages; the contract is that of `float8_paged_attention`.

    Codes stay in HBM; a page, all KV heads, is one copy, and one tile is computed on while the next
    arrives. Where the machine does not multiply float8_e4m3fn, operands are bfloat16, in which
    every code is exact; either way it adds products in float32. Scales are gathered by XLA, one a
    slot. Codes of head_dim below 128 need the layout of `pallas_kernels.mosaic.layout`, or XLA
    copies them before the kernel.

    Args:
        q: [B, Hq, D].
        k_pages: float8 pages [N, Hkv, P, D].
        v_pages: float8 pages [N, Hkv, P, Dv].
        block_tables: int32 [B, M].
        lengths: int32 [B], tokens.
        scale: factor of the scores.
        flush_every: tiles whose products are added up before they join the float32 sum, or None.
        interpret: whether, and how, to interpret the kernel instead of compiling it.

    Returns:
        The `AttentionOutput`, T = B.

    Raises:
        ValueError: not even one row of the tables fits a TPU's scalar memory.
    """
    batch, query_heads, dim = q.shape
    num_pages, kv_heads, page_size, v_dim = v_pages.shape
    group, width = query_heads // kv_heads, block_tables.shape[1]
    pages = tile_pages(page_size)
    tables = padded_tables(jnp.clip(block_tables, 0, num_pages - 1), pages)
    most = SCALAR_WORDS // (tables.shape[1] + 1)
    if most < 1:
        raise ValueError(
            f"block_tables has {width} entries a row; a TPU's scalar memory holds "
            f"{SCALAR_WORDS // pages * pages - pages}: use larger pages"
        )
    codes, query_scale = float8_queries(q)
    tiles = tables.shape[1] // pages
    # The factor of each slot's score, and the logarithm of its value's.
    by_slot = jnp.stack(
        [scales_of_slots(k_pages, tables), jnp.log(scales_of_slots(v_pages, tables))], axis=2
    )
    by_slot = by_slot.reshape(batch, kv_heads, 2, tiles, -1).transpose(0, 3, 1, 2, 4)
    by_row = (
        codes.astype(_operands()).reshape(batch, kv_heads, group, dim),
        (query_scale * scale).reshape(batch, kv_heads, group, 1),
        by_slot,
    )
    pools = [k_pages.planes["codes"], v_pages.planes["codes"]]
    parts = [
        _attend_rows(
            lengths[start : start + most],
            tables[start : start + most],
            [each[start : start + most] for each in by_row],
            pools,
            flush_every,
            interpret,
        )
        for start in range(0, batch, most)
    ]
    out, lse = (jnp.concatenate(part) for part in zip(*parts, strict=True))
    return AttentionOutput(
        out.reshape(batch, query_heads, v_dim).astype(q.dtype), lse.reshape(batch, query_heads)
    )


def _operands() -> DTypeLike:
    """What the machine that the program is for multiplies float8_e4m3fn as."""
    float8 = jnp.float8_e4m3fn
    if pltpu.is_tpu_device() and pltpu.get_tpu_info().is_matmul_supported(float8, float8):
        return float8
    return jnp.bfloat16


def _attend_rows(
    lengths: Int32[Array, " B"],
    tables: Int32[Array, "B columns"],
    by_row: list[Array],
    pools: list[Float[Array, "N Hkv P _"]],
    flush_every: int | None,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[Float32[Array, "B Hkv G Dv"], Float32[Array, "B Hkv G 1"]]:
    """Attend some rows: `by_row` are queries, and factors of rows and of slots."""
    batch, kv_heads, group, dim = by_row[0].shape
    _, tiles, _, _, tokens = by_row[2].shape
    page_size, v_dim = pools[1].shape[2:]
    pages = tokens // page_size

    def heads(*last: int) -> pl.BlockSpec:
        """A row's share of an array [B, Hkv, ...]."""
        return pl.BlockSpec((1, kv_heads, *last), lambda row, tile, *_: (row, 0, 0, 0))

    result: tuple[Array, Array] = pl.pallas_call(
        functools.partial(_body, tiles=tiles, flush_every=flush_every),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, tiles),
            in_specs=[
                heads(group, dim),
                heads(group, 1),
                pl.BlockSpec(
                    (1, 1, kv_heads, 2, tokens), lambda row, tile, *_: (row, tile, 0, 0, 0)
                ),
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[heads(group, v_dim), heads(group, 1)],
            scratch_shapes=[
                pltpu.VMEM((2, pages, kv_heads, page_size, dim), pools[0].dtype),
                pltpu.VMEM((2, pages, kv_heads, page_size, v_dim), pools[1].dtype),
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.VMEM((kv_heads, group, 3), jnp.float32),
                pltpu.VMEM((kv_heads, group, v_dim), jnp.float32),
                pltpu.VMEM((kv_heads, group, v_dim), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, kv_heads, group, v_dim), jnp.float32),
            jax.ShapeDtypeStruct((batch, kv_heads, group, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            # A tile leaves the next one's pages in flight: the order is part of the program.
            dimension_semantics=("arbitrary", "arbitrary"),
        ),
        interpret=interpret,
        name="float8_paged_attention",
    )(lengths, tables.reshape(-1), *by_row, *pools)
    return result


def _body(
    lengths: Any,
    tables: Any,
    q_ref: Any,
    factor_ref: Any,
    slot_ref: Any,
    k_pool: Any,
    v_pool: Any,
    out_ref: Any,
    lse_ref: Any,
    k_buffer: Any,
    v_buffer: Any,
    semaphores: Any,
    running: Any,
    total: Any,
    run: Any,
    *,
    tiles: int,
    flush_every: int | None,
) -> None:
    """Fold one tile of one sequence into its running softmax."""
    tile, step = pl.program_id(1), pl.program_id(0) * tiles + pl.program_id(1)
    pages, kv_heads, page_size = k_buffer.shape[1:4]
    tokens = pages * page_size

    def slots_left(step: Any) -> Any:
        return lengths[lax.div(step, tiles)] - lax.rem(step, tiles) * tokens

    def pages_of(step: Any) -> Any:
        return lax.div(jnp.clip(slots_left(step), 0, tokens) + (page_size - 1), page_size)

    def copies(step: Any, page: Any, page_id: Any) -> list[Any]:
        slot = lax.rem(step, 2)
        return [
            pltpu.make_async_copy(
                pool.at[page_id], buffer.at[slot, page], semaphores.at[slot, which]
            )
            for which, (pool, buffer) in enumerate(((k_pool, k_buffer), (v_pool, v_buffer)))
        ]

    def start(step: Any) -> None:
        def copy(page: Any, _: None) -> None:
            for dma in copies(step, page, tables[step * pages + page]):
                dma.start()

        lax.fori_loop(0, pages_of(step), copy, None)

    @pl.when(step == 0)
    def _() -> None:
        start(step)

    @pl.when(step + 1 < pl.num_programs(0) * tiles)
    def _() -> None:
        start(step + 1)

    @pl.when(tile == 0)
    def _() -> None:
        column = lax.broadcasted_iota(jnp.int32, running.shape, 2)
        running[...] = jnp.where(column == 1, 0.0, NOTHING)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        run[...] = jnp.zeros(run.shape, jnp.float32)

    def arrived(page: Any, _: None) -> None:
        # Only the size counts in a wait, so any page may stand for the one that was copied.
        for dma in copies(step, page, 0):
            dma.wait()

    lax.fori_loop(0, pages_of(step), arrived, None)

    def fold(head: Any, _: None) -> None:
        slot, left = lax.rem(step, 2), slots_left(step)
        q = q_ref[0, head]
        keys = _operand(k_buffer[slot, :, head], q.dtype)
        # What was not copied, or nobody wrote, may be NaN, and 0 * NaN is NaN.
        down = lax.broadcasted_iota(jnp.int32, (tokens, v_buffer.shape[4]), 0)
        values = _operand(v_buffer[slot, :, head], q.dtype, down < left)
        seen = lax.broadcasted_iota(jnp.int32, (q.shape[0], tokens), 1) < left
        scores = _product(q, keys, 1) * factor_ref[0, head] * slot_ref[0, 0, head, 0:1]
        logits = jnp.where(seen, scores + slot_ref[0, 0, head, 1:2], HIDDEN)
        scores = jnp.where(seen, scores, HIDDEN)
        before_top, before_peak = running[head, :, 0:1], running[head, :, 2:3]
        top = jnp.maximum(before_top, jnp.max(scores, axis=1, keepdims=True))
        peak = jnp.maximum(before_peak, jnp.max(logits, axis=1, keepdims=True))
        mass = running[head, :, 1:2] * jnp.exp(before_top - top)
        mass += jnp.sum(jnp.exp(scores - top), axis=1, keepdims=True)
        running[head, :, 0:1], running[head, :, 1:2], running[head, :, 2:3] = top, mass, peak
        fade = jnp.exp(before_peak - peak)
        weights = _float8(WEIGHT_UNIT * jnp.exp(logits - peak)).astype(q.dtype)
        sums, flushed = run[head] * fade + _product(weights, values, 0), total[head] * fade
        if flush_every is not None:
            flush = lax.rem(tile + 1, flush_every) == 0
            flushed = jnp.where(flush, flushed + sums, flushed)
            sums = jnp.where(flush, 0.0, sums)
        run[head], total[head] = sums, flushed

    @pl.when(pages_of(step) > 0)
    def _() -> None:
        lax.fori_loop(0, kv_heads, fold, None)

    @pl.when(tile == tiles - 1)
    def _() -> None:
        top, mass, peak = (running[:, :, at : at + 1] for at in range(3))
        share = jnp.exp(peak - top) / jnp.where(mass == 0.0, WEIGHT_UNIT, mass * WEIGHT_UNIT)
        out_ref[0] = (total[...] + run[...]) * share
        lse_ref[0] = top + jnp.log(mass)


def _operand(codes: Array, dtype: DTypeLike, seen: Array | None = None) -> Array:
    """Codes [pages, P, D] as what is multiplied, [pages * P, D]; 0 where not seen."""
    whole = lax.bitcast_convert_type(codes, jnp.uint8).astype(jnp.int32)
    values = float8_values(whole).reshape(-1, codes.shape[2])
    return (values if seen is None else jnp.where(seen, values, 0.0)).astype(dtype)


def _product(left: Array, right: Array, axis: int) -> Array:
    """Multiply over the last axis of `left` and `axis` of `right`, to float32."""
    return lax.dot_general(
        left, right, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32
    )


def _float8(x: Array) -> Array:
    """Round weights, 0 to `WEIGHT_UNIT`, to float8_e4m3fn in operations that every kernel has."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    bits = (bits + (2**19 - 1) + ((bits >> 20) & 1)) & -(2**20)
    normal = lax.bitcast_convert_type(bits, jnp.float32)
    subnormal = lax.round(x * 2.0**9, lax.RoundingMethod.TO_NEAREST_EVEN) * 2.0**-9
    # A NaN is not up to anything, and stays.
    return jnp.where(x < 2.0**-6, subnormal, jnp.where(x <= WEIGHT_UNIT, normal, x))
