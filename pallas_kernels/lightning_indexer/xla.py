"""Scores of a lightning indexer in plain XLA: a loop over the blocks of the tables that count."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt8

from kvjax.pallas_kernels.lightning_indexer.float4 import float4_page
from kvjax.pallas_kernels.lightning_indexer.rectify import rectified
from kvjax.pallas_kernels.page_walk import flat_pages, gather_heads, padded_tables, scores_of
from kvjax.pallas_kernels.validate_indexer import tokens_a_page

BLOCK_TOKENS = 512
"""Tokens whose keys are gathered and scored together: they fit a core's cache."""


def lightning_scores_xla(
    q: Float[Array, "G R Hi Di"],
    weights: Float32[Array, "G R Hi"],
    keys: Float[Array, "N P Di"] | UInt8[Array, "N half Di"],
    key_scales: Float32[Array, "N P"] | None,
    page_ids: Int32[Array, "G M"],
    page_counts: Int32[Array, "G"],
) -> Float32[Array, "G R S"]:
    """Score the slots of each tile's pages; time follows the pages there are, not their tables.

    Args:
        q: [G, R, Hi, Di], tiles of queries that look at the same pages.
        weights: float32 [G, R, Hi], scaled.
        keys: [N, P, Di], or float4 codes, uint8 [N, P / 2, Di].
        key_scales: float32 [N, P], or None.
        page_ids: int32 [G, M], all from 0 to N - 1.
        page_counts: int32 [G], entries of each table that count; what others score is anything.

    Returns:
        float32 [G, R, M * P].
    """
    tiles, rows, heads, dim = q.shape
    size, width = tokens_a_page(keys), page_ids.shape[1]
    pages = max(1, min(BLOCK_TOKENS // size, width))
    tables = padded_tables(page_ids, pages)
    columns = tables.shape[1] // pages
    tables = tables.reshape(tiles * columns, pages)
    start = jnp.arange(columns, dtype=jnp.int32)[None] * pages
    used = (start < page_counts[:, None]).reshape(-1)
    order = jnp.argsort(~used, stable=True).astype(jnp.int32)
    by_tile = q.astype(jnp.float32).reshape(tiles, 1, rows * heads, dim)
    rows_of = _page_reader(keys)

    def visit(i: Int32[Array, ""], scores: Array) -> Array:
        block = order[i]
        tile = block // columns
        products = rectified(scores_of(by_tile[tile], rows_of(tables[block]), 1.0, None))
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


def _page_reader(
    keys: Float[Array, "N P Di"] | UInt8[Array, "N half Di"],
) -> Callable[[Int32[Array, " pages"]], Float32[Array, "1 tokens Di"]]:
    """From ids of pages to the keys of their tokens, one after the other."""
    count, stored, dim = keys.shape
    if keys.dtype != jnp.uint8:
        pool = keys[:, None]
        flat = flat_pages(pool)
        return lambda ids: gather_heads(pool, ids, flat).astype(jnp.float32)
    codes = keys.reshape(count, stored * dim)

    def unpacked(ids: Int32[Array, " pages"]) -> Float32[Array, "1 tokens Di"]:
        held = codes.at[ids].get(mode="clip").astype(jnp.int32).reshape(-1, stored, dim)
        return float4_page(held, axis=1).reshape(1, -1, dim)

    return unpacked
