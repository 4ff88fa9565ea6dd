"""Attention over tiers: of a prompt to its own pages, and of steps to lists of pages."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.decode.tiered_state import TieredShapes
from kvjax.models import ModelConfig
from kvjax.pallas_kernels import (
    ragged_latent_attention,
    ragged_paged_attention,
    sparse_latent_attention,
    sparse_paged_attention,
    token_latent_attention,
)
from kvjax.pallas_kernels.output import AttentionOutput

Pages = tuple[Float[Array, "n Hkv P Dk"], Float[Array, "n Hkv P Dv"]]
"""Keys and values; of latents, position keys and latents of one head."""


def attend_prompt(
    shapes: TieredShapes,
    config: ModelConfig,
    layer: int,
    q: Float[Array, "T Hq D"],
    pages: Pages,
    table: Int32[Array, "1 n"],
    length: Int32[Array, ""],
) -> Float[Array, "T Hq Dv"]:
    """Attention of a prompt's tokens to those before them.

    Args:
      shapes: the program's.
      config: the model's.
      layer: whose.
      q: [T, Hq, D]; of latents, absorbed queries and then their rotated parts.
      pages: of the prompt.
      table: int32 [1, n], where they are.
      length: int32, tokens of the prompt.
    """
    lengths, cu = length[None], jnp.stack([jnp.int32(0), length])
    scale, chosen = config.scale(layer), shapes.attention
    if shapes.latents is not None:
        parts = _latents(q, pages)
        return ragged_latent_attention(
            *parts, table, lengths, cu, scale=scale, implementation=chosen
        ).out
    return ragged_paged_attention(
        q,
        *pages,
        table,
        lengths,
        cu,
        scale=scale,
        window=config.layers[layer].window,
        soft_cap=config.attn_soft_cap,
        implementation=chosen,
    ).out


def attend_listed(
    shapes: TieredShapes,
    config: ModelConfig,
    layer: int,
    q: Float[Array, "B Hq D"],
    pages: Pages,
    ids: Int32[Array, "B Hkv K"],
    tokens: Int32[Array, "B Hkv K"],
) -> AttentionOutput:
    """Attention of a query a row to the first tokens of the pages that each KV head lists.

    Args:
      shapes: the program's.
      config: the model's.
      layer: whose.
      q: [B, Hq, D]; of latents, absorbed queries and then their rotated parts.
      pages: that lists are of.
      ids: int32 [B, Hkv, K]; what is past the pages is none.
      tokens: int32 [B, Hkv, K], how many of each page's first tokens count.
    """
    scale, chosen = config.scale(layer), shapes.attention
    if shapes.latents is not None:
        parts, lists = _latents(q, pages), (ids[:, 0], tokens[:, 0])
        return sparse_latent_attention(*parts, *lists, scale=scale, implementation=chosen)
    return sparse_paged_attention(
        q,
        *pages,
        ids,
        tokens,
        scale=scale,
        soft_cap=config.attn_soft_cap,
        implementation=chosen,
    )


def attend_tokens(
    shapes: TieredShapes,
    config: ModelConfig,
    layer: int,
    q: Float[Array, "T H D"],
    pages: Pages,
    token_ids: Int32[Array, "T K"],
    tables: Int32[Array, "T M"],
) -> AttentionOutput:
    """Attention of each query to the tokens that it names, of latents (DSA).

    Args:
      shapes: the program's.
      config: the model's.
      layer: whose.
      q: [T, H, Dc + Dr], absorbed queries and then their rotated parts.
      pages: that tables are of.
      token_ids: int32 [T, K], slots of each query's sequence; what is out of range is none.
      tables: int32 [T, M], where the sequence's pages are; tokens of a page past the pool are none.
    """
    parts, named = _latents(q, pages), (token_ids, tables)
    scale, chosen = config.scale(layer), shapes.attention
    return token_latent_attention(*parts, *named, scale=scale, implementation=chosen)


def _latents(q: Float[Array, "T H D"], pages: Pages) -> tuple[Array, Array, Array, Array]:
    """Both parts of queries and of pages, as the kernels take them."""
    ropes, latents = pages
    rank = latents.shape[-1]
    return q[..., :rank], q[..., rank:], latents[:, 0], ropes[:, 0]
