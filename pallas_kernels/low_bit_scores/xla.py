"""Scores of low-bit pages in plain XLA: a loop over the blocks of the lists that hold pages.

A block is a run of columns of one sequence's lists, all KV heads together. Only its pages are
unpacked, so memory does not grow with the lists, and time follows the pages there are.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from kvjax.pallas_kernels.packed_bits import PLANES, unpack

BLOCK_TOKENS = 1024
"""Tokens of each KV head that are gathered, unpacked and scored together."""


def low_bit_scores_xla(
    q: Float[Array, "B Hq D"],
    pages: Mapping[str, Array],
    page_ids: Int32[Array, "B Hkv M"],
    page_counts: Int32[Array, "B Hkv"],
    *,
    bits: int,
    scale: float,
    soft_cap: float | None,
) -> Float32[Array, "B Hq M"]:
    """Score listed pages for every query head; the contract is that of `low_bit_scores`.

    Args:
        q: [B, Hq, D].
        pages: see `low_bit_scores`.
        page_ids: int32 [B, Hkv, M], all from 0 to N - 1.
        page_counts: int32 [B, Hkv], entries of each list that exist; the others' scores are
            anything.
        bits: 2, 3 or 4.
        scale: factor of the scores.
        soft_cap: bound of the scores, or None.

    Returns:
        float32 [B, Hq, M].
    """
    batch, query_heads, dim = q.shape
    kv_heads, num_pages, _ = pages["step"].shape
    width = page_ids.shape[2]
    page_size = pages["codes"].shape[2] * 8 // PLANES[bits]["codes"]
    together = max(1, min(BLOCK_TOKENS // page_size, width))  # pages a block
    columns = -(-width // together)

    head = jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
    rows = jnp.pad(page_ids + head * num_pages, ((0, 0), (0, 0), (0, columns * together - width)))
    rows = rows.reshape(batch, kv_heads, columns, together).swapaxes(1, 2)
    rows = rows.reshape(batch * columns, kv_heads, together)
    start = jnp.arange(columns, dtype=jnp.int32)[None] * together
    used = (start < page_counts.max(axis=1)[:, None]).reshape(-1)
    order = jnp.argsort(~used, stable=True).astype(jnp.int32)
    grouped = q.astype(jnp.float32).reshape(batch, kv_heads, -1, dim)
    flat = {name: each.reshape(kv_heads * num_pages, -1) for name, each in pages.items()}

    def visit(i: Int32[Array, ""], scores: Array) -> Array:
        block = order[i]
        queries = grouped[block // columns]
        here = {name: each.at[rows[block]].get(mode="clip") for name, each in flat.items()}
        planes = {name: here[name].reshape(kv_heads, together, -1, dim) for name in PLANES[bits]}
        unit = here["unit"].astype(jnp.float32)
        step = here["step"].astype(jnp.float32) * unit[..., :1]
        middle = here["middle"].astype(jnp.float32) * unit[..., 1:]
        # Or XLA:CPU decodes a page's step again for each of its tokens.
        step, middle = lax.optimization_barrier((step, middle))
        codes = unpack(planes, bits).astype(jnp.float32) - (2**bits - 1) / 2
        offsets = (codes * step[:, :, None]).reshape(kv_heads, -1, dim)
        found = _dot(offsets, queries).reshape(kv_heads, together, page_size, -1)
        found = (found + _dot(middle, queries)[:, :, None]) * scale
        if soft_cap is not None:
            found = soft_cap * jnp.tanh(found / soft_cap)
        found = jax.nn.logsumexp(found, axis=2).swapaxes(1, 2)
        scores = lax.dynamic_update_index_in_dim(scores, found, block, 0)
        return scores

    scores: Array = jnp.zeros(
        (batch * columns, kv_heads, query_heads // kv_heads, together), jnp.float32
    )
    scores = lax.fori_loop(0, used.sum(dtype=jnp.int32), visit, scores)
    scores = scores.reshape(batch, columns, query_heads, together).swapaxes(1, 2)
    scores = scores.reshape(batch, query_heads, columns * together)[:, :, :width]
    return scores


def _dot(
    keys: Float32[Array, "Hkv T D"], queries: Float32[Array, "Hkv G D"]
) -> Float32[Array, "Hkv T G"]:
    """Products with keys first, so that sums over a page's tokens run over a major axis."""
    return jnp.einsum("htd,hgd->htg", keys, queries, precision=lax.Precision.HIGHEST)
