"""Scores of low-bit pages in plain XLA: a loop over the blocks of pages that exist.

Only a block's pages are unpacked, so memory does not grow with the lists, and time follows the
pages there are. Without lists a block is a run of the pool's pages, which nobody gathers.

What is unpacked is a code times its step, 8 significant bits, which bfloat16 holds exactly. A few
float32 queries are three bfloat16 each, of which every product is exact in float32: on a CPU that
multiplies bfloat16 this is half the memory of float32 keys, and a faster product. On others, and
for many queries, keys are float32.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Float16, Float32, Int32

from kvjax.pallas_kernels.cpu_flags import cpu_multiplies_bfloat16
from kvjax.pallas_kernels.packed_bits import PLANES, float8_values, unpack
from kvjax.pallas_kernels.support import target_platform

BLOCK_TOKENS = 4096
"""Tokens that are unpacked and scored together, of all KV heads: half a megabyte of bfloat16 at
head_dim 64, which stays in a core's cache."""

FLOAT_BLOCK_TOKENS = 32_768
"""The same of float32 keys: 8 MB. A product of fewer leaves cores idle between its parts."""

BLOCK_SCORES = 2**20
"""Scores of a block, all KV heads together, where queries are many."""

FEW = 32
"""The most queries of a KV head that are taken apart."""

_RAISE = 2.0**100  # of queries (below 1e8), so that products with what is lowered are normal
_LOWERED = 2.0**12  # what is left of 2**112


def low_bit_scores_xla(
    q: Float[Array, "B Hq D"],
    pages: Mapping[str, Array],
    page_ids: Int32[Array, "B Hkv M"] | None,
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
        page_ids: int32 [B, Hkv, M], all from 0 to N - 1; None is all pages in order.
        page_counts: int32 [B, Hkv], entries of each list that exist; the others' scores are
            anything.
        bits: 2, 3 or 4.
        scale: factor of the scores.
        soft_cap: bound of the scores, or None.

    Returns:
        float32 [B, Hq, M].
    """
    kv_heads, num_pages, dim = pages["step"].shape
    page_size = pages["codes"].shape[2] * 8 // PLANES[bits]["codes"]
    width = num_pages if page_ids is None else page_ids.shape[2]
    grouped = q.reshape(q.shape[0], kv_heads, -1, dim)
    pages = {name: _bits(each) for name, each in pages.items()}
    rows = grouped.shape[2] * (q.shape[0] if page_ids is None else 1)
    most = BLOCK_TOKENS if _in_bfloat16(rows) else FLOAT_BLOCK_TOKENS
    tokens = min(most, BLOCK_SCORES // rows) // kv_heads
    blocks = -(-width // max(tokens // page_size, 1))
    together = -(-width // blocks)  # pages a block, which are about equal
    if page_ids is None:
        return _all_pages(grouped, pages, page_counts, together, bits, scale, soft_cap)
    return _listed_pages(grouped, pages, page_ids, page_counts, together, bits, scale, soft_cap)


def _all_pages(
    grouped: Float[Array, "B Hkv G D"],
    pages: Mapping[str, Array],
    page_counts: Int32[Array, "B Hkv"],
    together: int,
    bits: int,
    scale: float,
    soft_cap: float | None,
) -> Float32[Array, "B Hq N"]:
    batch, kv_heads, group, dim = grouped.shape
    num_pages = pages["step"].shape[1]
    # All rows read each page at once.
    queries = grouped.swapaxes(0, 1).reshape(kv_heads, batch * group, dim)

    def visit(i: Int32[Array, ""], scores: Array) -> Array:
        start = jnp.minimum(i * together, num_pages - together)
        here = {
            name: lax.dynamic_slice_in_dim(each, start, together, 1) for name, each in pages.items()
        }
        found = _block(queries, here, bits, scale, soft_cap)
        scores = lax.dynamic_update_slice_in_dim(scores, found, start, 2)
        return scores

    if together == num_pages:
        scores = _block(queries, pages, bits, scale, soft_cap)
    else:
        blocks = (jnp.max(page_counts) + (together - 1)) // together
        empty: Array = jnp.zeros((kv_heads, batch * group, num_pages), jnp.float32)
        scores = lax.fori_loop(0, blocks, visit, empty)
    scores = scores.reshape(kv_heads, batch, group, num_pages).swapaxes(0, 1)
    return scores.reshape(batch, kv_heads * group, num_pages)


def _listed_pages(
    grouped: Float[Array, "B Hkv G D"],
    pages: Mapping[str, Array],
    page_ids: Int32[Array, "B Hkv M"],
    page_counts: Int32[Array, "B Hkv"],
    together: int,
    bits: int,
    scale: float,
    soft_cap: float | None,
) -> Float32[Array, "B Hq M"]:
    """A block is a run of columns of one sequence's lists, all KV heads together."""
    batch, kv_heads, group, _ = grouped.shape
    num_pages, width = pages["step"].shape[1], page_ids.shape[2]
    columns = -(-width // together)
    head = jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
    rows = jnp.pad(page_ids + head * num_pages, ((0, 0), (0, 0), (0, columns * together - width)))
    rows = rows.reshape(batch, kv_heads, columns, together).swapaxes(1, 2)
    rows = rows.reshape(batch * columns, kv_heads, together)
    start = jnp.arange(columns, dtype=jnp.int32)[None] * together
    used = (start < page_counts.max(axis=1)[:, None]).reshape(-1)
    order = jnp.argsort(~used, stable=True).astype(jnp.int32)
    flat = {name: x.reshape(kv_heads * num_pages, *x.shape[2:]) for name, x in pages.items()}

    def visit(i: Int32[Array, ""], scores: Array) -> Array:
        block = order[i]
        here = {name: each.at[rows[block]].get(mode="clip") for name, each in flat.items()}
        found = _block(grouped[block // columns], here, bits, scale, soft_cap)
        scores = lax.dynamic_update_index_in_dim(scores, found, block, 0)
        return scores

    scores: Array = jnp.zeros((batch * columns, kv_heads, group, together), jnp.float32)
    scores = lax.fori_loop(0, used.sum(dtype=jnp.int32), visit, scores)
    scores = scores.reshape(batch, columns, kv_heads * group, together).swapaxes(1, 2)
    return scores.reshape(batch, kv_heads * group, columns * together)[:, :, :width]


def _in_bfloat16(rows: int) -> bool:
    """Whether this many queries of a KV head are multiplied in bfloat16."""
    return rows <= FEW and (target_platform() != "cpu" or cpu_multiplies_bfloat16())


def _block(
    queries: Float[Array, "Hkv R D"],
    pages: Mapping[str, Array],
    bits: int,
    scale: float,
    soft_cap: float | None,
) -> Float32[Array, "Hkv R n"]:
    """Scores of n pages, each KV head's own."""
    (kv_heads, count, _), rows = pages["step"].shape, queries.shape[1]
    unit = lax.bitcast_convert_type(pages["unit"], jnp.bfloat16).astype(jnp.float32)
    products = _halves if _in_bfloat16(rows) else _floats
    found, once = products(queries.astype(jnp.float32), pages, bits)
    once = once[:, :count] * unit[..., 1:] - once[:, count:] * unit[..., :1] * (2**bits - 1) / 2
    found = found.reshape(kv_heads, count, -1, rows) * unit[..., :1][:, :, None]
    found = (found + once[:, :, None]) * scale
    if soft_cap is not None:
        found = soft_cap * jnp.tanh(found / soft_cap)
    if rows > FEW:
        return jax.nn.logsumexp(found, axis=2).swapaxes(1, 2)
    # Pages last, so that there is something to vectorize.
    found = lax.optimization_barrier(found.transpose(0, 3, 2, 1))
    scores: Array = jax.nn.logsumexp(found, axis=2)
    return scores


def _halves(
    queries: Float32[Array, "Hkv R D"], pages: Mapping[str, Array], bits: int
) -> tuple[Float32[Array, "Hkv T R"], Float32[Array, "Hkv n2 R"]]:
    """Products of queries with codes times steps, and with middles and then steps, in bfloat16."""
    kv_heads, _, dim = pages["step"].shape
    asked, rows = _raised(queries), queries.shape[1]
    step, middle = _steps_and_middles(pages)
    width = lax.optimization_barrier(step.astype(jnp.float16))  # or each token decodes it again
    offsets = unpack(pages, bits).astype(jnp.float16) * width[:, :, None]
    found = _dot(_lowered(offsets).reshape(kv_heads, -1, dim), asked, rows)
    once = _dot(_upper(jnp.concatenate([middle, step], axis=1) / _RAISE), asked, rows)
    return found * _LOWERED, once


def _floats(
    queries: Float32[Array, "Hkv R D"], pages: Mapping[str, Array], bits: int
) -> tuple[Float32[Array, "Hkv T R"], Float32[Array, "Hkv n2 R"]]:
    """The same in float32."""
    kv_heads, _, dim = pages["step"].shape
    step, middle = _steps_and_middles(pages)
    step = lax.optimization_barrier(step)  # or each token decodes it again
    offsets = unpack(pages, bits).astype(jnp.float32) * step[:, :, None]
    # A product that unpacks as it goes is one core's.
    offsets = lax.optimization_barrier(offsets.reshape(kv_heads, -1, dim))
    rows = queries.shape[1]
    return (
        _dot(offsets, queries, rows),
        _dot(jnp.concatenate([middle, step], axis=1), queries, rows),
    )


def _steps_and_middles(
    pages: Mapping[str, Array],
) -> tuple[Float32[Array, "Hkv n D"], Float32[Array, "Hkv n D"]]:
    step, middle = (float8_values(pages[name].astype(jnp.int32)) for name in ("step", "middle"))
    return step, middle


def _bits(array: Array) -> Array:
    """An array as unsigned integers: XLA:CPU takes a part of small floats by converting all."""
    bits: Array = lax.bitcast_convert_type(array, jnp.dtype(f"uint{array.dtype.itemsize * 8}"))
    return bits


def _upper(values: Float32[Array, "..."]) -> BFloat16[Array, "..."]:
    """The upper half of each number; all of it where 8 significant bits hold it."""
    upper = lax.bitcast_convert_type(values, jnp.uint32) >> 16
    return lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)


def _lowered(values: Float16[Array, "..."]) -> BFloat16[Array, "..."]:
    """Numbers of 8 significant bits, 0 or more, times 2**-112: what their bits, shifted, say.

    A conversion to bfloat16 goes through float32, with half as many numbers to a vector register.
    """
    shifted = lax.bitcast_convert_type(values, jnp.uint16) >> 3
    return lax.bitcast_convert_type(shifted, jnp.bfloat16)


def _raised(queries: Float32[Array, "Hkv R D"]) -> BFloat16[Array, "Hkv R3 D"]:
    """Queries times `_RAISE` as three bfloat16 numbers that add up to each."""
    rest, parts = queries * _RAISE, []
    for _ in range(3):
        parts.append(_upper(rest))
        rest = rest - parts[-1].astype(jnp.float32)
    return jnp.concatenate(parts, axis=1)


def _dot(
    keys: Float[Array, "Hkv T D"], asked: Float[Array, "Hkv parts D"], rows: int
) -> Float32[Array, "Hkv T R"]:
    """Products with R queries, or with the three parts that `_raised` made of each."""
    products: Array = jnp.einsum(
        "htd,hrd->htr",
        keys,
        asked,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    if asked.shape[1] == rows:
        return products
    high, mid, low = jnp.split(products, 3, axis=2)
    return (low + mid) + high
