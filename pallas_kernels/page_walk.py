"""What the XLA attention loops share: which blocks to visit, and how pages become heads."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from kvjax.pallas_kernels.code_levels import FLOAT8
from kvjax.pallas_kernels.packed_pages import KeyPool, PackedPages
from kvjax.pallas_kernels.support import target_platform

HIGHEST = lax.Precision.HIGHEST
"""Float32 products stay float32 on every backend."""


def padded_tables(block_tables: Int32[Array, "B M"], multiple: int) -> Int32[Array, "B columns"]:
    """Widen block tables to whole blocks; what is added is never visible.

    Args:
        block_tables: int32 [B, M].
        multiple: pages a block.
    """
    extra = -block_tables.shape[1] % multiple
    return jnp.pad(block_tables, ((0, 0), (0, extra)))


def block_span(
    lengths: Int32[Array, "..."],
    positions: Int32[Array, "..."],
    window: int | None,
    sink_tokens: int,
    block: int,
) -> tuple[Int32[Array, "..."], Int32[Array, "..."], Int32[Array, "..."]]:
    """Which blocks of a sequence hold a visible key.

    Args:
        lengths: int32, cached tokens.
        positions: int32, the position of the oldest query that looks.
        window: tokens a query sees, or None.
        sink_tokens: first tokens that stay visible.
        block: tokens a block.

    Returns:
        How many blocks from 0 on hold sinks before the window's first block; that first block; and
        one past the last block. They visit `sinks + (last - first)` blocks, none twice.
    """
    last = (lengths + (block - 1)) // block
    if window is None:
        none = jnp.zeros_like(last)
        return none, none, last
    first = jnp.minimum(jnp.maximum(positions - window + 1, 0) // block, last)
    sinks = jnp.minimum(jnp.full_like(first, -(-sink_tokens // block)), first)
    return sinks, first, last


def flat_pages(pool: KeyPool) -> Float[Array, "rows _"] | PackedPages:
    """A plain pool as the rows that `gather_heads` takes of it; a packed one as it is.

    Ahead of a loop, this keeps JAX 0.10 on CPU from copying a pool [N, P, D] that was given its
    axis of one head: it lays [N, 1, P, D] out otherwise than a loop wants it.

    Args:
        pool: [N, Hkv, P, D], plain or packed.

    Returns:
        [N * Hkv, P * D].
    """
    if isinstance(pool, PackedPages):
        return pool
    return pool.reshape(pool.shape[0] * pool.shape[1], -1)


def gather_heads(
    pool: KeyPool,
    pages: Int32[Array, " pages"] | Int32[Array, "lists pages"],
    flat: Float[Array, "rows _"] | PackedPages | None = None,
) -> Float[Array, "heads tokens D"]:
    """Fetch pages so that each KV head's tokens lie one after the other.

    One head's page is contiguous in the pool, so this is a gather of long rows: XLA copies each
    with one move, which a gather of the pool's own four dimensions does not do.

    Args:
        pool: [N, Hkv, P, D], plain or packed; what is taken of a packed one is unpacked.
        pages: int32 [pages], ids, or [Hkv, pages] where each KV head has its own, or [lists, pages]
            of a pool with one KV head; N or more reads some page of the pool, to be hidden.
        flat: what `flat_pages` makes of the pool, where that was done ahead of a loop.

    Returns:
        [Hkv or lists, pages * P, D].
    """
    count, heads, _, dim = pool.shape
    pages = pages.reshape(-1, pages.shape[-1])
    rows = pages * heads + jnp.arange(heads, dtype=jnp.int32)[:, None]
    held = flat_pages(pool) if flat is None else flat
    # JAX 0.10 gathers bfloat16 as float32 on CPU: let XLA convert what is taken, by this very
    # gather, and not the whole pool, ahead of the loop or shared with another one's conversion.
    held, rows = lax.optimization_barrier((held, rows))

    def taken(array: Array) -> Array:
        """[N, Hkv, ...] to [lists, pages, ...]; of 8-bit floats the bytes, which XLA copies."""
        flat = array.reshape(count * heads, -1)
        if array.dtype.name in FLOAT8:
            flat = lax.bitcast_convert_type(flat, jnp.uint8)
        return lax.bitcast_convert_type(flat.at[rows].get(mode="clip"), array.dtype)

    if not isinstance(held, PackedPages):
        return taken(held).reshape(rows.shape[0], -1, dim)

    def of_pages(array: Array) -> Array:
        return taken(array).reshape(*rows.shape, *array.shape[2:])

    return _unpacked(held, jax.tree.map(of_pages, held.stored()))


def _unpacked(pool: PackedPages, taken: dict[str, Any]) -> Float32[Array, "heads tokens D"]:
    """What pages stand for whose arrays were taken, [lists, pages, ...], list by list."""
    lists = jax.tree.leaves(taken)[0].shape[0]

    def of_list(array: Array, axis: int) -> Array:
        """What all pages share, with lists first, each of one head."""
        array = jnp.moveaxis(jnp.expand_dims(array, axis), axis + 1, 0)
        return jnp.broadcast_to(array, (lists, *array.shape[1:]))

    shared = {
        name: of_list(value, 0 if name == "levels" else 1)
        for name in ("scale", "middle", "unit", "levels", "sink_scale", "sink_middle")
        if name not in taken and (value := getattr(pool, name)) is not None
    }

    def values(arrays: dict[str, Any], shared: dict[str, Any]) -> Array:
        arrays = jax.tree.map(lambda x: x[:, None], arrays)
        return dataclasses.replace(pool, **arrays, **shared).values()

    unpacked: Array = jax.vmap(values)(taken, shared)
    return unpacked.reshape(lists, -1, unpacked.shape[-1])


def scores_of(
    q: Float[Array, "Hkv R D"],
    k: Float[Array, "Hkv T D"],
    scale: float,
    soft_cap: float | None,
) -> Float[Array, "Hkv R T"]:
    """Score keys against the rows of queries of their KV head.

    Args:
        q: [Hkv, R, D] float32.
        k: [Hkv, T, D] float32.
        scale: factor of the scores.
        soft_cap: bound of the scores, or None.
    """
    q = q * jnp.float32(scale)
    if _by_vector(q.shape[1]):
        rows = [jnp.einsum("hd,htd->ht", q[:, r], k, precision=HIGHEST) for r in range(q.shape[1])]
        s = jnp.stack(rows, axis=1)
    else:
        s = jnp.einsum("hrd,htd->hrt", q, k, precision=HIGHEST)
    return s if soft_cap is None else soft_cap * jnp.tanh(s / soft_cap)


def values_of(
    weights: Float[Array, "Hkv R T"], v: Float[Array, "Hkv T Dv"]
) -> Float[Array, "Hkv R Dv"]:
    """Sum values by weight.

    Args:
        weights: [Hkv, R, T] float32.
        v: [Hkv, T, Dv] float32.
    """
    if _by_vector(weights.shape[1]):
        rows = range(weights.shape[1])
        out = [jnp.einsum("ht,htd->hd", weights[:, r], v, precision=HIGHEST) for r in rows]
        return jnp.stack(out, axis=1)
    return jnp.einsum("hrt,htd->hrd", weights, v, precision=HIGHEST)


def _by_vector(rows: int) -> bool:
    """Whether to go row by row: XLA's CPU products of a few rows repack the larger operand."""
    return rows <= 8 and target_platform() == "cpu"


def finite(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Put 0 for -inf: exp(-inf - 0) is the 0 that exp(-inf - -inf), a NaN, stands for."""
    return jnp.where(jnp.isneginf(x), 0.0, x)
