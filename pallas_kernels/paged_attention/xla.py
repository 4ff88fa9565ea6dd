"""Paged decode attention in plain XLA: a loop over blocks of pages, no more than are needed.

The blocks that some sequence needs are listed one sequence after the other, so that a batch of
unequal lengths costs the sum of its lengths, and the loop's trip count follows the lengths, not the
width of the block tables. A sequence's blocks fold into a running softmax, as in FlashAttention
(arXiv:2205.14135, section 3.1): what they leave behind is one output a sequence, not one a block.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kvjax.pallas_kernels.block_walk import BLOCK_TOKENS, Plan, attend_blocks
from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_pages import KeyPool, ValuePool
from kvjax.pallas_kernels.page_walk import block_span, padded_tables


def paged_attention_xla(
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
        value_q: [B, Hq, Dv], queries that score the values too (MLA; no soft cap then), or None.

    Returns:
        The `AttentionOutput`, T = B.
    """
    page_size = k_pages.shape[2]
    width = block_tables.shape[1]
    pages = max(1, min(BLOCK_TOKENS // page_size, width))  # pages a block
    plan = _make_plan(block_tables, lengths, query_positions, window, sink_tokens, pages, page_size)
    offsets = jnp.arange(pages * page_size, dtype=jnp.int32)

    def visible(i: Int32[Array, ""]) -> Bool[Array, "1 tokens"]:
        slot = plan.column[i] * (pages * page_size) + offsets
        position = query_positions[plan.row[i]]
        seen = (slot < lengths[plan.row[i]]) & (slot <= position)
        if window is not None:
            seen &= (slot > position - window) | (slot < sink_tokens)
        return seen[None]

    result = attend_blocks(
        q,
        k_pages,
        v_pages,
        plan,
        visible,
        columns=-(-width // pages),
        scale=scale,
        soft_cap=soft_cap,
        sink_logits=sink_logits,
        page_stats=page_stats,
        value_q=value_q,
    )
    if result.page_max is None or result.page_sum is None:
        return result
    return result._replace(
        page_max=result.page_max[:, :, :width], page_sum=result.page_sum[:, :, :width]
    )


def _make_plan(
    block_tables: Int32[Array, "B M"],
    lengths: Int32[Array, "B"],
    query_positions: Int32[Array, "B"],
    window: int | None,
    sink_tokens: int,
    pages: int,
    page_size: int,
) -> Plan:
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
    return Plan(pages=names[:, None], row=row, column=column, length=ends[-1])
