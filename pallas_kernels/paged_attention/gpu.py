"""Paged decode attention as a Pallas Triton kernel.

Expiry note: the Triton backend of Pallas is deprecated since JAX 0.11 and will be removed; this
file goes with it. Until then it runs only when asked for by name (`implementation="gpu"`), and JAX
says so with a DeprecationWarning when the program is lowered. The default on a GPU is XLA.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int32

from kvjax.pallas_kernels.output import AttentionOutput

# A Triton block is a power of two along every axis and a matrix product takes at least 16.
SMALLEST_BLOCK = 16
# Keys and values of one step stay in registers as float32: at most this many elements of each.
LARGEST_TILE = 64 * 128


def paged_attention_gpu(
    q: Float[Array, "B Hq D"],
    k_pages: Float[Array, "N Hkv P D"],
    v_pages: Float[Array, "N Hkv P Dv"],
    block_tables: Int32[Array, "B M"],
    lengths: Int32[Array, "B"],
    *,
    scale: float,
    window: int | None,
    sink_tokens: int,
    sink_logits: Float[Array, "Hq"] | None,
    soft_cap: float | None,
    query_positions: Int32[Array, "B"],
    page_stats: bool,
    interpret: bool = False,
) -> AttentionOutput:
    """Attend one query a sequence to its pages; the contract is that of `paged_attention`.

    One program a (sequence, KV head) walks the table page by page with a running softmax
    (FlashAttention-2, arXiv:2307.08691, section 3.1) for all query heads of the KV head. Products
    are IEEE float32, not TF32: correct before fast.

    Args:
        q: [B, Hq, D].
        k_pages: [N, Hkv, P, D].
        v_pages: [N, Hkv, P, Dv].
        block_tables: int32 [B, M].
        lengths: int32 [B], tokens.
        scale: factor of the scores.
        window: tokens a query sees, itself included, or None.
        sink_tokens: first tokens that stay visible outside the window.
        sink_logits: [Hq] or None.
        soft_cap: bound of the scores, or None.
        query_positions: int32 [B], the position of each query.
        page_stats: whether to return page statistics.
        interpret: whether to run the kernel in Pallas' interpreter, on any platform.

    Returns:
        The `AttentionOutput`, T = B.
    """
    batch, query_heads, head_dim = q.shape
    kv_heads, page_size, v_head_dim = v_pages.shape[1:]
    width = block_tables.shape[1]
    kernel = functools.partial(
        _kernel,
        page_size=page_size,
        group=query_heads // kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        width=width,
        scale=scale,
        window=window,
        sink_tokens=sink_tokens,
        has_sink=sink_logits is not None,
        soft_cap=soft_cap,
        page_stats=page_stats,
    )
    if sink_logits is None:
        sink_logits = jnp.zeros(query_heads, jnp.float32)
    shapes = [
        jax.ShapeDtypeStruct((batch, query_heads, v_head_dim), q.dtype),
        jax.ShapeDtypeStruct((batch, query_heads), jnp.float32),
    ]
    if page_stats:
        shapes += [jax.ShapeDtypeStruct((batch, query_heads, width), jnp.float32)] * 2
    result = pl.pallas_call(
        kernel,
        grid=(batch, kv_heads),
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_attention",
    )(q, k_pages, v_pages, block_tables, lengths, query_positions, sink_logits)
    return AttentionOutput(*result)


def _kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    table_ref: Any,
    length_ref: Any,
    position_ref: Any,
    sink_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    *stats_refs: Any,
    page_size: int,
    group: int,
    head_dim: int,
    v_head_dim: int,
    width: int,
    scale: float,
    window: int | None,
    sink_tokens: int,
    has_sink: bool,
    soft_cap: float | None,
    page_stats: bool,
) -> None:
    row, kv_head = pl.program_id(0), pl.program_id(1)
    block_g, block_d, block_v = _block(group), _block(head_dim), _block(v_head_dim)
    block_p = min(_block(page_size), _block(LARGEST_TILE // max(block_d, block_v)))

    member = jnp.arange(block_g, dtype=jnp.int32)
    head = kv_head * group + member
    held = member < group
    column = jnp.arange(block_d, dtype=jnp.int32)
    v_column = jnp.arange(block_v, dtype=jnp.int32)
    length, position = length_ref[row], position_ref[row]
    end = jnp.minimum(length, position + 1)

    q_mask = held[:, None] & (column < head_dim)[None, :]
    q = plgpu.load(q_ref.at[row, head[:, None], column[None, :]], mask=q_mask, other=0)
    q = q.astype(jnp.float32) * scale

    def scores_of(page: Any, first: Any) -> tuple[Any, Any, Any]:
        """Score slots first .. first + block_p - 1 of a sequence, all in one page."""
        slot = first + jnp.arange(block_p, dtype=jnp.int32)
        offset = slot % page_size
        # A block may be wider than what is left of its page: those slots are the next page's.
        visible = (slot < end) & (slot // page_size == first // page_size)
        if window is not None:
            visible &= (slot > position - window) | (slot < sink_tokens)
        # Hidden slots are not even loaded: they may lie outside the pool or hold NaN.
        k_mask = visible[:, None] & (column < head_dim)[None, :]
        k = plgpu.load(
            k_ref.at[page, kv_head, offset[:, None], column[None, :]], mask=k_mask, other=0
        )
        scores = _dot(q, k, 1)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        return jnp.where(visible[None, :], scores, -jnp.inf), offset, visible

    def one_page(entry: Any, carry: Any) -> Any:
        top, total, values = carry
        page = plgpu.load(table_ref.at[row, entry])
        page_top = jnp.full(block_g, -jnp.inf, jnp.float32)
        page_total = jnp.zeros(block_g, jnp.float32)
        for part in range(0, page_size, block_p):
            scores, offset, visible = scores_of(page, entry * page_size + part)
            v_mask = visible[:, None] & (v_column < v_head_dim)[None, :]
            v = plgpu.load(
                v_ref.at[page, kv_head, offset[:, None], v_column[None, :]], mask=v_mask, other=0
            )
            part_top = scores.max(axis=1)
            new_top = jnp.maximum(top, part_top)
            weights = jnp.exp(scores - _finite(new_top)[:, None])
            fade = jnp.exp(top - _finite(new_top))
            total = total * fade + weights.sum(axis=1)
            values = values * fade[:, None] + _dot(weights, v, 0)
            top = new_top
            if page_stats:
                new_page_top = jnp.maximum(page_top, part_top)
                page_total = page_total * jnp.exp(page_top - _finite(new_page_top))
                page_total += jnp.exp(scores - _finite(new_page_top)[:, None]).sum(axis=1)
                page_top = new_page_top
        if page_stats:
            max_ref, sum_ref = stats_refs
            plgpu.store(max_ref.at[row, head, entry], page_top, mask=held)
            plgpu.store(sum_ref.at[row, head, entry], page_total, mask=held)
        return top, total, values

    # Statistics have an entry for every page of the table, seen or not.
    first_page: Any = 0
    last_page: Any = width
    if not page_stats:
        last_page = pl.cdiv(end, page_size)
        if window is not None and sink_tokens == 0:
            first_page = jnp.maximum(position - window + 1, 0) // page_size
    nothing = (
        jnp.full(block_g, -jnp.inf, jnp.float32),
        jnp.zeros(block_g, jnp.float32),
        jnp.zeros((block_g, block_v), jnp.float32),
    )
    top, total, values = jax.lax.fori_loop(first_page, last_page, one_page, nothing)

    lse = top + jnp.log(total)  # -inf + log(0) where nothing was visible
    if has_sink:
        sink = plgpu.load(sink_ref.at[head], mask=held, other=0).astype(jnp.float32)
        larger = _finite(jnp.maximum(lse, sink))
        lse = larger + jnp.log(jnp.exp(lse - larger) + jnp.exp(sink - larger))
    out = values * jnp.exp(_finite(top) - _finite(lse))[:, None]
    out_mask = held[:, None] & (v_column < v_head_dim)[None, :]
    plgpu.store(
        out_ref.at[row, head[:, None], v_column[None, :]],
        out.astype(out_ref.dtype),
        mask=out_mask,
    )
    plgpu.store(lse_ref.at[row, head], lse, mask=held)


def _dot(left: Any, right: Any, axis: int) -> Any:
    """Multiply over the last axis of `left` and `axis` of `right`."""
    return jax.lax.dot_general(
        left,
        right.astype(jnp.float32),
        (((1,), (axis,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,  # TF32 otherwise
        preferred_element_type=jnp.float32,
    )


def _block(size: int) -> int:
    """Round up to a power of two that Triton takes."""
    return max(SMALLEST_BLOCK, 1 << (size - 1).bit_length())


def _finite(x: Any) -> Any:
    """Put 0 for -inf: exp(-inf - 0) is the 0 that exp(-inf - -inf), a NaN, stands for."""
    return jnp.where(x == -jnp.inf, 0.0, x)
