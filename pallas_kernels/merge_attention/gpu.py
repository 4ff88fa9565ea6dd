"""The merge as a Pallas Triton kernel.

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
from jaxtyping import Array, Float

from kvjax.pallas_kernels.output import AttentionOutput

ROWS = 16
"""Rows that one program merges."""


def merge_attention_gpu(
    out: Float[Array, "n rows D"], lse: Float[Array, "n rows"], *, interpret: bool = False
) -> AttentionOutput:
    """Merge parts; the contract is that of `merge_attention`.

    Args:
        out: [n, rows, D].
        lse: float32 [n, rows].
        interpret: whether to run the kernel in Pallas' interpreter, on any platform.

    Returns:
        The `AttentionOutput` of the rows.
    """
    count, rows, width = out.shape
    merged = pl.pallas_call(
        functools.partial(_body, parts=count, rows=rows, width=width),
        grid=(pl.cdiv(rows, ROWS),),
        out_shape=[
            jax.ShapeDtypeStruct((rows, width), out.dtype),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="merge_attention",
    )(out, lse)
    return AttentionOutput(*merged)


def _body(
    out_ref: Any, lse_ref: Any, mixed_ref: Any, total_ref: Any, *, parts: int, rows: int, width: int
) -> None:
    block = 1 << (width - 1).bit_length()  # a Triton block is a power of two along every axis
    row = pl.program_id(0) * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
    column = jnp.arange(block, dtype=jnp.int32)
    held = row < rows
    inside = held[:, None] & (column < width)[None, :]

    def add(part: Any, carry: Any) -> Any:
        top, total, mixed = carry
        lse = plgpu.load(lse_ref.at[part, row], mask=held, other=-jnp.inf)
        some = lse != -jnp.inf
        # The values of a part that saw no key are not even loaded: they may be NaN.
        values = plgpu.load(
            out_ref.at[part, row[:, None], column[None, :]],
            mask=inside & some[:, None],
            other=0,
        )
        higher = jnp.maximum(top, lse)
        safe = jnp.where(higher == -jnp.inf, 0.0, higher)
        fade, weight = jnp.exp(top - safe), jnp.exp(lse - safe)
        mixed = mixed * fade[:, None] + weight[:, None] * values.astype(jnp.float32)
        return higher, total * fade + weight, mixed

    nothing = (
        jnp.full(ROWS, -jnp.inf, jnp.float32),
        jnp.zeros(ROWS, jnp.float32),
        jnp.zeros((ROWS, block), jnp.float32),
    )
    top, total, mixed = jax.lax.fori_loop(0, parts, add, nothing)
    mixed = mixed / jnp.where(total == 0.0, 1.0, total)[:, None]
    plgpu.store(
        mixed_ref.at[row[:, None], column[None, :]], mixed.astype(mixed_ref.dtype), mask=inside
    )
    plgpu.store(total_ref.at[row], top + jnp.log(total), mask=held)
