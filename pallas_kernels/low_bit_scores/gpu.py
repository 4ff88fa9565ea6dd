"""Scores of low-bit pages as a Pallas Triton kernel.

Expiry note: the Triton backend of Pallas is deprecated since JAX 0.11 and will be removed; this
file goes with it. Until then it runs only when asked for by name (`implementation="gpu"`), and JAX
says so with a DeprecationWarning when the program is lowered. The default on a GPU is XLA.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32

from kvjax.pallas_kernels.packed_bits import PLANES, float8_values
from kvjax.pallas_kernels.triton_walk import padded_block, product

BLOCK_PAGES = 32
"""Pages that one program scores."""


def low_bit_scores_gpu(
    q: Float[Array, "B Hq D"],
    pages: Mapping[str, Array],
    page_ids: Int32[Array, "B Hkv M"],
    page_counts: Int32[Array, "B Hkv"],
    *,
    bits: int,
    scale: float,
    soft_cap: float | None,
    interpret: bool = False,
) -> Float32[Array, "B Hq M"]:
    """Score listed pages: one program a (sequence, KV head, block of pages).

    A program unpacks one token of all its pages at a time, in registers.

    Args:
        q: [B, Hq, D].
        pages: see `low_bit_scores`.
        page_ids: int32 [B, Hkv, M], all from 0 to N - 1.
        page_counts: int32 [B, Hkv], entries of each list that exist; the others' scores are
            anything.
        bits: 2, 3 or 4.
        scale: factor of the scores.
        soft_cap: bound of the scores, or None.
        interpret: whether to run the kernel in Pallas' interpreter, on any platform.

    Returns:
        float32 [B, Hq, M].
    """
    batch, query_heads, _ = q.shape
    kv_heads, width = page_ids.shape[1:]
    once = (lax.bitcast_convert_type(pages[name], jnp.uint8) for name in ("step", "middle"))
    scores: Array = pl.pallas_call(
        functools.partial(_kernel, bits=bits, scale=scale, soft_cap=soft_cap),
        grid=(batch, kv_heads, pl.cdiv(width, BLOCK_PAGES)),
        out_shape=jax.ShapeDtypeStruct((batch, query_heads, width), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="low_bit_scores",
    )(page_counts, page_ids, q, pages["unit"], *once, *(pages[name] for name in PLANES[bits]))
    return scores


def _kernel(
    count_ref: Any,
    ids_ref: Any,
    q_ref: Any,
    unit_ref: Any,
    step_ref: Any,
    middle_ref: Any,
    *refs: Any,
    bits: int,
    scale: float,
    soft_cap: float | None,
) -> None:
    plane_refs, scores_ref = refs[:-1], refs[-1]
    row, kv_head = pl.program_id(0), pl.program_id(1)
    entry = pl.program_id(2) * BLOCK_PAGES + jnp.arange(BLOCK_PAGES, dtype=jnp.int32)
    kv_heads, _, dim = step_ref.shape
    group = q_ref.shape[1] // kv_heads
    member = jnp.arange(padded_block(group), dtype=jnp.int32)
    column = jnp.arange(padded_block(dim), dtype=jnp.int32)
    head, held, inside = kv_head * group + member, member < group, column < dim
    exists = entry < count_ref[row, kv_head]
    ids = plgpu.load(ids_ref.at[row, kv_head, entry], mask=exists, other=0)
    mask = exists[:, None] & inside[None, :]
    q_mask = held[:, None] & inside[None, :]
    q = plgpu.load(q_ref.at[row, head[:, None], column[None, :]], mask=q_mask, other=0)
    q = q.astype(jnp.float32)

    def load(ref: Any, *at: Any) -> Any:
        """One row of every page, int32 [BLOCK_PAGES, D]."""
        place = ref.at[(kv_head, ids[:, None], *at, column[None, :])]
        return plgpu.load(place, mask=mask, other=0).astype(jnp.int32)

    def unit(which: int) -> Any:
        """A unit of every page, float32 [1, BLOCK_PAGES]."""
        place = unit_ref.at[kv_head, ids, which]
        return plgpu.load(place, mask=exists, other=0).astype(jnp.float32)[None, :]

    width = float8_values(load(step_ref))
    step_unit = unit(0)
    centre = product(q, float8_values(load(middle_ref)), 1) * unit(1)
    tokens = plane_refs[0].shape[2] * 8 // PLANES[bits]["codes"]

    def fold(token: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        top, total = carry
        code, below = jnp.zeros(mask.shape, jnp.int32), 0
        for ref, wide in zip(plane_refs, PLANES[bits].values(), strict=True):
            rows = ref.shape[2]
            field = load(ref, lax.rem(token, rows)) >> (lax.div(token, rows) * wide)
            code = code | ((field & (2**wide - 1)) << below)
            below += wide
        offsets = (code.astype(jnp.float32) - (2**bits - 1) / 2) * width
        score = (product(q, offsets, 1) * step_unit + centre) * scale
        if soft_cap is not None:
            score = soft_cap * jnp.tanh(score / soft_cap)
        new_top = jnp.maximum(top, score)
        # Before the first token `top` is the lowest number, not -inf, whose differences are NaN.
        return new_top, total * jnp.exp(top - new_top) + jnp.exp(score - new_top)

    lowest = float(jnp.finfo(jnp.float32).min)
    shape = (member.shape[0], BLOCK_PAGES)
    nothing = (jnp.full(shape, lowest, jnp.float32), jnp.zeros(shape, jnp.float32))
    top, total = lax.fori_loop(0, tokens, fold, nothing)
    plgpu.store(
        scores_ref.at[row, head[:, None], entry[None, :]],
        top + jnp.log(total),
        mask=held[:, None] & (entry < ids_ref.shape[2])[None, :],
    )
