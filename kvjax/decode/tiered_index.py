"""What pages are chosen by, as the decode loop builds, extends and asks it.

An index that estimates what is not read gets the values too, and is one more part of attention.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from kvjax.model import keeps_latents
from kvjax.models import ModelConfig
from kvjax.models.rope import frequencies
from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.policies import (
    DistilledIndexer,
    EstimatingIndex,
    LayerIndexer,
    LowRank,
    PageIndex,
    Select,
)


def index_for(select: Select, config: ModelConfig) -> PageIndex | DistilledIndexer | None:
    """What pages of a model are chosen by: "low-rank" undoes the rotation that all layers share.

    Args:
      select: names it.
      config: the model's. If the layers that choose rotate differently, or keys of latents only in
        part, they are taken as they are.
    """
    index = select.index()
    if keeps_latents(config):
        return index
    choosing = (layer for layer in config.layers if layer.window is None)
    rotations = {(tuple(r.tolist()), s) for r, s in map(frequencies, choosing)}
    if select.by != "low-rank" or not isinstance(index, LowRank) or len(rotations) > 1:
        return index
    (radians, sharpen), *_ = rotations
    return dataclasses.replace(index, frequencies=radians, sharpen=sharpen)


def build_index(
    index: PageIndex,
    keys: Float[Array, "N Hkv P D"],
    values: Float[Array, "N Hkv P Dv"],
    pages: Int32[Array, ""],
) -> dict[str, Array]:
    """The index of one sequence's first pages.

    Args:
      index: which.
      keys: [N, Hkv, P, D], of all pages that there is room for.
      values: [N, Hkv, P, Dv].
      pages: int32 scalar, live pages.
    """
    if isinstance(index, EstimatingIndex):
        return index.build(keys, pages, values)
    return index.build(keys, pages)


def extend_index(
    index: PageIndex,
    arrays: Mapping[str, Array],
    page: Int32[Array, " B"],
    keys: Float[Array, "B Hkv P D"],
    values: Float[Array, "B Hkv P Dv"],
) -> dict[str, Array]:
    """The index of every row with one more page.

    Args:
      index: which.
      arrays: of all rows, [B, ...].
      page: int32 [B], each row's new page; N for a row that has none.
      keys: [B, Hkv, P, D], the pages' keys.
      values: [B, Hkv, P, Dv].
    """
    grown: dict[str, Array]
    if isinstance(index, EstimatingIndex):
        grown = jax.vmap(index.extend)(arrays, page, keys, values)
    else:
        grown = jax.vmap(index.extend)(arrays, page, keys)
    return grown


def page_mass(
    index: PageIndex,
    config: ModelConfig,
    layer: int,
    q: Float[Array, "Hq D"],
    arrays: Mapping[str, Array],
    length: Int32[Array, ""],
    full: Int32[Array, ""],
) -> Float32[Array, "Hq N"]:
    """What one row's full pages are ranked by, for its newest token.

    Args:
      index: which; one that was learned is told the token's position too.
      config: the model's.
      layer: whose scale to use.
      q: [Hq, D].
      arrays: the row's.
      length: int32 scalar, tokens before this one.
      full: int32 scalar, full pages of these.
    """
    scale, soft_cap = config.scale(layer), config.attn_soft_cap
    if isinstance(index, LayerIndexer):
        return index.page_mass(arrays, q, full, scale, soft_cap=soft_cap, position=length)
    return index.page_mass(arrays, q, full, scale, soft_cap=soft_cap)


def estimate_unread(
    index: EstimatingIndex,
    config: ModelConfig,
    layer: int,
    q: Float[Array, "B Hq D"],
    arrays: Mapping[str, Array],
    read: Int32[Array, "B Hkv K"],
    full: Int32[Array, " B"],
    *,
    num_pages: int,
) -> AttentionOutput:
    """Attention to the full pages that are not read, as the index estimates it.

    Args:
      index: which.
      config: the model's.
      layer: whose scale to use.
      q: [B, Hq, D].
      arrays: of all rows, [B, ...].
      read: int32 [B, Hkv, K], the pages that are; N for none.
      full: int32 [B], full pages of each row.
      num_pages: N.
    """

    def estimate(
        arrays: Mapping[str, Array], q: Array, read: Array, full: Array
    ) -> tuple[Array, Array]:
        head = jnp.arange(read.shape[0], dtype=jnp.int32)[:, None]
        chosen = jnp.zeros((read.shape[0], num_pages), bool)
        chosen = chosen.at[head, read].set(True, mode="drop")
        return index.estimate(
            arrays, q, chosen, full, config.scale(layer), soft_cap=config.attn_soft_cap
        )

    return AttentionOutput(*jax.vmap(estimate)(arrays, q, read, full))
