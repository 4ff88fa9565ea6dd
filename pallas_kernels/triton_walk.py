"""Decode attention of one KV head over its pages, inside a Pallas Triton program."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from kvjax.pallas_kernels.packed_pages import PackedPages
from kvjax.pallas_kernels.triton_codes import load_elements

# A Triton block is a power of two along every axis and a matrix product takes at least 16.
SMALLEST_BLOCK = 16
# Keys and values of one step stay in registers as float32: at most this many elements of each.
LARGEST_TILE = 64 * 128


class Refs(NamedTuple):
    """Inputs and outputs of a program.

    Attributes:
        q: [B, Hq, D].
        k_pages: [N, Hkv, P, D], or packed.
        v_pages: [N, Hkv, P, Dv], likewise.
        sink_logits: [Hq], read only if there are sinks.
        out: [B, Hq, Dv].
        lse: [B, Hq].
        page_max: [B, Hq, M], or None for no statistics.
        page_sum: [B, Hq, M], or None for no statistics.
        value_q: [B, Hq, Dv], queries that score the values too (MLA; no soft cap then), or None.
    """

    q: Any
    k_pages: Any
    v_pages: Any
    sink_logits: Any
    out: Any
    lse: Any
    page_max: Any = None
    page_sum: Any = None
    value_q: Any = None


class Scoring(NamedTuple):
    """Static options.

    Attributes:
        scale: factor of the scores.
        soft_cap: bound of the scores, or None.
        has_sink: whether a sink joins the softmax.
    """

    scale: float
    soft_cap: float | None
    has_sink: bool


def walk_pages(
    refs: Refs,
    scoring: Scoring,
    row: Any,
    kv_head: Any,
    page_of: Callable[[Any], Any],
    visible_of: Callable[[Any, Any], Any],
    first_entry: Any,
    end_entry: Any,
) -> None:
    """Attend all query heads of one KV head to the pages of some entries, with a running softmax.

    Products are IEEE float32, not TF32: correct before fast (FlashAttention-2, arXiv:2307.08691,
    section 3.1).

    Args:
        refs: inputs and outputs.
        scoring: the options.
        row: which sequence.
        kv_head: which KV head.
        page_of: from an entry to its page id.
        visible_of: from an entry and offsets within its page, int32 [n], to whether each is seen.
        first_entry: of the entries to walk.
        end_entry: one past the last.
    """
    _, kv_heads, page_size, head_dim = refs.k_pages.shape
    group, v_head_dim = refs.q.shape[1] // kv_heads, refs.v_pages.shape[3]
    block_g, block_d, block_v = (
        padded_block(group),
        padded_block(head_dim),
        padded_block(v_head_dim),
    )
    block_p = min(padded_block(page_size), padded_block(LARGEST_TILE // max(block_d, block_v)))

    member = jnp.arange(block_g, dtype=jnp.int32)
    head = kv_head * group + member
    held = member < group
    column = jnp.arange(block_d, dtype=jnp.int32)
    v_column = jnp.arange(block_v, dtype=jnp.int32)

    def load_queries(queries: Any, columns: Any) -> Any:
        mask = held[:, None] & (columns < queries.shape[2])[None, :]
        q = plgpu.load(queries.at[row, head[:, None], columns[None, :]], mask=mask, other=0)
        return q.astype(jnp.float32) * scoring.scale

    q = load_queries(refs.q, column)
    value_q = None if refs.value_q is None else load_queries(refs.value_q, v_column)

    def load(pages: Any, page: Any, offset: Any, columns: Any, visible: Any) -> Any:
        """Read some slots of a page; hidden ones may lie outside the pool or hold NaN: 0."""
        mask = visible[:, None] & (columns < pages.shape[3])[None, :]
        if isinstance(pages, PackedPages):
            return load_elements(pages, page, kv_head, offset, columns, mask)
        return plgpu.load(
            pages.at[page, kv_head, offset[:, None], columns[None, :]], mask=mask, other=0
        )

    def one_page(entry: Any, carry: Any) -> Any:
        top, total, values = carry
        page = page_of(entry)
        page_top = jnp.full(block_g, -jnp.inf, jnp.float32)
        page_total = jnp.zeros(block_g, jnp.float32)
        for part in range(0, page_size, block_p):
            offset = part + jnp.arange(block_p, dtype=jnp.int32)
            # A block may be wider than what is left of its page.
            visible = (offset < page_size) & visible_of(entry, offset)
            scores = product(q, load(refs.k_pages, page, offset, column, visible), 1)
            if scoring.soft_cap is not None:
                scores = scoring.soft_cap * jnp.tanh(scores / scoring.soft_cap)
            v = load(refs.v_pages, page, offset, v_column, visible)
            if value_q is not None:
                scores += product(value_q, v, 1)
            scores = jnp.where(visible[None, :], scores, -jnp.inf)
            part_top = scores.max(axis=1)
            new_top = jnp.maximum(top, part_top)
            weights = jnp.exp(scores - _finite(new_top)[:, None])
            fade = jnp.exp(top - _finite(new_top))
            total = total * fade + weights.sum(axis=1)
            values = values * fade[:, None] + product(weights, v, 0)
            top = new_top
            if refs.page_max is not None:
                new_page_top = jnp.maximum(page_top, part_top)
                page_total = page_total * jnp.exp(page_top - _finite(new_page_top))
                page_total += jnp.exp(scores - _finite(new_page_top)[:, None]).sum(axis=1)
                page_top = new_page_top
        if refs.page_max is not None:
            plgpu.store(refs.page_max.at[row, head, entry], page_top, mask=held)
            plgpu.store(refs.page_sum.at[row, head, entry], page_total, mask=held)
        return top, total, values

    nothing = (
        jnp.full(block_g, -jnp.inf, jnp.float32),
        jnp.zeros(block_g, jnp.float32),
        jnp.zeros((block_g, block_v), jnp.float32),
    )
    top, total, values = jax.lax.fori_loop(first_entry, end_entry, one_page, nothing)

    lse = top + jnp.log(total)  # -inf + log(0) where nothing was visible
    if scoring.has_sink:
        sink = plgpu.load(refs.sink_logits.at[head], mask=held, other=0).astype(jnp.float32)
        larger = _finite(jnp.maximum(lse, sink))
        lse = larger + jnp.log(jnp.exp(lse - larger) + jnp.exp(sink - larger))
    out = values * jnp.exp(_finite(top) - _finite(lse))[:, None]
    plgpu.store(
        refs.out.at[row, head[:, None], v_column[None, :]],
        out.astype(refs.out.dtype),
        mask=held[:, None] & (v_column < v_head_dim)[None, :],
    )
    plgpu.store(refs.lse.at[row, head], lse, mask=held)


def product(left: Any, right: Any, axis: int) -> Any:
    """Multiply over the last axis of `left` and `axis` of `right`, in float32."""
    return jax.lax.dot_general(
        left,
        right.astype(jnp.float32),
        (((1,), (axis,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,  # TF32 otherwise
        preferred_element_type=jnp.float32,
    )


def padded_block(size: int) -> int:
    """Round up to a power of two that Triton takes."""
    return max(SMALLEST_BLOCK, 1 << (size - 1).bit_length())


def _finite(x: Any) -> Any:
    """Put 0 for -inf: exp(-inf - 0) is the 0 that exp(-inf - -inf), a NaN, stands for."""
    return jnp.where(x == -jnp.inf, 0.0, x)
