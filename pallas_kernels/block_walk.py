"""Decode attention in XLA over a list of blocks of pages, each a partial softmax, then merged."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from kvjax.pallas_kernels.merge_attention.xla import add_sink, merge_attention_xla
from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_pages import KeyPool, ValuePool
from kvjax.pallas_kernels.page_walk import finite, gather_heads, scores_of, values_of

BLOCK_TOKENS = 256
"""Tokens whose keys are gathered and scored together, of one sequence: they fit a core's cache."""


class Plan(NamedTuple):
    """The blocks to visit, one sequence's after the other's. Layers share it, and XLA sees that.

    Attributes:
        pages: int32 [items, Hkv or 1, pages], what to gather; 1 if all KV heads read the same. Of
            a pool with one KV head any number of lists, each with queries of its own.
        row: int32 [items], whose it is.
        column: int32 [items], which block of its row.
        length: int32 scalar, how many items are real.
    """

    pages: Int32[Array, "items heads pages"]
    row: Int32[Array, " items"]
    column: Int32[Array, " items"]
    length: Int32[Array, ""]


class _Partials(NamedTuple):
    """One partial softmax a block; blocks of sequence b stand at b * J .. (b + 1) * J - 1."""

    out: Float[Array, "blocks Hkv G Dv"]  # not normalised
    top: Float[Array, "blocks Hkv G pages"]  # greatest score in each page of the block
    total: Float[Array, "blocks Hkv G pages"]  # sum of exp(score - top) in it


def attend_blocks(
    q: Float[Array, "B Hq D"],
    k_pages: KeyPool,
    v_pages: ValuePool,
    plan: Plan,
    visible: Callable[[Int32[Array, ""]], Bool[Array, "heads tokens"]],
    *,
    columns: int,
    scale: float,
    soft_cap: float | None,
    sink_logits: Float[Array, "Hq"] | None,
    page_stats: bool,
    value_q: Float[Array, "B Hq Dv"] | None = None,
) -> AttentionOutput:
    """Attend one query a sequence to the blocks of a plan.

    Args:
        q: [B, Hq, D].
        k_pages: [N, Hkv, P, D]; with one head, Hkv elsewhere is the number of a block's lists.
        v_pages: [N, Hkv, P, Dv].
        plan: the blocks; those it leaves out count as hidden.
        visible: from an item to which of its block's tokens count, for each KV head or for all.
        columns: blocks a row, J.
        scale: factor of the scores.
        soft_cap: bound of the scores, or None.
        sink_logits: [Hq] or None.
        page_stats: whether to return page statistics, [B, Hq, J * pages].
        value_q: [B, Hq, Dv], queries that score the values too (MLA; no soft cap then), or None.

    Returns:
        The `AttentionOutput`, T = B.
    """
    batch, query_heads, head_dim = q.shape
    kv_heads = max(k_pages.shape[1], plan.pages.shape[1])
    groups = query_heads // kv_heads
    pages = plan.pages.shape[2] if page_stats else 1
    f32 = jnp.float32
    grouped = q.astype(f32).reshape(batch, kv_heads, groups, head_dim)
    if value_q is not None:
        value_q = value_q.astype(f32).reshape(batch, kv_heads, groups, -1)

    def visit(i: Int32[Array, ""], partials: _Partials) -> _Partials:
        row, column = plan.row[i], plan.column[i]
        seen = visible(i)
        k = gather_heads(k_pages, plan.pages[i]).astype(f32)
        v = gather_heads(v_pages, plan.pages[i]).astype(f32)
        s = scores_of(grouped[row], k, scale, soft_cap)
        if value_q is not None:
            s += scores_of(value_q[row], v, scale, None)
        s = jnp.where(seen[:, None, :], s, -jnp.inf)
        by_page = s.reshape(kv_heads, groups, pages, -1)
        top = by_page.max(axis=3)
        total = jnp.exp(by_page - finite(top)[..., None]).sum(axis=3)
        weights = jnp.exp(s - finite(top.max(axis=2, keepdims=True)))
        # A slot that nobody wrote may hold NaN, and 0 * NaN is NaN.
        v = jnp.where(seen[:, :, None], v, 0.0)
        block = _Partials(out=values_of(weights, v), top=top, total=total)
        at = row * columns + column
        updated: _Partials = jax.tree.map(
            lambda x, new: lax.dynamic_update_index_in_dim(x, new, at, 0), partials, block
        )
        return updated

    shape = (batch * columns, kv_heads, groups)
    partials = _Partials(
        out=jnp.zeros((*shape, v_pages.shape[3]), f32),
        top=jnp.full((*shape, pages), -jnp.inf, f32),
        total=jnp.zeros((*shape, pages), f32),
    )
    partials = lax.fori_loop(0, plan.length, visit, partials)

    def by_row(x: Array) -> Array:
        """[blocks, Hkv, G, last] to [B, J, Hq, last]."""
        return x.reshape(batch, columns, query_heads, -1)

    out, top, total = by_row(partials.out), by_row(partials.top), by_row(partials.total)
    block_top = finite(top.max(axis=3))  # what each block's `out` was scaled by
    mass = (jnp.exp(top - block_top[..., None]) * total).sum(axis=3)
    out = out / jnp.where(mass == 0.0, 1.0, mass)[..., None]
    lse = block_top + jnp.log(mass)
    result = merge_attention_xla(jnp.moveaxis(out, 1, 0), jnp.moveaxis(lse, 1, 0))
    if sink_logits is not None:
        result = add_sink(result, sink_logits)
    result = result._replace(out=result.out.astype(q.dtype))
    if not page_stats:
        return result

    def by_entry(x: Array) -> Array:
        """[B, J, Hq, pages] to [B, Hq, J * pages]."""
        return x.transpose(0, 2, 1, 3).reshape(batch, query_heads, -1)

    return result._replace(page_max=by_entry(top), page_sum=by_entry(total))
