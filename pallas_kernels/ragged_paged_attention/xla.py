"""Ragged paged attention in plain XLA: blocks of queries, each over its sequences' blocks of pages.

A block of consecutive rows of q may hold queries of several sequences. Each of them is walked once
for the whole block, from the oldest visible page to the newest, with a running softmax
(FlashAttention, arXiv:2205.14135, algorithm 1); rows of other sequences keep what they have.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_pages import KeyPool, ValuePool
from kvjax.pallas_kernels.page_walk import (
    block_span,
    finite,
    flat_pages,
    gather_heads,
    padded_tables,
    scores_of,
    values_of,
)
from kvjax.pallas_kernels.residual import encoded_before

QUERY_BLOCK = 128
"""Rows of q that walk the pages together."""

BLOCK_TOKENS = 256
"""Tokens whose keys are gathered and scored together."""


class _Running(NamedTuple):
    """The running softmax of one block of queries."""

    out: Float[Array, "Hkv rows Dv"]  # rows are query-major: query * G + group member
    top: Float[Array, "Hkv rows"]
    total: Float[Array, "Hkv rows"]
    page_max: Float[Array, "Hkv rows columns"] | None
    page_sum: Float[Array, "Hkv rows columns"] | None


def ragged_paged_attention_xla(
    q: Float[Array, "T Hq Dq"],
    k_pages: KeyPool,
    v_pages: ValuePool,
    block_tables: Int32[Array, "B M"],
    kv_lengths: Int32[Array, "B"],
    cu_q_lengths: Int32[Array, "B+1"],
    *,
    scale: float,
    window: int | None,
    sink_tokens: int,
    sink_logits: Float[Array, "Hq"] | None,
    soft_cap: float | None,
    page_stats: bool,
    residual: int | None = None,
    value_q: Float[Array, "T Hq Dv"] | None = None,
    expand: Callable[[Array, Array], tuple[Array, Array]] | None = None,
    query_block: int = QUERY_BLOCK,
) -> AttentionOutput:
    """Attend a ragged batch to its pages; the contract is that of `ragged_paged_attention`.

    Args:
        q: [T, Hq, Dq], as wide as the keys that it scores.
        k_pages: [N, Hkv, P, D].
        v_pages: [N, Hkv, P, Dv].
        block_tables: int32 [B, M].
        kv_lengths: int32 [B], tokens, the queries' own included.
        cu_q_lengths: int32 [B + 1].
        scale: factor of the scores.
        window: tokens a query sees, itself included, or None.
        sink_tokens: first tokens that stay visible outside the window.
        sink_logits: [Hq] or None.
        soft_cap: bound of the scores, or None.
        page_stats: whether to return page statistics.
        residual: newest tokens that a query does not see here, or None.
        value_q: [T, Hq, Dv], queries that score the values too (MLA; no soft cap then), or None.
        expand: makes every query head's keys [S, Hq, D] and values [S, Hq, Dv] of a block's rows of
            `v_pages` and of `k_pages`, which have one head (MLA), or None.
        query_block: rows of q that walk the pages together.

    Returns:
        The `AttentionOutput`, T = q.shape[0].
    """
    _, kv_heads, page_size, _ = k_pages.shape
    count, query_heads, _ = q.shape
    value_dim = v_pages.shape[3]
    if expand is not None:
        kv_heads = query_heads
        one = (jax.ShapeDtypeStruct((1, x.shape[3]), jnp.float32) for x in (v_pages, k_pages))
        value_dim = jax.eval_shape(expand, *one)[1].shape[2]
    batch, width = block_tables.shape
    groups = query_heads // kv_heads
    f32 = jnp.float32

    block = min(query_block, count)
    blocks = -(-count // block)
    pages = max(1, min(BLOCK_TOKENS // page_size, width))
    tables = padded_tables(block_tables, pages)
    columns = tables.shape[1]
    tokens = pages * page_size
    rows = block * groups

    # Rows beyond the batch are sequence `batch`: no loop visits it.
    row = jnp.arange(blocks * block, dtype=jnp.int32)
    sequence = jnp.sum(row[:, None] >= cu_q_lengths[1:][None, :], axis=1, dtype=jnp.int32)
    known = jnp.minimum(sequence, batch - 1)
    position = kv_lengths[known] - cu_q_lengths[1:][known] + row  # from the end of the sequence
    last = position if residual is None else encoded_before(position, residual, page_size) - 1

    def by_block(q: Float[Array, "T Hq _"]) -> Float[Array, "blocks Hkv rows _"]:
        padded = jnp.pad(q.astype(f32), ((0, blocks * block - count), (0, 0), (0, 0)))
        padded = padded.reshape(blocks, block, kv_heads, groups, -1)
        return padded.transpose(0, 2, 1, 3, 4).reshape(blocks, kv_heads, rows, -1)

    k_flat, v_flat = flat_pages(k_pages), flat_pages(v_pages)

    def attend_block(
        inputs: tuple[Array, Array | None, Array, Array, Array],
    ) -> AttentionOutput:
        queries, value_queries, owner, place, end = inputs
        owners = jnp.repeat(owner, groups, total_repeat_length=rows)
        places = jnp.repeat(place, groups, total_repeat_length=rows)
        ends = jnp.repeat(end, groups, total_repeat_length=rows)

        def walk_sequence(b: Int32[Array, ""], running: _Running) -> _Running:
            oldest = jnp.min(jnp.where(owner == b, place, jnp.iinfo(jnp.int32).max))
            newest = jnp.max(jnp.where(owner == b, end, -1))
            mine = owners == b
            sinks, first, last = block_span(newest + 1, oldest, window, sink_tokens, tokens)
            table = lax.dynamic_index_in_dim(tables, b, keepdims=False)

            def visit(i: Int32[Array, ""], running: _Running) -> _Running:
                column = jnp.where(i < sinks, i, i - sinks + first)
                names = lax.dynamic_slice(table, (column * pages,), (pages,))
                slot = column * tokens + jnp.arange(tokens, dtype=jnp.int32)
                visible = mine[:, None] & (slot[None, :] <= ends[:, None])
                held = slot <= newest
                if window is not None:
                    near = slot[None, :] > places[:, None] - window
                    visible &= near | (slot < sink_tokens)[None, :]
                    held &= (slot > oldest - window) | (slot < sink_tokens)
                k = gather_heads(k_pages, names, k_flat).astype(f32)
                v = gather_heads(v_pages, names, v_flat).astype(f32)
                # A slot that no row here may see can hold NaN, and 0 * NaN is NaN.
                v = jnp.where(held[None, :, None], v, 0.0)
                if expand is not None:
                    k, v = (x.swapaxes(0, 1).astype(f32) for x in expand(v[0], k[0]))
                s = scores_of(queries, k, scale, soft_cap)
                if value_queries is not None:
                    s += scores_of(value_queries, v, scale, None)
                s = jnp.where(visible[None], s, -jnp.inf)
                return _update(running, mine, s, v, column * pages, pages if page_stats else 0)

            running = lax.fori_loop(0, sinks + (last - first), visit, running)
            return running

        shape = (kv_heads, rows)
        stats = (kv_heads, rows, columns)
        running = _Running(
            out=jnp.zeros((*shape, value_dim), f32),
            top=jnp.full(shape, -jnp.inf, f32),
            total=jnp.zeros(shape, f32),
            page_max=jnp.full(stats, -jnp.inf, f32) if page_stats else None,
            page_sum=jnp.zeros(stats, f32) if page_stats else None,
        )
        after = jnp.minimum(jnp.max(owner) + 1, batch)
        running = lax.fori_loop(jnp.min(owner), after, walk_sequence, running)
        return _finish(running, sink_logits, owners < batch)

    done = lax.map(
        attend_block,
        (
            by_block(q),
            None if value_q is None else by_block(value_q),
            *(x.reshape(blocks, block) for x in (sequence, position, last)),
        ),
    )

    def by_query(x: Array) -> Array:
        """[blocks, Hkv, rows, ...] to [T, Hq, ...]."""
        rest = x.shape[3:]
        x = x.reshape(blocks, kv_heads, block, groups, *rest)
        x = jnp.moveaxis(x, 1, 2).reshape(blocks * block, query_heads, *rest)
        return x[:count]

    return AttentionOutput(
        out=by_query(done.out).astype(q.dtype),
        lse=by_query(done.lse),
        page_max=None if done.page_max is None else by_query(done.page_max)[:, :, :width],
        page_sum=None if done.page_sum is None else by_query(done.page_sum)[:, :, :width],
    )


def _update(
    running: _Running,
    mine: Bool[Array, " rows"],
    s: Float[Array, "Hkv rows tokens"],
    v: Float[Array, "Hkv tokens Dv"],
    column: Int32[Array, ""],
    pages: int,
) -> _Running:
    """Take one block of a sequence's scores and values into the rows that are `mine`.

    The others keep what they have: their weights are 0, but a value may be NaN, and so 0 * value.
    `pages` > 0 keeps statistics of so many pages.
    """
    top = jnp.maximum(running.top, s.max(axis=2))
    safe = finite(top)
    weights = jnp.exp(s - safe[..., None])
    shrink = jnp.exp(running.top - safe)
    own = mine[None, :, None]
    out = running.out * shrink[..., None] + values_of(weights, v)
    page_max, page_sum = running.page_max, running.page_sum
    if page_max is not None and page_sum is not None:
        heads, rows, _ = s.shape
        by_page = s.reshape(heads, rows, pages, -1)
        best = by_page.max(axis=3)
        mass = jnp.exp(by_page - finite(best)[..., None]).sum(axis=3)
        at = (0, 0, column)
        old = (
            lax.dynamic_slice(page_max, at, best.shape),
            lax.dynamic_slice(page_sum, at, mass.shape),
        )
        page_max = lax.dynamic_update_slice(page_max, jnp.where(own, best, old[0]), at)
        page_sum = lax.dynamic_update_slice(page_sum, jnp.where(own, mass, old[1]), at)
    return _Running(
        out=jnp.where(own, out, running.out),
        top=top,
        total=running.total * shrink + weights.sum(axis=2),
        page_max=page_max,
        page_sum=page_sum,
    )


def _finish(
    running: _Running,
    sink_logits: Float[Array, "Hq"] | None,
    real: Array,
) -> AttentionOutput:
    """Normalise; heads and rows stay as the walk has them, [Hkv, rows, ...]."""
    top, total = running.top, running.total
    if sink_logits is not None:
        heads, rows = top.shape
        per_head = sink_logits.astype(jnp.float32).reshape(heads, -1)
        sink = jnp.tile(per_head, (1, rows // per_head.shape[1]))
        sink = jnp.where(real[None, :], sink, -jnp.inf)  # padding has no sink either
        higher = jnp.maximum(top, sink)
        total = total * jnp.exp(top - finite(higher)) + jnp.exp(sink - finite(higher))
        out = running.out * jnp.exp(top - finite(higher))[..., None]
        top = higher
    else:
        out = running.out
    out = out / jnp.where(total > 0, total, 1.0)[..., None]
    return AttentionOutput(
        out=out,
        lse=finite(top) + jnp.log(total),
        page_max=running.page_max,
        page_sum=running.page_sum,
    )
