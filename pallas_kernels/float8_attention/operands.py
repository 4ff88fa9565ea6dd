"""What every implementation multiplies: tiles of a table, float8 queries, and scales of slots."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from kvjax.pallas_kernels.packed_pages import PackedPages

TILE_TOKENS = 128
"""Tokens between two looks at the greatest score: part of what the operation computes."""

WEIGHT_UNIT = 256.0
"""The greatest weight's code. Weights below 2**-18 of it become 0, the least code being 2**-9."""


def tile_pages(page_size: int) -> int:
    """Count the pages of a tile: as many as `TILE_TOKENS` holds, at least one.

    Args:
        page_size: tokens a page.
    """
    return max(1, TILE_TOKENS // page_size)


def float8_queries(
    q: Float[Array, "B Hq D"],
) -> tuple[Float[Array, "B Hq D"], Float32[Array, "B Hq"]]:
    """Quantize queries to float8_e4m3fn, with a scale for each head.

    Scales are powers of two: codes are floating-point numbers, to which others would do no better,
    and dividing by these is exact, so that every machine rounds alike.

    Args:
        q: [B, Hq, D].

    Returns:
        The codes, the largest of a head from 128 to 256, and the scales that they are multiplied
        by, float32 [B, Hq].
    """
    wide = q.astype(jnp.float32)
    bits = lax.bitcast_convert_type(jnp.max(jnp.abs(wide), axis=2), jnp.int32)
    exponent = jnp.maximum((bits >> 23) - 7, 1)  # biased; 1 is the least normal number's
    scale = lax.bitcast_convert_type(exponent << 23, jnp.float32)
    return (wide / scale[:, :, None]).astype(jnp.float8_e4m3fn), scale


def scales_of_slots(
    pages: PackedPages, page_ids: Int32[Array, "*lists K"]
) -> Float32[Array, "*lists Hkv slots"]:
    """The scale of each slot of listed pages, for each KV head.

    Args:
        pages: a pool whose page heads have one scale each, or share some.
        page_ids: int32 [..., K]; ids past the pool read some page's scale.

    Returns:
        float32 [..., Hkv, K * P].
    """
    _, heads, page_size, _ = pages.shape
    count, kept_heads = pages.scale.shape[:2]
    listed = jnp.minimum(page_ids, count - 1)  # all of them 0 where pages share a scale
    each = pages.scale.reshape(count, kept_heads)[listed].astype(jnp.float32)
    each = jnp.broadcast_to(each, (*page_ids.shape, heads))
    return jnp.repeat(jnp.moveaxis(each, -1, -2), page_size, axis=-1)
