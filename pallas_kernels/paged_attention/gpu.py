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
from kvjax.pallas_kernels.packed_pages import KeyPool, ValuePool
from kvjax.pallas_kernels.triton_walk import Refs, Scoring, walk_pages


def paged_attention_gpu(
    q: Float[Array, "B Hq D"],
    k_pages: KeyPool,
    v_pages: ValuePool,
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
    value_q: Float[Array, "B Hq Dv"] | None = None,
    interpret: bool = False,
) -> AttentionOutput:
    """Attend one query a sequence to its pages; the contract is that of `paged_attention`.

    One program a (sequence, KV head) walks the table page by page.

    Args:
        q: [B, Hq, D].
        k_pages: [N, Hkv, P, D], plain or packed.
        v_pages: [N, Hkv, P, Dv], likewise.
        block_tables: int32 [B, M].
        lengths: int32 [B], tokens.
        scale: factor of the scores.
        window: tokens a query sees, itself included, or None.
        sink_tokens: first tokens that stay visible outside the window.
        sink_logits: [Hq] or None.
        soft_cap: bound of the scores, or None.
        query_positions: int32 [B], the position of each query.
        page_stats: whether to return page statistics.
        value_q: [B, Hq, Dv], queries that score the values too (MLA; no soft cap then), or None.
        interpret: whether to run the kernel in Pallas' interpreter, on any platform.

    Returns:
        The `AttentionOutput`, T = B.
    """
    batch, query_heads, _ = q.shape
    kv_heads, _, v_head_dim = v_pages.shape[1:]
    width = block_tables.shape[1]
    kernel = functools.partial(
        _kernel,
        scoring=Scoring(scale, soft_cap, has_sink=sink_logits is not None),
        window=window,
        sink_tokens=sink_tokens,
        scored_values=value_q is not None,
    )
    if sink_logits is None:
        sink_logits = jnp.zeros(query_heads, jnp.float32)
    shapes = [
        jax.ShapeDtypeStruct((batch, query_heads, v_head_dim), q.dtype),
        jax.ShapeDtypeStruct((batch, query_heads), jnp.float32),
    ]
    arrays = [q, k_pages, v_pages, block_tables, lengths, query_positions, sink_logits]
    if value_q is not None:
        arrays.append(value_q)
    if page_stats:
        shapes += [jax.ShapeDtypeStruct((batch, query_heads, width), jnp.float32)] * 2
    result = pl.pallas_call(
        kernel,
        grid=(batch, kv_heads),
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_attention",
    )(*arrays)
    return AttentionOutput(*result)


def _kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    table_ref: Any,
    length_ref: Any,
    position_ref: Any,
    sink_ref: Any,
    *refs: Any,
    scoring: Scoring,
    window: int | None,
    sink_tokens: int,
    scored_values: bool,
) -> None:
    value_q = refs[0] if scored_values else None
    out_ref, lse_ref, *stats_refs = refs[scored_values:]
    row, kv_head = pl.program_id(0), pl.program_id(1)
    page_size = k_ref.shape[2]
    length, position = length_ref[row], position_ref[row]
    end = jnp.minimum(length, position + 1)

    def page_of(entry: Any) -> Any:
        return plgpu.load(table_ref.at[row, entry])

    def visible_of(entry: Any, offset: Any) -> Any:
        slot = entry * page_size + offset
        visible = slot < end
        if window is not None:
            visible &= (slot > position - window) | (slot < sink_tokens)
        return visible

    # Statistics have an entry for every page of the table, seen or not.
    first_page: Any = 0
    end_page: Any = table_ref.shape[1]
    if not stats_refs:
        end_page = pl.cdiv(end, page_size)
        if window is not None and sink_tokens == 0:
            first_page = jnp.maximum(position - window + 1, 0) // page_size
    read = Refs(q_ref, k_ref, v_ref, sink_ref, out_ref, lse_ref, *stats_refs)
    read = read._replace(value_q=value_q)
    walk_pages(read, scoring, row, kv_head, page_of, visible_of, first_page, end_page)
