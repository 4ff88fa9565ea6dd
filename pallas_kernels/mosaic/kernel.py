"""The kernel and its call: query blocks in order, each over the items of its work list."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32

from kvjax.pallas_kernels.mosaic.block import BlockFolder, Masking
from kvjax.pallas_kernels.mosaic.coding import Coding, Unpacker
from kvjax.pallas_kernels.mosaic.flash import Accumulators
from kvjax.pallas_kernels.mosaic.pools import BlockPool
from kvjax.pallas_kernels.mosaic.statistics import StatisticsWriter
from kvjax.pallas_kernels.mosaic.stream import Copied, PageStream
from kvjax.pallas_kernels.mosaic.tiles import LANES, Tiles
from kvjax.pallas_kernels.mosaic.work import Scalar, Work, WorkList


class KernelOutput(NamedTuple):
    """What the kernel writes, in its own order.

    Attributes:
        out: [Hkv, rows, Dv].
        lse: float32 [blocks, Hkv, chunks, chunk_rows].
        raw: float32 [windows, 2, kv_blocks, pages, lanes], for `statistics.unpack`, or None.
    """

    out: Float[Array, "Hkv rows Dv"]
    lse: Float[Array, "blocks Hkv chunks chunk_rows"]
    raw: Float[Array, "windows 2 kv_blocks pages lanes"] | None


def run_kernel(
    q: Float[Array, "Hkv rows D"],
    keys: BlockPool,
    values: BlockPool,
    block_tables: Int32[Array, "B M"],
    work_list: WorkList,
    *,
    tiles: Tiles,
    masking: Masking,
    num_windows: int,
    out_dtype: jnp.dtype,
    decode: bool,
    interpret: bool | pltpu.InterpretParams,
    page_tokens: Int32[Array, "B M"] | None = None,
    value_q: Float[Array, "Hkv rows Dv"] | None = None,
    chosen: Float32[Array, "W kv_blocks 1 slots"] | None = None,
) -> KernelOutput:
    """Run the kernel.

    Args:
        q: [Hkv, rows, D], a row a query and head of the group; rows fill whole query blocks.
        keys: of pages of P tokens of D elements; stays in HBM.
        values: of pages of P tokens of Dv elements; stays in HBM.
        block_tables: int32 [B, M].
        work_list: what to do.
        tiles: the sizes.
        masking: the options.
        num_windows: windows of statistics to write; 0 for no statistics.
        out_dtype: of the output.
        decode: whether no item is longer than a window of rows.
        interpret: whether, and how, to interpret the kernel instead of compiling it.
        page_tokens: int32 [B, M], tokens that count of the pages past an item's `end_slot`; None
            means none.
        value_q: [Hkv, rows, Dv], queries that score the values too, or None.
        chosen: float32 [W, kv_blocks, 1, slots], 0 for slots of an item's blocks that do not count;
            None means that all do.

    Returns:
        The `KernelOutput`.
    """
    kv_heads, rows, _ = q.shape
    page_size, v_head_dim = values.page_shape
    blocks = rows // tiles.rows
    chunks = tiles.rows // tiles.chunk_rows
    kv_blocks = -(-block_tables.shape[1] // tiles.pages)
    stat_lanes = -(-kv_heads * tiles.window_rows // LANES) * LANES
    f32 = jnp.float32
    sides = (keys, values)
    copied = tuple(side.copied for side in sides)
    if chosen is not None:
        copied += (Copied((), (), (chosen,)),)

    def per_block(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((kv_heads, tiles.rows, width), lambda i, *_: (0, i, 0))

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    lse_spec = pl.BlockSpec((1, kv_heads, chunks, tiles.chunk_rows), lambda i, *_: (i, 0, 0, 0))
    out_specs = [per_block(v_head_dim), lse_spec]
    out_shape = [
        jax.ShapeDtypeStruct((kv_heads, rows, v_head_dim), out_dtype),
        jax.ShapeDtypeStruct((blocks, kv_heads, chunks, tiles.chunk_rows), f32),
    ]
    scratch_shapes: list[Any] = [
        pltpu.VMEM((kv_heads, tiles.rows, 2), f32),
        pltpu.VMEM((kv_heads, tiles.rows, v_head_dim), f32),
        pltpu.SemaphoreType.DMA((2, len(jax.tree.leaves(copied)))),
        tuple(_buffers(each, tiles.pages) for each in copied),
        tuple(None if side.coding is None else _unpacked(side, tiles, q.dtype) for side in sides),
    ]
    if num_windows:
        out_specs.append(in_hbm)
        raw_shape = (num_windows, 2, kv_blocks, tiles.pages, stat_lanes)
        out_shape.append(jax.ShapeDtypeStruct(raw_shape, f32))
        scratch_shapes += [
            pltpu.VMEM((stat_lanes, tiles.pages * page_size), f32),
            pltpu.VMEM((2, tiles.pages, stat_lanes), f32),
            pltpu.SMEM((1,), jnp.int32),
            pltpu.SemaphoreType.DMA(()),
        ]
    scalars = [work_list.block_items, *work_list.work, block_tables.reshape(-1)]
    name = "paged_attention" if decode else "ragged_paged_attention"
    if page_tokens is not None:
        scalars.append(page_tokens.reshape(-1))
        name = "sparse_paged_attention"
    queries = [q]
    if value_q is not None:
        queries.append(value_q)
        name = name.replace("paged", "latent")
    body = functools.partial(
        _body,
        codings=(keys.coding, values.coding),
        tiles=tiles,
        masking=masking,
        queries=len(queries),
        listed=page_tokens is not None,
        statistics=num_windows > 0,
        decode=decode,
    )
    out, lse, *raw = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(blocks,),
            in_specs=[
                *(per_block(each.shape[2]) for each in queries),
                jax.tree.map(lambda _: in_hbm, copied),
            ],
            out_specs=out_specs,
            scratch_shapes=scratch_shapes,
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            # A block leaves the next one's first pages in flight: the order is part of the program.
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=tiles.vmem_bytes,
        ),
        interpret=interpret,
        name=name,
    )(*scalars, *queries, copied)
    return KernelOutput(out, lse, raw[0] if raw else None)


def _buffers(copied: Copied, pages: int) -> Copied:
    """The double buffer of what is copied of a pool, for blocks of so many pages."""
    return Copied(
        tuple(
            pltpu.VMEM((2, each.shape[1], pages, *each.shape[2:]), each.dtype)
            for each in copied.pages
        ),
        tuple(pltpu.VMEM((2, pages, *each.shape[1:]), each.dtype) for each in copied.rows),
        tuple(pltpu.VMEM((2, *each.shape[2:]), each.dtype) for each in copied.factors),
    )


def _unpacked(pool: BlockPool, tiles: Tiles, dtype: jnp.dtype) -> tuple[Any, Any]:
    """Where a block's rows and its elements are unpacked to, in the queries' dtype."""
    rows = tuple(
        pltpu.VMEM((tiles.pages, *each.shape[1:]), jnp.float32) for each in pool.copied.rows
    )
    heads = pool.copied.pages[0].shape[1]
    return rows, pltpu.VMEM((1, heads, tiles.pages, *pool.page_shape), dtype)


def _body(
    *refs: Any,
    codings: tuple[Coding | None, Coding | None],
    tiles: Tiles,
    masking: Masking,
    queries: int,
    listed: bool,
    statistics: bool,
    decode: bool,
) -> None:
    """Compute one query block; `refs` are scalars, inputs, outputs and scratch, in that order."""
    num_work = len(Work._fields)
    block_items, *left = refs
    work, tables, left = Work(*left[:num_work]), left[num_work], left[num_work + 1 :]
    page_tokens = left.pop(0) if listed else None
    (q, *value_q), left = left[:queries], left[queries:]
    pools, out, lse, *left = left
    raw = left.pop(0) if statistics else None
    running, weighted, semaphores, buffers, unpacked, *left = left
    unpackers = [
        Unpacker(coding, *arrived, *places)
        for coding, arrived, places in zip(codings, buffers[:2], unpacked, strict=True)
        if coding is not None
    ]
    k_block, v_block = (
        arrived.pages[0] if places is None else places[1]
        for arrived, places in zip(buffers[:2], unpacked, strict=True)
    )
    writer = StatisticsWriter(raw, *left) if statistics else None
    stream = PageStream(work, tables, pools, buffers, semaphores)
    accumulators = Accumulators(running, weighted)
    folder = BlockFolder(
        q,
        stream,
        k_block,
        v_block,
        accumulators,
        writer,
        tiles,
        masking,
        decode,
        page_tokens,
        value_q=value_q[0] if value_q else None,
        chosen=buffers[2].factors[0] if len(buffers) == 3 else None,
    )
    step = pl.program_id(0)

    @pl.when(step == 0)
    def _() -> None:
        stream.start(stream.first_item(), jnp.int32(0))
        if writer is not None:
            writer.open()

    def per_chunk(function: Any) -> None:
        def at(index: Scalar, _: None) -> None:
            head, chunk = lax.div(index, chunks), lax.rem(index, chunks)
            start = pl.multiple_of(chunk * tiles.chunk_rows, tiles.chunk_rows)
            function(head, chunk, pl.ds(start, tiles.chunk_rows))

        chunks = tiles.rows // tiles.chunk_rows
        lax.fori_loop(0, q.shape[0] * chunks, at, None)

    def clear(head: Scalar, chunk: Scalar, rows: Any) -> None:
        accumulators.clear(head, rows)

    def per_item(item: Scalar, _: None) -> None:
        def per_kv_block(block: Scalar, _: None) -> None:
            stream.start_next(item, block)
            buffer = stream.wait(item, block)
            for unpacker in unpackers:
                unpacker.unpack(buffer)
            folder.fold(item, block, buffer)

        lax.fori_loop(0, stream.num_blocks(item), per_kv_block, None)

    def finish(head: Scalar, chunk: Scalar, rows: Any) -> None:
        out[head, rows] = accumulators.output(head, rows).astype(out.dtype)
        lse[0, head, pl.ds(chunk, 1)] = accumulators.log_normalizer(head, rows)

    per_chunk(clear)
    lax.fori_loop(block_items[step], block_items[step + 1], per_item, None)
    per_chunk(finish)

    if writer is not None:

        @pl.when(step == pl.num_programs(0) - 1)
        def _() -> None:
            writer.close()
