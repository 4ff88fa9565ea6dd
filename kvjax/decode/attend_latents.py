"""Attention to pages of latents: one KV head, whose keys are position keys and values latents."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.cache import PagedKVCache
from kvjax.models import Expand, ModelConfig
from kvjax.pallas_kernels import (
    EXPANDED_QUERIES,
    LatentDims,
    PackedPages,
    absorbed_or_expanded,
    expanded_latent_attention,
    latent_attention,
    ragged_latent_attention,
    token_latent_attention,
)
from kvjax.pallas_kernels.latent_attention.api import implementation_for
from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.support import Implementation


def keeps_latents(cache: PagedKVCache, layer: int) -> bool:
    """Whether a layer's pages hold latents."""
    return cache.spec.layers[layer].kind == "mla"


def scored_keys(
    cache: PagedKVCache, layer: int, k: Float[Array, "*T Hkv D"], v: Float[Array, "*T Hkv Dv"]
) -> Float[Array, "*T Hkv Dk"]:
    """What queries score of tokens: their keys; of latents, these and the position keys.

    Args:
      cache: for what the layer keeps.
      layer: index of the layer.
      k: as pages hold them.
      v: likewise.
    """
    return jnp.concatenate([v, k], axis=-1) if keeps_latents(cache, layer) else k


def attend_latents(
    config: ModelConfig,
    layer: int,
    q: Float[Array, "B H D"],
    cache: PagedKVCache,
    tables: Int32[Array, "B M"],
    lengths: Int32[Array, " B"],
    implementation: Implementation | None,
) -> AttentionOutput:
    """Attend one query a sequence to the latents in its pages.

    Args:
      config: the model's.
      layer: one that keeps latents.
      q: [B, H, Dc + Dr].
      cache: whose pages to read.
      tables: int32 [B, M], which ones.
      lengths: int32 [B], tokens of these that each query sees.
      implementation: of `latent_attention`, or None.
    """
    return latent_attention(
        *_operands(cache, layer, q),
        tables,
        lengths,
        scale=config.scale(layer),
        implementation=implementation,
    )


def attend_ragged_latents(
    config: ModelConfig,
    layer: int,
    q: Float[Array, "T H D"],
    cache: PagedKVCache,
    tables: Int32[Array, "B M"],
    kv_lengths: Int32[Array, " B"],
    cu_lengths: Int32[Array, " B1"],
    residual: int | None,
    implementation: Implementation | None,
) -> AttentionOutput:
    """Attend a ragged chunk's queries to the latents in pages, which hold the chunk's too.

    Args:
      config: the model's.
      layer: one that keeps latents.
      q: [T, H, Dc + Dr].
      cache: whose pages to read.
      tables: int32 [B, M], which ones.
      kv_lengths: int32 [B], tokens of each sequence, the chunk's included.
      cu_lengths: int32 [B + 1], where each sequence's tokens start in the chunk.
      residual: newest tokens that each query does not see here, or None.
      implementation: of `ragged_latent_attention`, or None.
    """
    return ragged_latent_attention(
        *_operands(cache, layer, q),
        tables,
        kv_lengths,
        cu_lengths,
        scale=config.scale(layer),
        residual=residual,
        implementation=implementation,
    )


def expands_latents(
    config: ModelConfig,
    layer: int,
    queries: int,
    cache: PagedKVCache,
    implementation: Implementation | None,
) -> bool:
    """Whether a chunk's queries attend to keys and values made of latents, at less cost.

    Only where XLA runs attention: there is no Mosaic or Triton kernel of that form.

    Args:
      config: the model's.
      layer: which.
      queries: of the chunk; a sequence has as many at most.
      cache: whose pages to read.
      implementation: of `ragged_latent_attention`, or None.
    """
    of, room = config.layers[layer], cache.max_pages * cache.page_size
    if of.latent is None or not keeps_latents(cache, layer) or cache.recent[layer] is not None:
        return False
    dims = LatentDims(of.latent.rank, of.rope_dim, of.head_dim - of.rope_dim, of.value_dim)
    latents, ropes = _plain_pools(cache, layer)
    operands = (latents, ropes, latents, ropes)
    if min(dims) < 1 or implementation_for(operands, implementation) != "xla":
        return False
    most = min(queries, room, EXPANDED_QUERIES)
    return absorbed_or_expanded(most, room, of.num_heads, dims).cheaper == "expanded"


def attend_expanded_latents(
    config: ModelConfig,
    layer: int,
    q: Float[Array, "T H D"],
    cache: PagedKVCache,
    tables: Int32[Array, "B M"],
    kv_lengths: Int32[Array, " B"],
    cu_lengths: Int32[Array, " B1"],
    expand: Expand,
) -> AttentionOutput:
    """Attend a ragged chunk's queries to the keys and values made of the latents in pages.

    Args:
      config: the model's.
      layer: one that keeps latents.
      q: [T, H, D].
      cache: whose pages to read.
      tables: int32 [B, M], which ones.
      kv_lengths: int32 [B], tokens of each sequence, the chunk's included.
      cu_lengths: int32 [B + 1], where each sequence's tokens start in the chunk.
      expand: of the layer.
    """
    return expanded_latent_attention(
        q,
        *_plain_pools(cache, layer),
        tables,
        kv_lengths,
        cu_lengths,
        expand=expand,
        scale=config.scale(layer),
    )


def attend_chosen_latents(
    config: ModelConfig,
    layer: int,
    q: Float[Array, "T H D"],
    cache: PagedKVCache,
    chosen: tuple[Int32[Array, "T K"], Int32[Array, "T M"]],
    implementation: Implementation | None,
) -> AttentionOutput:
    """Attend each query to the tokens that it names.

    Args:
      config: the model's.
      layer: one that keeps latents.
      q: [T, H, Dc + Dr].
      cache: whose pages to read.
      chosen: slots of each query's sequence, and the sequence's block table.
      implementation: of `token_latent_attention`, or None.
    """
    return token_latent_attention(
        *_operands(cache, layer, q),
        *chosen,
        scale=config.scale(layer),
        implementation=implementation,
    )


def _plain_pools(
    cache: PagedKVCache, layer: int
) -> tuple[Float[Array, "N P Dc"], Float[Array, "N P Dr"]]:
    """Latents and position keys of a layer without a format."""
    ropes, latents = cache.pools(layer)
    assert not isinstance(ropes, PackedPages)
    assert not isinstance(latents, PackedPages)
    return latents[:, 0], ropes[:, 0]


def _operands(
    cache: PagedKVCache, layer: int, q: Float[Array, "T H D"]
) -> tuple[Array, Array, Array | PackedPages, Array | PackedPages]:
    """Both parts of the queries and both pools, as the kernels take them."""
    ropes, latents = cache.pools(layer)
    rank = latents.shape[-1]
    parts = q[..., :rank], q[..., rank:]
    if isinstance(ropes, PackedPages) or isinstance(latents, PackedPages):
        return *parts, latents, ropes
    return *parts, latents[:, 0], ropes[:, 0]
