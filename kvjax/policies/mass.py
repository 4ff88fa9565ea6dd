"""Attention mass of pages: how much of each query's softmax falls on each page of a prefix.

Scores are made a block of pages at a time, summed to pages at once and brought to one softmax at
the end, so memory is queries x (one block's tokens + all pages). Blocks without a live page are not
computed.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from kvjax.errors import KvjaxError

BLOCK_TOKENS = 2048
"""Tokens scored at once: with 432 query rows their float32 scores are 3.4 MiB."""

_LEAST = float(jnp.finfo(jnp.float32).min)


def group_rows(queries: Float[Array, "S Hq D"], kv_heads: int) -> Float[Array, "Hkv R D"]:
    """Queries by the KV head they read, R = S x (Hq / Hkv) rows each; row s * group + g.

    Args:
      queries: [S, Hq, D]; query head h reads KV head h // (Hq / Hkv).
      kv_heads: Hkv.

    Raises:
      KvjaxError: Hkv does not divide Hq.
    """
    count, heads, dim = queries.shape
    if heads % kv_heads:
        raise KvjaxError(
            f"queries have {heads} heads and the keys {kv_heads}: the number of query heads must "
            f"be a multiple of the number of KV heads"
        )
    grouped = queries.reshape(count, kv_heads, heads // kv_heads, dim)
    return grouped.transpose(1, 0, 2, 3).reshape(kv_heads, -1, dim)


def dot(keys: Float[Array, "Hkv T D"], rows: Float[Array, "Hkv R D"]) -> Float32[Array, "Hkv T R"]:
    """Inner products of keys and query rows, summed in float32; bfloat16 only if both are.

    Keys come first, so that sums over a page's tokens run over a major axis.

    Args:
      keys: [Hkv, T, D].
      rows: [Hkv, R, D], see `group_rows`.
    """
    common = keys.dtype if keys.dtype == rows.dtype else jnp.dtype(jnp.float32)
    return lax.dot_general(
        keys.astype(common),
        rows.astype(common),
        (((2,), (2,)), ((0,), (0,))),
        precision=lax.Precision.HIGHEST if common == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def scaled(
    scores: Float32[Array, "*shape"], scale: float, soft_cap: float | None
) -> Float32[Array, "*shape"]:
    """Scores as attention takes them: times `scale`, then capped if there is a cap.

    Args:
      scores: inner products.
      scale: their factor.
      soft_cap: c in c * tanh(score / c), or None.
    """
    scores = scores * scale
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def softmax_mass(
    score_block: Callable[[Int32[Array, ""]], Float32[Array, "Hkv B P R"]],
    *,
    num_pages: int,
    block_pages: int,
    kv_heads: int,
    valid: Bool[Array, " S"],
    query_heads: int,
    pages: Int32[Array, ""],
) -> Float32[Array, "Hq N"]:
    """Each page's share of softmax over all live entries, summed over valid queries.

    Args:
      score_block: from the first page of a block to its scores, [Hkv, B, P, R]: B pages, P entries
        a page (tokens, or 1), R query rows as `group_rows` makes them. Scores of pages at or past
        `pages` may be anything.
      num_pages: N.
      block_pages: B, at most N.
      kv_heads: Hkv.
      valid: bool [S], which queries count; the others may be anything.
      query_heads: Hq.
      pages: int32 scalar, live pages, 0 to N; those past it get exactly 0.

    Returns:
      float32 [Hq, N]; each row sums to the number of valid queries, if there is a live page.
    """
    group = query_heads // kv_heads
    rows = valid.shape[0] * group
    blocks = -(-num_pages // block_pages)
    pages = jnp.clip(pages, 0, num_pages)

    def add_block(
        index: Int32[Array, ""],
        carry: tuple[Float32[Array, "Hkv N R"], Float32[Array, "blocks Hkv R"]],
    ) -> tuple[Float32[Array, "Hkv N R"], Float32[Array, "blocks Hkv R"]]:
        """Page sums of one block, relative to the block's own maximum."""
        sums, peaks = carry
        # The last block ends at page N, so it may begin among pages that are already summed.
        start = jnp.minimum(index * block_pages, num_pages - block_pages)
        ids = start + jnp.arange(block_pages, dtype=jnp.int32)
        fresh = (ids >= index * block_pages)[None, :, None]
        live = fresh & (ids < pages)[None, :, None]
        scores = jnp.where(live[..., None], score_block(start), -jnp.inf)
        peak = jnp.maximum(jnp.max(scores, axis=(1, 2)), _LEAST)
        here = jnp.sum(jnp.exp(scores - peak[:, None, None, :]), axis=2)
        before = lax.dynamic_slice_in_dim(sums, start, block_pages, axis=1)
        sums = lax.dynamic_update_slice_in_dim(sums, jnp.where(fresh, here, before), start, axis=1)
        return sums, lax.dynamic_update_index_in_dim(peaks, peak, index, axis=0)

    sums = jnp.zeros((kv_heads, num_pages, rows), jnp.float32)
    peaks = jnp.full((blocks, kv_heads, rows), _LEAST, jnp.float32)
    if blocks == 1:
        sums, peaks = add_block(jnp.int32(0), (sums, peaks))
    else:
        needed = (pages + (block_pages - 1)) // block_pages
        sums, peaks = lax.fori_loop(0, needed, add_block, (sums, peaks))

    factor = jnp.exp(peaks - jnp.max(peaks, axis=0)[None])
    factor = jnp.repeat(factor, block_pages, axis=0)[:num_pages].transpose(1, 0, 2)
    shares = sums * factor
    total = jnp.sum(shares, axis=1)
    counted = jnp.repeat(valid, group)[None, :] & ~(total == 0)
    weight = jnp.where(counted, 1 / total, 0)[:, None, :]
    # A query that does not count may hold NaN, and 0 x NaN is NaN.
    shares = jnp.where(counted[:, None, :], shares, 0) * weight
    mass = jnp.sum(shares.reshape(kv_heads, num_pages, -1, group), axis=2)
    return mass.transpose(0, 2, 1).reshape(query_heads, num_pages)
