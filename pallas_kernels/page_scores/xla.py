"""Scores of pages in plain XLA: a loop over the blocks of the tables that hold pages."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from kvjax.pallas_kernels.page_scores.parts import products
from kvjax.pallas_kernels.page_walk import gather_heads, padded_tables, scores_of

BLOCK_PAGES = 128
"""Pages whose representatives are gathered and scored together: they fit a core's cache."""


def page_scores_xla(
    q: Float32[Array, "B Hq D"],
    representatives: tuple[Float[Array, "N Hkv D"], ...],
    page_ids: Int32[Array, "B M"],
    page_counts: Int32[Array, "B"],
) -> Float32[Array, "B Hq M"]:
    """Score pages for every query head; time follows the pages there are, not the tables' width.

    Args:
        q: float32 [B, Hq, D], scaled.
        representatives: `(mean,)` or `(low, high)`, each [N, Hkv, D].
        page_ids: int32 [B, M], all from 0 to N - 1.
        page_counts: int32 [B], entries of each row that exist; the others' scores are anything.

    Returns:
        float32 [B, Hq, M].
    """
    batch, query_heads, dim = q.shape
    kv_heads = representatives[0].shape[1]
    width = page_ids.shape[1]
    pages = min(BLOCK_PAGES, width)
    tables = padded_tables(page_ids, pages)
    columns = tables.shape[1] // pages
    tables = tables.reshape(batch * columns, pages)
    start = jnp.arange(columns, dtype=jnp.int32)[None] * pages
    used = (start < page_counts[:, None]).reshape(-1)
    order = jnp.argsort(~used, stable=True).astype(jnp.int32)
    pairs = [
        (part.reshape(batch, kv_heads, query_heads // kv_heads, dim), rows[:, :, None])
        for part, rows in products(q, representatives)
    ]

    def rows_of(pool: Array, block: Int32[Array, ""]) -> Array:
        return gather_heads(pool, tables[block]).astype(jnp.float32)

    def visit(i: Int32[Array, ""], scores: Array) -> Array:
        block = order[i]
        found = [
            scores_of(part[block // columns], rows_of(rows, block), 1.0, None)
            for part, rows in pairs
        ]
        scores = lax.dynamic_update_index_in_dim(scores, sum(found[1:], found[0]), block, 0)
        return scores

    scores: Array = jnp.zeros(
        (batch * columns, kv_heads, query_heads // kv_heads, pages), jnp.float32
    )
    scores = lax.fori_loop(0, used.sum(dtype=jnp.int32), visit, scores)
    scores = scores.reshape(batch, columns, query_heads, pages).swapaxes(1, 2)
    scores = scores.reshape(batch, query_heads, columns * pages)[:, :, :width]
    return scores
