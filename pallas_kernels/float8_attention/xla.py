"""Float8 attention in plain XLA: a running softmax over the tiles that a sequence has."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from kvjax.pallas_kernels.float8_attention.hopper import add_products
from kvjax.pallas_kernels.float8_attention.operands import (
    WEIGHT_UNIT,
    float8_queries,
    scales_of_slots,
    tile_pages,
)
from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_bits import float8_values
from kvjax.pallas_kernels.packed_pages import PackedPages
from kvjax.pallas_kernels.page_walk import HIGHEST, finite, gather_heads, padded_tables


class _Running(NamedTuple):
    """What a sequence's tiles so far come to. Sums of values are in `WEIGHT_UNIT`s."""

    top: Float32[Array, "Hkv G"]  # greatest score
    mass: Float32[Array, "Hkv G"]  # sum of exp(score - top)
    peak: Float32[Array, "Hkv G"]  # greatest score + log(scale of the value)
    total: Float32[Array, "Hkv G Dv"]  # what has been flushed
    run: Float32[Array, "Hkv G Dv"]  # what has not


def float8_paged_attention_xla(
    q: Float[Array, "B Hq D"],
    k_pages: PackedPages,
    v_pages: PackedPages,
    block_tables: Int32[Array, "B M"],
    lengths: Int32[Array, " B"],
    *,
    scale: float,
    flush_every: int | None,
    accumulator: str,
) -> AttentionOutput:
    """Attend one query a sequence to its pages; the contract is that of `float8_paged_attention`.

    One sequence after the other, so that a batch of unequal lengths costs the sum of its lengths.
    Products of two float8 are exact in float32, which is what they are multiplied as.

    Args:
        q: [B, Hq, D].
        k_pages: float8 pages [N, Hkv, P, D].
        v_pages: float8 pages [N, Hkv, P, Dv].
        block_tables: int32 [B, M].
        lengths: int32 [B], tokens.
        scale: factor of the scores.
        flush_every: tiles whose products are added up before they join the float32 sum, or None.
        accumulator: "native" or "hopper".

    Returns:
        The `AttentionOutput`, T = B.
    """
    batch, query_heads, dim = q.shape
    _, kv_heads, page_size, v_dim = v_pages.shape
    group, f32 = query_heads // kv_heads, jnp.float32
    pages = min(tile_pages(page_size), block_tables.shape[1])
    tokens = pages * page_size
    tables = padded_tables(block_tables, pages).reshape(batch, -1, pages)
    offsets = jnp.arange(tokens, dtype=jnp.int32)
    queries, query_scale = float8_queries(q)
    rows = (
        queries.astype(f32).reshape(batch, kv_heads, group, dim),
        (query_scale * scale).reshape(batch, kv_heads, group, 1),
        tables,
        lengths,
    )

    def attend_row(row: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
        codes, factor, table, length = row

        def fold(tile: Int32[Array, ""], before: _Running) -> _Running:
            ids = table[tile]
            seen = (tile * tokens + offsets < length)[None]
            k, v = _codes(k_pages, ids), _codes(v_pages, ids)
            # A slot that nobody wrote may hold NaN, and 0 * NaN is NaN.
            v = jnp.where(seen[:, :, None], v, 0.0)
            scores = jnp.einsum("hgd,htd->hgt", codes, k, precision=HIGHEST) * factor
            scores *= scales_of_slots(k_pages, ids)[:, None, :]
            scores = jnp.where(seen[:, None], scores, -jnp.inf)
            logits = scores + jnp.log(scales_of_slots(v_pages, ids))[:, None, :]
            logits = jnp.where(seen[:, None], logits, -jnp.inf)
            top = jnp.maximum(before.top, scores.max(axis=2))
            peak = jnp.maximum(before.peak, logits.max(axis=2))
            mass = before.mass * jnp.exp(before.top - finite(top))
            mass += jnp.exp(scores - finite(top)[..., None]).sum(axis=2)
            fade = jnp.exp(before.peak - finite(peak))[..., None]
            weights = WEIGHT_UNIT * jnp.exp(logits - finite(peak)[..., None])
            weights = weights.astype(jnp.float8_e4m3fn).astype(f32)
            total, run = before.total * fade, before.run * fade
            if accumulator == "hopper":
                run = add_products(run, weights, v)
            else:
                run = run + jnp.einsum("hgt,htd->hgd", weights, v, precision=HIGHEST)
            if flush_every is not None:
                flush = (tile + 1) % flush_every == 0
                total = jnp.where(flush, total + run, total)
                run = jnp.where(flush, 0.0, run)
            return _Running(top, mass, peak, total, run)

        none = jnp.full((kv_heads, group), -jnp.inf, f32)
        zeros = jnp.zeros((kv_heads, group, v_dim), f32)
        start = _Running(none, jnp.zeros_like(none), none, zeros, zeros)
        end = lax.fori_loop(0, (length + (tokens - 1)) // tokens, fold, start)
        share = jnp.exp(end.peak - finite(end.top)) / WEIGHT_UNIT
        share = share / jnp.where(end.mass == 0.0, 1.0, end.mass)
        lse = end.top + jnp.log(end.mass)  # log 0 is the -inf of a sequence without tokens
        return (end.total + end.run) * share[..., None], lse

    out, lse = lax.map(attend_row, rows)
    return AttentionOutput(
        out=out.reshape(batch, query_heads, v_dim).astype(q.dtype),
        lse=lse.reshape(batch, query_heads),
    )


def _codes(pages: PackedPages, page_ids: Int32[Array, " K"]) -> Float32[Array, "Hkv slots D"]:
    """The codes of listed pages, as numbers.

    Decoded once and then multiplied: XLA's CPU backend converts float8 slowly, and would do it
    again in each product that it fuses it with.
    """
    taken = gather_heads(pages.planes["codes"], page_ids)
    taken = lax.bitcast_convert_type(taken, jnp.uint8).astype(jnp.int32)
    codes: Array = lax.optimization_barrier(float8_values(taken))
    return codes
