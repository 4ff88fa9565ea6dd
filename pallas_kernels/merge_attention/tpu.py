"""The merge as a Mosaic TPU kernel (for a TPU, or interpreted)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from kvjax.pallas_kernels.output import AttentionOutput

ROWS = 256
"""Rows merged together: with 256 float32 lanes, 256 KiB a part."""

EMPTY = -1.0
"""Stands for the share, 0 or more, of a part that saw no key: its values may be NaN."""


def merge_attention_tpu(
    out: Float[Array, "n rows D"],
    lse: Float[Array, "n rows"],
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> AttentionOutput:
    """Merge parts; the contract is that of `merge_attention`.

    The parts of a run of rows arrive one after the other while the one before is being added.

    Args:
        out: [n, rows, D].
        lse: float32 [n, rows].
        interpret: whether, and how, to interpret the kernel instead of compiling it.

    Returns:
        The `AttentionOutput` of the rows.
    """
    count, rows, width = out.shape
    blocks = -(-rows // ROWS)
    # Whole tiles of log-sum-exps, [8, 128], because the kernel transposes them.
    padded = ((0, -count % 8), (0, blocks * ROWS - rows))
    normalizers = jnp.pad(lse, padded, constant_values=-jnp.inf)
    values = jnp.pad(out, ((0, 0), padded[1], (0, 0)))
    merged, total = pl.pallas_call(
        functools.partial(_body, parts=count),
        grid=(blocks, count),
        in_specs=[
            pl.BlockSpec((normalizers.shape[0], ROWS), lambda i, _: (0, i)),
            pl.BlockSpec((1, ROWS, width), lambda i, part: (part, i, 0)),
        ],
        out_specs=[
            pl.BlockSpec((ROWS, width), lambda i, _: (i, 0)),
            pl.BlockSpec((1, ROWS), lambda i, _: (0, i)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((blocks * ROWS, width), out.dtype),
            jax.ShapeDtypeStruct((1, blocks * ROWS), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((ROWS, normalizers.shape[0]), jnp.float32),
            pltpu.VMEM((ROWS, width), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="merge_attention",
    )(normalizers, values)
    return AttentionOutput(merged[:rows], total[0, :rows])


def _body(
    lse: Any, values: Any, out: Any, total_lse: Any, shares: Any, mixed: Any, *, parts: int
) -> None:
    """Add one part of one run of rows."""
    part = pl.program_id(1)

    @pl.when(part == 0)
    def _() -> None:
        each = lse[...]
        top = jnp.max(each, axis=0, keepdims=True)
        top = jnp.where(top == -jnp.inf, 0.0, top)
        weights = jnp.exp(each - top)
        total = jnp.sum(weights, axis=0, keepdims=True)
        share = weights / jnp.where(total == 0.0, 1.0, total)
        shares[...] = jnp.where(each == -jnp.inf, EMPTY, share).T
        total_lse[...] = top + jnp.log(total)
        mixed[...] = jnp.zeros(mixed.shape, jnp.float32)

    lane = lax.broadcasted_iota(jnp.int32, shares.shape, 1)
    share = jnp.sum(jnp.where(lane == part, shares[...], 0.0), axis=1, keepdims=True)
    added = share * values[0].astype(jnp.float32)
    mixed[...] += jnp.where(share == EMPTY, 0.0, added)

    @pl.when(part == parts - 1)
    def _() -> None:
        out[...] = mixed[...].astype(out.dtype)
