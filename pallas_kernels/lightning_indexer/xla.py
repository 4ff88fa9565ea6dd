"""Scores of a lightning indexer in plain XLA: a loop over the blocks of the tables that count."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from kvjax.pallas_kernels.lightning_indexer.rectify import rectified
from kvjax.pallas_kernels.page_walk import flat_pages, gather_heads, padded_tables, scores_of

BLOCK_TOKENS = 512
"""Tokens whose keys are gathered and scored together: they fit a core's cache."""


def lightning_scores_xla(
    q: Float[Array, "G R Hi Di"],
    weights: Float32[Array, "G R Hi"],
    keys: Float[Array, "N P Di"],
    key_scales: Float32[Array, "N P"] | None,
    page_ids: Int32[Array, "G M"],
    page_counts: Int32[Array, "G"],
) -> Float32[Array, "G R S"]:
    """Score the slots of each tile's pages; time follows the pages there are, not their tables.

    Args:
        q: [G, R, Hi, Di], tiles of queries that look at the same pages.
        weights: float32 [G, R, Hi], scaled.
        keys: [N, P, Di].
        key_scales: float32 [N, P], or None.
        page_ids: int32 [G, M], all from 0 to N - 1.
        page_counts: int32 [G], entries of each table that count; what others score is anything.

    Returns:
        float32 [G, R, M * P].
    """
    tiles, rows, heads, dim = q.shape
    size, width = keys.shape[1], page_ids.shape[1]
    pages = max(1, min(BLOCK_TOKENS // size, width))
    tables = padded_tables(page_ids, pages)
    columns = tables.shape[1] // pages
    tables = tables.reshape(tiles * columns, pages)
    start = jnp.arange(columns, dtype=jnp.int32)[None] * pages
    used = (start < page_counts[:, None]).reshape(-1)
    order = jnp.argsort(~used, stable=True).astype(jnp.int32)
    by_tile = q.astype(jnp.float32).reshape(tiles, 1, rows * heads, dim)
    pool = keys[:, None]
    flat = flat_pages(pool)

    def visit(i: Int32[Array, ""], scores: Array) -> Array:
        block = order[i]
        tile = block // columns
        held = gather_heads(pool, tables[block], flat).astype(jnp.float32)
        products = rectified(scores_of(by_tile[tile], held, 1.0, None))
        products = products.reshape(rows, heads, pages * size)
        # A sum, not a product of matrices: slots with equal keys must have equal scores.
        found = jnp.sum(weights[tile][..., None] * products, axis=1)
        if key_scales is not None:
            found *= key_scales.at[tables[block]].get(mode="clip").reshape(1, -1)
        updated: Array = lax.dynamic_update_index_in_dim(scores, found, block, 0)
        return updated

    scores: Array = jnp.zeros((tiles * columns, rows, pages * size), jnp.float32)
    scores = lax.fori_loop(0, used.sum(dtype=jnp.int32), visit, scores)
    scores = scores.reshape(tiles, columns, rows, pages * size).swapaxes(1, 2)
    return scores.reshape(tiles, rows, columns * pages * size)[:, :, : width * size]
