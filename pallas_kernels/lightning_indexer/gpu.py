"""Scores of a lightning indexer as a Pallas Triton kernel.

Expiry note: the Triton backend of Pallas is deprecated since JAX 0.11 and will be removed; this
file goes with it. Until then it runs only when asked for by name (`implementation="gpu"`), and JAX
says so with a DeprecationWarning when the program is lowered. The default on a GPU is XLA.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32, UInt8

from kvjax.pallas_kernels.lightning_indexer.float4 import float4_values
from kvjax.pallas_kernels.lightning_indexer.rectify import rectified
from kvjax.pallas_kernels.packed_bits import float8_values
from kvjax.pallas_kernels.triton_walk import padded_block, product
from kvjax.pallas_kernels.validate_indexer import tokens_a_page

BLOCK_TOKENS = 32
"""Tokens that one program scores."""


def lightning_scores_gpu(
    q: Float[Array, "G R Hi Di"],
    weights: Float32[Array, "G R Hi"],
    keys: Float[Array, "N P Di"] | UInt8[Array, "N half Di"],
    key_scales: Float32[Array, "N P"] | None,
    page_ids: Int32[Array, "G M"],
    page_counts: Int32[Array, "G"],
    *,
    interpret: bool = False,
) -> Float32[Array, "G R S"]:
    """Score the slots of each tile's pages: one program a (tile, block of tokens).

    A program holds the keys of its tokens in registers and takes a tile's queries one by one.

    Args:
        q: [G, R, Hi, Di], tiles of queries that look at the same pages.
        weights: float32 [G, R, Hi], scaled.
        keys: [N, P, Di], or float4 codes, uint8 [N, P / 2, Di].
        key_scales: float32 [N, P], or None.
        page_ids: int32 [G, M], all from 0 to N - 1.
        page_counts: int32 [G], entries of each table that count; what others score is anything.
        interpret: whether to run the kernel in Pallas' interpreter, on any platform.

    Returns:
        float32 [G, R, M * P].
    """
    tiles, rows, _, _ = q.shape
    slots = page_ids.shape[1] * tokens_a_page(keys)
    scales = [] if key_scales is None else [key_scales]
    scores: Array = pl.pallas_call(
        _kernel,
        grid=(tiles, pl.cdiv(slots, BLOCK_TOKENS)),
        out_shape=jax.ShapeDtypeStruct((tiles, rows, slots), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="lightning_indexer",
    )(page_counts, page_ids, q, weights, keys, *scales)
    return scores


def _kernel(
    count_ref: Any, ids_ref: Any, q_ref: Any, weights_ref: Any, keys_ref: Any, *refs: Any
) -> None:
    *scales, scores_ref = refs
    tile = pl.program_id(0)
    slot = pl.program_id(1) * BLOCK_TOKENS + jnp.arange(BLOCK_TOKENS, dtype=jnp.int32)
    _, rows, heads, dim = q_ref.shape
    size, stored = tokens_a_page(keys_ref), keys_ref.shape[1]
    head = jnp.arange(padded_block(heads), dtype=jnp.int32)
    column = jnp.arange(padded_block(dim), dtype=jnp.int32)
    entry, place = lax.div(slot, jnp.int32(size)), lax.rem(slot, jnp.int32(size))
    exists = entry < count_ref[tile]
    ids = plgpu.load(ids_ref.at[tile, entry], mask=exists, other=0)
    inside, held = column < dim, head < heads
    read = exists[:, None] & inside[None, :]
    row = lax.rem(place, jnp.int32(stored))
    values = plgpu.load(keys_ref.at[ids[:, None], row[:, None], column[None, :]], mask=read)
    if values.dtype == jnp.uint8:
        shift = 4 * lax.div(place, jnp.int32(stored))
        values = float4_values((values.astype(jnp.int32) >> shift[:, None]) & 15)
    elif scales:  # 8-bit floats are taken as bytes, because not every GPU converts them
        values = float8_values(lax.bitcast_convert_type(values, jnp.uint8).astype(jnp.int32))
    values = jnp.where(read, values.astype(jnp.float32), 0.0)
    if scales:
        scale = plgpu.load(scales[0].at[ids, place], mask=exists, other=0)

    def score(row: Any, _: None) -> None:
        q = plgpu.load(
            q_ref.at[tile, row, head[:, None], column[None, :]],
            mask=held[:, None] & inside[None, :],
            other=0,
        )
        weights = plgpu.load(weights_ref.at[tile, row, head], mask=held, other=0)
        found = jnp.sum(
            rectified(product(q.astype(jnp.float32), values, 1)) * weights[:, None], axis=0
        )
        plgpu.store(
            scores_ref.at[tile, row, slot],
            found * scale if scales else found,
            mask=slot < scores_ref.shape[2],
        )

    lax.fori_loop(0, rows, score, None)
