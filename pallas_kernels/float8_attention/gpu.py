"""Float8 attention as a Pallas Triton kernel, with float8 operands in both of its products.

Expiry note: the Triton backend of Pallas is deprecated since JAX 0.11 and will be removed; this
file goes with it. Until then it runs only when asked for by name (`implementation="gpu"`), and JAX
says so with a DeprecationWarning when the program is lowered. The default on a GPU is XLA.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int32

from kvjax.pallas_kernels.float8_attention.operands import (
    WEIGHT_UNIT,
    float8_queries,
    tile_pages,
)
from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_pages import PackedPages
from kvjax.pallas_kernels.triton_walk import padded_block


def float8_paged_attention_gpu(
    q: Float[Array, "B Hq D"],
    k_pages: PackedPages,
    v_pages: PackedPages,
    block_tables: Int32[Array, "B M"],
    lengths: Int32[Array, " B"],
    *,
    scale: float,
    flush_every: int | None,
    interpret: bool = False,
) -> AttentionOutput:
    """Attend one query a sequence to its pages; the contract is that of `float8_paged_attention`.

    One program a (sequence, KV head) walks the table tile by tile.

    Args:
        q: [B, Hq, D].
        k_pages: float8 pages [N, Hkv, P, D].
        v_pages: float8 pages [N, Hkv, P, Dv].
        block_tables: int32 [B, M].
        lengths: int32 [B], tokens.
        scale: factor of the scores.
        flush_every: tiles whose products are added up before they join the float32 sum, or None.
        interpret: whether to run the kernel in Pallas' interpreter, on any platform.

    Returns:
        The `AttentionOutput`, T = B.
    """
    batch, query_heads, _ = q.shape
    kv_heads, v_dim = v_pages.shape[1], v_pages.shape[3]
    queries, query_scale = float8_queries(q)
    out, lse = pl.pallas_call(
        functools.partial(_kernel, flush_every=flush_every),
        grid=(batch, kv_heads),
        out_shape=[
            jax.ShapeDtypeStruct((batch, query_heads, v_dim), q.dtype),
            jax.ShapeDtypeStruct((batch, query_heads), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="float8_paged_attention",
    )(
        queries,
        query_scale * scale,
        k_pages.planes["codes"],
        k_pages.scale.reshape(k_pages.scale.shape[:2]),
        v_pages.planes["codes"],
        v_pages.scale.reshape(v_pages.scale.shape[:2]),
        block_tables,
        lengths,
    )
    return AttentionOutput(out, lse)


def _kernel(
    q_ref: Any,
    factor_ref: Any,
    k_ref: Any,
    k_scale_ref: Any,
    v_ref: Any,
    v_scale_ref: Any,
    table_ref: Any,
    length_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    *,
    flush_every: int | None,
) -> None:
    row, kv_head = pl.program_id(0), pl.program_id(1)
    _, kv_heads, page_size, dim = k_ref.shape
    group, v_dim = q_ref.shape[1] // kv_heads, v_ref.shape[3]
    tokens = tile_pages(page_size) * page_size
    member = jnp.arange(padded_block(group), dtype=jnp.int32)
    head, held = kv_head * group + member, member < group
    column = jnp.arange(padded_block(dim), dtype=jnp.int32)
    v_column = jnp.arange(padded_block(v_dim), dtype=jnp.int32)
    offset = jnp.arange(padded_block(tokens), dtype=jnp.int32)
    length = length_ref[row]
    q = _codes(
        q_ref.at[row, head[:, None], column[None, :]], held[:, None] & (column < dim)[None, :]
    )
    factor = plgpu.load(factor_ref.at[row, head], mask=held, other=0)

    def scales(ref: Any, ids: Any, seen: Any) -> Any:
        """One for each slot, [1, slots]."""
        page = ids if ref.shape[0] > 1 else jnp.zeros_like(ids)
        place = ref.at[page, kv_head if ref.shape[1] > 1 else 0]
        return plgpu.load(place, mask=seen, other=0).astype(jnp.float32)[None, :]

    def fold(tile: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        before_top, mass, before_peak, total, run = carry
        slot = tile * tokens + offset
        # A block may be wider than its tile.
        seen = (offset < tokens) & (slot < length)
        ids = plgpu.load(table_ref.at[row, lax.div(slot, page_size)], mask=seen, other=0)
        inside = lax.rem(slot, page_size)[:, None]

        def codes(ref: Any, columns: Any) -> Any:
            """Slots of the tile; hidden ones may lie outside the pool or hold NaN: 0."""
            mask = seen[:, None] & (columns < ref.shape[3])[None, :]
            return _codes(ref.at[ids[:, None], kv_head, inside, columns[None, :]], mask)

        scores = _product(q, codes(k_ref, column), 1) * factor[:, None]
        scores = scores * scales(k_scale_ref, ids, seen)
        logits = scores + jnp.log(scales(v_scale_ref, ids, seen))
        scores = jnp.where(seen[None, :], scores, -jnp.inf)
        logits = jnp.where(seen[None, :], logits, -jnp.inf)
        top = jnp.maximum(before_top, scores.max(axis=1))
        peak = jnp.maximum(before_peak, logits.max(axis=1))
        mass = mass * jnp.exp(before_top - _finite(top))
        mass += jnp.exp(scores - _finite(top)[:, None]).sum(axis=1)
        fade = jnp.exp(before_peak - _finite(peak))[:, None]
        weights = WEIGHT_UNIT * jnp.exp(logits - _finite(peak)[:, None])
        product = _product(weights.astype(q.dtype), codes(v_ref, v_column), 0)
        run = run * fade + product
        total = total * fade
        if flush_every is not None:
            # Divided first, which is exact: the compiler would have a bare product start from the
            # total, in the accumulator that this is to leave.
            flush = lax.rem(tile + 1, flush_every) == 0
            total = total + jnp.where(flush, run / WEIGHT_UNIT, 0.0)
            run = jnp.where(flush, 0.0, run)
        return top, mass, peak, total, run

    lowest = jnp.full(member.shape, -jnp.inf, jnp.float32)
    zeros = jnp.zeros((member.shape[0], v_column.shape[0]), jnp.float32)
    start = (lowest, jnp.zeros(member.shape, jnp.float32), lowest, zeros, zeros)
    top, mass, peak, total, run = lax.fori_loop(0, pl.cdiv(length, tokens), fold, start)
    share = jnp.exp(peak - _finite(top)) / jnp.where(mass == 0.0, 1.0, mass)
    out = (total + run / WEIGHT_UNIT) * share[:, None]
    plgpu.store(
        out_ref.at[row, head[:, None], v_column[None, :]],
        out.astype(out_ref.dtype),
        mask=held[:, None] & (v_column < v_dim)[None, :],
    )
    plgpu.store(lse_ref.at[row, head], top + jnp.log(mass), mask=held)


def _codes(place: Any, mask: Any) -> Any:
    """Load float8; 0 where masked, which Pallas has no float8 constant for."""
    loaded = lax.bitcast_convert_type(plgpu.load(place, mask=mask), jnp.uint8)
    kept = jnp.where(mask, loaded, jnp.zeros_like(loaded))
    return lax.bitcast_convert_type(kept, jnp.float8_e4m3fn)


def _product(left: Array, right: Array, axis: int) -> Array:
    """Multiply float8 over the last axis of `left` and `axis` of `right`, to float32."""
    return lax.dot_general(
        left, right, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32
    )


def _finite(x: Any) -> Any:
    """Put 0 for -inf: exp(-inf - 0) is the 0 that exp(-inf - -inf), a NaN, stands for."""
    return jnp.where(x == -jnp.inf, 0.0, x)
