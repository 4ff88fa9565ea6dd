"""A ragged batch as tiles: a few queries of one sequence, which read its keys together."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

TILE_ROWS = 8
"""Queries of a tile: with 64 index heads they are 512 rows of a product."""


class QueryTiles(NamedTuple):
    """G tiles of R queries, and where each query's scores come out.

    Attributes:
        queries: int32 [G, R], rows of the flat batch; T or more where a tile has no more.
        sequences: int32 [G], whose queries these are; B or more for tiles without a query.
        lengths: int32 [G], tokens that the last of a tile's queries sees; 0 without a query.
        tile: int32 [T], the tile of each query.
        row: int32 [T], its row there.
        visible: int32 [T], tokens that it sees; 0 for padding.
    """

    queries: Int32[Array, "G R"]
    sequences: Int32[Array, "G"]
    lengths: Int32[Array, "G"]
    tile: Int32[Array, "T"]
    row: Int32[Array, "T"]
    visible: Int32[Array, "T"]


def query_tiles(
    kv_lengths: Int32[Array, "B"], cu_q_lengths: Int32[Array, "B+1"], num_queries: int
) -> QueryTiles:
    """Cut each sequence's queries into tiles; T // R + B of them hold any batch.

    Args:
        kv_lengths: int32 [B], cached tokens a sequence.
        cu_q_lengths: int32 [B + 1], where each sequence's queries start.
        num_queries: T, rows of the flat batch.
    """
    batch, rows = kv_lengths.shape[0], min(TILE_ROWS, num_queries)
    counts = jnp.diff(cu_q_lengths)
    ends = jnp.cumsum(-(-counts // rows), dtype=jnp.int32)
    starts = ends + -counts // rows
    before = kv_lengths - counts  # tokens cached before the queries' own

    tile = jnp.arange(num_queries // rows + batch, dtype=jnp.int32)
    sequence = jnp.sum(tile[:, None] >= ends[None], axis=1, dtype=jnp.int32)
    first = (tile - starts.at[sequence].get(mode="clip")) * rows
    held = counts.at[sequence].get(mode="clip")
    at = first[:, None] + jnp.arange(rows, dtype=jnp.int32)[None]
    known = (sequence < batch)[:, None] & (at < held[:, None])
    queries = cu_q_lengths.at[sequence].get(mode="clip")[:, None] + at
    last = before.at[sequence].get(mode="clip") + jnp.minimum(first + rows, held)

    query = jnp.arange(num_queries, dtype=jnp.int32)
    owner = jnp.sum(query[:, None] >= cu_q_lengths[None, 1:], axis=1, dtype=jnp.int32)
    place = query - cu_q_lengths.at[owner].get(mode="clip")
    seen = before.at[owner].get(mode="clip") + place + 1
    return QueryTiles(
        queries=jnp.where(known, queries, num_queries),
        sequences=sequence,
        lengths=jnp.where(sequence < batch, last, 0),
        tile=starts.at[owner].get(mode="clip") + place // rows,
        row=place % rows,
        visible=jnp.where(owner < batch, seen, 0),
    )
