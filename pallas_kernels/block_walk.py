"""Decode attention in XLA over a list of blocks of pages, with a running softmax a sequence."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from kvjax.pallas_kernels.merge_attention.xla import add_sink
from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_pages import KeyPool, ValuePool
from kvjax.pallas_kernels.page_walk import (
    finite,
    flat_pages,
    gather_heads,
    scores_of,
    values_of,
)

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


class _Running(NamedTuple):
    """What the blocks so far made of each row; page statistics are of blocks b * J .. of row b."""

    out: Float[Array, "B Hkv G Dv"]  # sum of exp(score - top) * value
    top: Float[Array, "B Hkv G"]  # greatest score
    total: Float[Array, "B Hkv G"]  # sum of exp(score - top)
    page_max: Float[Array, "blocks Hkv G pages"] | None
    page_sum: Float[Array, "blocks Hkv G pages"] | None


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
    pages = plan.pages.shape[2]
    f32 = jnp.float32
    grouped = q.astype(f32).reshape(batch, kv_heads, groups, head_dim)
    if value_q is not None:
        value_q = value_q.astype(f32).reshape(batch, kv_heads, groups, -1)

    k_flat, v_flat = flat_pages(k_pages), flat_pages(v_pages)

    def visit(i: Int32[Array, ""], running: _Running) -> _Running:
        row, column = plan.row[i], plan.column[i]
        seen = visible(i)
        k = gather_heads(k_pages, plan.pages[i], k_flat).astype(f32)
        v = gather_heads(v_pages, plan.pages[i], v_flat).astype(f32)
        # A slot that nobody wrote may hold NaN, and 0 * NaN is NaN.
        v = jnp.where(seen[:, :, None], v, 0.0)
        s = scores_of(grouped[row], k, scale, soft_cap)
        if value_q is not None:
            s += scores_of(value_q[row], v, scale, None)
        s = jnp.where(seen[:, None, :], s, -jnp.inf)
        top = jnp.maximum(running.top[row], s.max(axis=2))
        weights = jnp.exp(s - finite(top)[..., None])
        fade = jnp.exp(running.top[row] - finite(top))
        rows = {
            "out": running.out[row] * fade[..., None] + values_of(weights, v),
            "top": top,
            "total": running.total[row] * fade + weights.sum(axis=2),
        }
        blocks = {}
        if page_stats:
            by_page = s.reshape(kv_heads, groups, pages, -1)
            best = by_page.max(axis=3)
            blocks["page_max"] = best
            blocks["page_sum"] = jnp.exp(by_page - finite(best)[..., None]).sum(axis=3)
        updated = [
            (name, lax.dynamic_update_index_in_dim(getattr(running, name), new, at, 0))
            for at, made in ((row, rows), (row * columns + column, blocks))
            for name, new in made.items()
        ]
        return running._replace(**dict(updated))

    heads = (kv_heads, groups)
    by_block = (batch * columns, *heads, pages)
    running = _Running(
        out=jnp.zeros((batch, *heads, v_pages.shape[3]), f32),
        top=jnp.full((batch, *heads), -jnp.inf, f32),
        total=jnp.zeros((batch, *heads), f32),
        page_max=jnp.full(by_block, -jnp.inf, f32) if page_stats else None,
        page_sum=jnp.zeros(by_block, f32) if page_stats else None,
    )
    running = lax.fori_loop(0, plan.length, visit, running)
    out = running.out / jnp.where(running.total == 0.0, 1.0, running.total)[..., None]
    result = AttentionOutput(
        out=out.reshape(batch, query_heads, -1),
        lse=(finite(running.top) + jnp.log(running.total)).reshape(batch, query_heads),
    )
    if sink_logits is not None:
        result = add_sink(result, sink_logits)
    result = result._replace(out=result.out.astype(q.dtype))
    if running.page_max is None or running.page_sum is None:
        return result

    def by_entry(x: Float[Array, "blocks Hkv G pages"]) -> Float[Array, "B Hq entries"]:
        x = x.reshape(batch, columns, query_heads, pages)
        return x.transpose(0, 2, 1, 3).reshape(batch, query_heads, -1)

    return result._replace(page_max=by_entry(running.page_max), page_sum=by_entry(running.page_sum))
