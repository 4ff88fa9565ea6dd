"""Scores of pages as a Pallas Triton kernel.

Expiry note: the Triton backend of Pallas is deprecated since JAX 0.11 and will be removed; this
file goes with it. Until then it runs only when asked for by name (`implementation="gpu"`), and JAX
says so with a DeprecationWarning when the program is lowered. The default on a GPU is XLA.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32

from kvjax.pallas_kernels.page_scores.parts import products
from kvjax.pallas_kernels.triton_walk import padded_block, product

BLOCK_PAGES = 32
"""Pages that one program scores."""


def page_scores_gpu(
    q: Float32[Array, "B Hq D"],
    representatives: tuple[Float[Array, "N Hkv D"], ...],
    page_ids: Int32[Array, "B M"],
    page_counts: Int32[Array, "B"],
    *,
    interpret: bool = False,
) -> Float32[Array, "B Hq M"]:
    """Score pages for every query head: one program a (sequence, KV head, block of pages).

    Args:
        q: float32 [B, Hq, D], scaled.
        representatives: `(mean,)` or `(low, high)`, each [N, Hkv, D].
        page_ids: int32 [B, M], all from 0 to N - 1.
        page_counts: int32 [B], entries of each row that exist; the others' scores are anything.
        interpret: whether to run the kernel in Pallas' interpreter, on any platform.

    Returns:
        float32 [B, Hq, M].
    """
    batch, query_heads, _ = q.shape
    width = page_ids.shape[1]
    pairs = products(q, representatives)
    scores: Array = pl.pallas_call(
        functools.partial(_kernel, pairs=len(pairs)),
        grid=(batch, representatives[0].shape[1], pl.cdiv(width, BLOCK_PAGES)),
        out_shape=jax.ShapeDtypeStruct((batch, query_heads, width), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="page_scores",
    )(page_counts, page_ids, *(part for part, _ in pairs), *(rows for _, rows in pairs))
    return scores


def _kernel(count_ref: Any, ids_ref: Any, *refs: Any, pairs: int) -> None:
    queries, pools, scores_ref = refs[:pairs], refs[pairs : 2 * pairs], refs[-1]
    row, kv_head = pl.program_id(0), pl.program_id(1)
    entry = pl.program_id(2) * BLOCK_PAGES + jnp.arange(BLOCK_PAGES, dtype=jnp.int32)
    _, kv_heads, dim = pools[0].shape
    group = queries[0].shape[1] // kv_heads
    member = jnp.arange(padded_block(group), dtype=jnp.int32)
    column = jnp.arange(padded_block(dim), dtype=jnp.int32)
    head, held, inside = kv_head * group + member, member < group, column < dim
    exists = entry < count_ref[row]
    ids = plgpu.load(ids_ref.at[row, entry], mask=exists, other=0)
    scores = jnp.zeros((member.shape[0], BLOCK_PAGES), jnp.float32)
    for query_ref, pool_ref in zip(queries, pools, strict=True):
        q = plgpu.load(
            query_ref.at[row, head[:, None], column[None, :]],
            mask=held[:, None] & inside[None, :],
            other=0,
        )
        rows = plgpu.load(
            pool_ref.at[ids[:, None], kv_head, column[None, :]],
            mask=exists[:, None] & inside[None, :],
            other=0,
        )
        scores += product(q, rows, 1)
    plgpu.store(
        scores_ref.at[row, head[:, None], entry[None, :]],
        scores,
        mask=held[:, None] & (entry < ids_ref.shape[1])[None, :],
    )
