"""Attention mass of pages: how much of each query's softmax falls on each page of a prefix.

Scores are made a block of pages at a time, summed to pages at once and brought to one softmax at
the end, so memory is queries x (one block's tokens + all pages). Blocks without a live page are not
computed.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

BLOCK_TOKENS = 2048
"""Tokens scored at once: with 432 query rows their float32 scores are 3.4 MiB."""

_LEAST = float(jnp.finfo(jnp.float32).min)


def group_rows(
    queries: Float[Array, "S Hq D"], valid: Bool[Array, " S"], kv_heads: int
) -> Float[Array, "Hkv R D"]:
    """Queries by the KV head they read, R = S x (Hq / Hkv) rows each; row s * group + g.

    Args:
      queries: [S, Hq, D]; query head h reads KV head h // (Hq / Hkv).
      valid: bool [S]; the other queries, which may hold anything, become 0.
      kv_heads: Hkv, which divides Hq.
    """
    count, heads, dim = queries.shape
    queries = jnp.where(valid[:, None, None], queries, 0)
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
      valid: bool [S], which queries count.
      query_heads: Hq.
      pages: int32 scalar, live pages, 0 to N; those past it get exactly 0.

    Returns:
      float32 [Hq, N]; each row sums to the number of valid queries, if there is a live page.
    """
    group = query_heads // kv_heads
    rows = valid.shape[0] * group
    blocks = -(-num_pages // block_pages)
    pages = jnp.clip(pages, 0, num_pages)

    def add_block(index: Int32[Array, ""], carry: tuple[Array, ...]) -> tuple[Array, ...]:
        """Sums of one block's pages, relative to the block's own maximum."""
        # The last block ends at page N, so it may begin among pages that are already summed.
        start = jnp.minimum(index * block_pages, num_pages - block_pages)
        page = (start + jnp.arange(block_pages, dtype=jnp.int32))[None, :, None]
        live = (page >= index * block_pages) & (page < pages)
        scores = score_block(start)
        # Masked page by page: what a dead page holds, NaN too, stays within the page.
        peak = jnp.max(jnp.where(live, jnp.max(scores, axis=2), _LEAST), axis=1)
        by_page = jnp.sum(jnp.exp(scores - peak[:, None, None, :]), axis=2)
        found = (jnp.where(live, by_page, 0), peak)
        return tuple(
            lax.dynamic_update_index_in_dim(kept, new, index, axis=0)
            for kept, new in zip(carry, found, strict=True)
        )

    carry: tuple[Array, ...] = (
        jnp.zeros((blocks, kv_heads, block_pages, rows), jnp.float32),
        jnp.full((blocks, kv_heads, rows), _LEAST, jnp.float32),
    )
    if blocks == 1:
        carry = add_block(jnp.int32(0), carry)
    else:
        needed = (pages + (block_pages - 1)) // block_pages
        carry = lax.fori_loop(0, needed, add_block, carry)
    by_page, peaks = carry

    factor = jnp.exp(peaks - jnp.max(peaks, axis=0)[None])
    total = jnp.sum(jnp.sum(by_page, axis=2) * factor, axis=0)
    counted = jnp.repeat(valid, group)[None, :] & (pages > 0)
    weight = factor * jnp.where(counted, 1 / total, 0)[None]
    head = jnp.arange(group, dtype=jnp.int32)[None, :]
    own = jnp.arange(rows, dtype=jnp.int32)[:, None] % group == head
    mass = lax.dot_general(
        by_page,
        jnp.where(own[None, None], weight[..., None], 0),
        (((3,), (2,)), ((0, 1), (0, 1))),
        precision=lax.Precision.HIGHEST,
    )
    mass = mass.transpose(1, 3, 0, 2).reshape(query_heads, blocks, block_pages)
    before = mass[:, :-1].reshape(query_heads, -1)
    return jnp.concatenate([before, mass[:, -1, before.shape[1] - num_pages :]], axis=1)
