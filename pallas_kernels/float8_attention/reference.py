"""Float8 attention as its definition reads: gather every page, weigh every slot, add up tiles."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from kvjax.pallas_kernels.float8_attention.hopper import add_products
from kvjax.pallas_kernels.float8_attention.operands import (
    WEIGHT_UNIT,
    float8_queries,
    scales_of_slots,
    tile_pages,
)
from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_pages import PackedPages
from kvjax.pallas_kernels.page_walk import finite, padded_tables


def float8_paged_attention_reference(
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

    The yardstick of the other implementations: obvious, not fast. It materialises every page of
    every table ([B, M, Hkv, P, D], float32).

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
    num_pages, kv_heads, page_size, _ = k_pages.shape
    batch, query_heads, dim = q.shape
    group, f32, highest = query_heads // kv_heads, jnp.float32, lax.Precision.HIGHEST
    tables = jnp.minimum(padded_tables(block_tables, tile_pages(page_size)), num_pages - 1)
    tiles = tables.shape[1] // tile_pages(page_size)
    slot = jnp.arange(tables.shape[1] * page_size, dtype=jnp.int32)
    visible = slot[None] < lengths[:, None]

    def listed(pages: PackedPages) -> Array:
        """The codes of every slot, [B, Hkv, slots, D]; 0 where hidden ones may be NaN."""
        codes = pages.planes["codes"][tables].astype(f32).swapaxes(1, 2)
        codes = codes.reshape(batch, kv_heads, slot.shape[0], -1)
        return jnp.where(visible[:, None, :, None], codes, 0.0)

    queries, query_scale = float8_queries(q)
    grouped = queries.astype(f32).reshape(batch, kv_heads, group, dim)
    scores = jnp.einsum("bkgd,bksd->bkgs", grouped, listed(k_pages), precision=highest)
    scores *= (query_scale * scale).reshape(batch, kv_heads, group, 1)
    scores *= scales_of_slots(k_pages, tables)[:, :, None]
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=3)

    # exp(score) * scale of the value, by tile, against the greatest of its tile and those before.
    logits = scores + jnp.log(scales_of_slots(v_pages, tables))[:, :, None]
    logits = jnp.where(visible[:, None, None], logits, -jnp.inf)
    logits = logits.reshape(batch, kv_heads, group, tiles, -1)
    peaks = lax.cummax(logits.max(axis=4), axis=3)
    before = jnp.concatenate([jnp.full_like(peaks[..., :1], -jnp.inf), peaks[..., :-1]], axis=3)
    peaks = finite(peaks)
    fades = jnp.exp(before - peaks)
    weights = jnp.exp(logits - peaks[..., None]) * WEIGHT_UNIT
    weights = weights.astype(jnp.float8_e4m3fn).astype(f32)
    values = listed(v_pages).reshape(batch, kv_heads, tiles, -1, v_pages.shape[3])

    def add_tile(
        carry: tuple[Array, Array], tile: tuple[Array, ...]
    ) -> tuple[tuple[Array, Array], None]:
        total, run = carry
        index, fade, tile_weights, tile_values = tile
        total, run = total * fade[..., None], run * fade[..., None]
        if accumulator == "hopper":
            run = add_products(run, tile_weights, tile_values)
        else:
            product = jnp.einsum("bkgt,bktd->bkgd", tile_weights, tile_values, precision=highest)
            run = run + product
        if flush_every is None:
            return (total, run), None
        ends = (index + 1) % flush_every == 0
        return (jnp.where(ends, total + run, total), jnp.where(ends, 0.0, run)), None

    nothing = jnp.zeros((batch, kv_heads, group, v_pages.shape[3]), f32)
    by_tile = [jnp.moveaxis(x, 3, 0) for x in (fades, weights)] + [jnp.moveaxis(values, 2, 0)]
    index = jnp.arange(tiles, dtype=jnp.int32)
    (total, run), _ = lax.scan(add_tile, (nothing, nothing), (index, *by_tile))
    share = jnp.exp(peaks[..., -1] - finite(lse)) / WEIGHT_UNIT
    out = (total + run) * share[..., None]
    return AttentionOutput(
        out=out.reshape(batch, query_heads, -1).astype(q.dtype),
        lse=lse.reshape(batch, query_heads),
    )
