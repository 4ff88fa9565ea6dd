"""Paged decode attention in plain XLA: a loop over blocks of pages, no more than are needed.

The blocks that some sequence needs are listed one sequence after the other, so that a batch of
unequal lengths costs the sum of its lengths, and the loop's trip count follows the lengths, not the
width of the block tables. Each block leaves a partial softmax; they are merged at the end (the
split-KV decoding of FlashAttention, with its log-sum-exp merge, arXiv:2205.14135, section 3.1).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.page_walk import (
    block_span,
    finite,
    gather_heads,
    padded_tables,
    scores_of,
    values_of,
)

BLOCK_TOKENS = 256
"""Tokens whose keys are gathered and scored together, of one sequence: they fit a core's cache."""


class _Plan(NamedTuple):
    """The blocks to visit, one sequence's after the other's. Layers share it, and XLA sees that."""

    pages: Int32[Array, "items pages"]  # what to gather
    row: Int32[Array, " items"]  # whose it is
    column: Int32[Array, " items"]  # which block of its table
    length: Int32[Array, ""]  # how many items are real


class _Partials(NamedTuple):
    """One partial softmax a block; blocks of sequence b stand at b * J .. (b + 1) * J - 1."""

    out: Float[Array, "blocks Hkv G Dv"]  # not normalised
    top: Float[Array, "blocks Hkv G pages"]  # greatest score in each page of the block
    total: Float[Array, "blocks Hkv G pages"]  # sum of exp(score - top) in it


def paged_attention_xla(
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
) -> AttentionOutput:
    """Attend one query a sequence to its pages; the contract is that of `paged_attention`.

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

    Returns:
        The `AttentionOutput`, T = B.
    """
    _, kv_heads, page_size, head_dim = k_pages.shape
    batch, query_heads, _ = q.shape
    width = block_tables.shape[1]
    groups = query_heads // kv_heads
    f32 = jnp.float32

    pages = max(1, min(BLOCK_TOKENS // page_size, width))  # pages a block
    plan = _make_plan(block_tables, lengths, query_positions, window, sink_tokens, pages, page_size)
    columns = -(-width // pages)  # J, blocks a table
    grouped = q.astype(f32).reshape(batch, kv_heads, groups, head_dim)
    offsets = jnp.arange(pages * page_size, dtype=jnp.int32)

    def visit(i: Int32[Array, ""], partials: _Partials) -> _Partials:
        row, column = plan.row[i], plan.column[i]
        slot = column * (pages * page_size) + offsets
        position = query_positions[row]
        visible = (slot < lengths[row]) & (slot <= position)
        if window is not None:
            visible &= (slot > position - window) | (slot < sink_tokens)
        k = gather_heads(k_pages, plan.pages[i]).astype(f32)
        v = gather_heads(v_pages, plan.pages[i]).astype(f32)
        s = scores_of(grouped[row], k, scale, soft_cap)
        s = jnp.where(visible[None, None, :], s, -jnp.inf)
        by_page = s.reshape(kv_heads, groups, pages if page_stats else 1, -1)
        top = by_page.max(axis=3)
        total = jnp.exp(by_page - finite(top)[..., None]).sum(axis=3)
        weights = jnp.exp(s - finite(top.max(axis=2, keepdims=True)))
        # A slot that nobody wrote may hold NaN, and 0 * NaN is NaN.
        v = jnp.where(visible[None, :, None], v, 0.0)
        block = _Partials(out=values_of(weights, v), top=top, total=total)
        at = row * columns + column
        updated: _Partials = jax.tree.map(
            lambda x, new: lax.dynamic_update_index_in_dim(x, new, at, 0), partials, block
        )
        return updated

    shape = (batch * columns, kv_heads, groups)
    per_block = pages if page_stats else 1
    partials = _Partials(
        out=jnp.zeros((*shape, v_pages.shape[3]), f32),
        top=jnp.full((*shape, per_block), -jnp.inf, f32),
        total=jnp.zeros((*shape, per_block), f32),
    )
    partials = lax.fori_loop(0, plan.length, visit, partials)
    return _merge(partials, q, width, columns, sink_logits, page_stats)


def _make_plan(
    block_tables: Int32[Array, "B M"],
    lengths: Int32[Array, "B"],
    query_positions: Int32[Array, "B"],
    window: int | None,
    sink_tokens: int,
    pages: int,
    page_size: int,
) -> _Plan:
    """List the blocks to visit: a sequence's sinks, then from its window's start to its end."""
    tables = padded_tables(block_tables, pages)
    batch = tables.shape[0]
    columns = tables.shape[1] // pages
    sinks, first, last = block_span(
        lengths, query_positions, window, sink_tokens, pages * page_size
    )
    count = sinks + (last - first)
    ends = jnp.cumsum(count, dtype=jnp.int32)
    item = jnp.arange(batch * columns, dtype=jnp.int32)
    row = jnp.sum(item[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, batch - 1)  # of items past the last: never visited
    index = item - (ends[row] - count[row])
    column = jnp.where(index < sinks[row], index, index - sinks[row] + first[row])
    column = jnp.clip(column, 0, columns - 1)
    names = tables.reshape(batch * columns, pages)[row * columns + column]
    return _Plan(pages=names, row=row, column=column, length=ends[-1])


def _merge(
    partials: _Partials,
    q: Float[Array, "B Hq D"],
    width: int,
    columns: int,
    sink_logits: Float[Array, "Hq"] | None,
    page_stats: bool,
) -> AttentionOutput:
    batch, query_heads, _ = q.shape
    f32 = jnp.float32
    lead = (batch, columns)
    out = partials.out.reshape(*lead, query_heads, -1)
    top = partials.top.reshape(*lead, query_heads, -1)
    total = partials.total.reshape(*lead, query_heads, -1)
    block_top = top.max(axis=3)  # what each block's `out` was scaled by
    highest = block_top.max(axis=1)
    if sink_logits is not None:
        sink = jnp.broadcast_to(sink_logits.astype(f32)[None, :], highest.shape)
        highest = jnp.maximum(highest, sink)
    safe = finite(highest)
    mass = (jnp.exp(top - safe[:, None, :, None]) * total).sum(axis=(1, 3))
    if sink_logits is not None:
        mass = mass + jnp.exp(sink - safe)
    value = (out * jnp.exp(block_top - safe[:, None])[..., None]).sum(axis=1)
    value = value / jnp.where(mass > 0, mass, 1.0)[..., None]
    page_max = page_sum = None
    if page_stats:

        def by_table(x: Array) -> Array:
            return x.transpose(0, 2, 1, 3).reshape(batch, query_heads, -1)[:, :, :width]

        page_max, page_sum = by_table(top), by_table(total)
    return AttentionOutput(
        out=value.astype(q.dtype),
        lse=safe + jnp.log(mass),  # log 0 is the -inf that no visible key means
        page_max=page_max,
        page_sum=page_sum,
    )
