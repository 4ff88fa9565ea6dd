"""DeepSeek's sparse attention (DSA) over tiers: index keys stay near, pages of chosen tokens come.

In every step the model's own indexer scores all index keys of a row, which are small and stay on
the device, and chooses tokens as it does without tiers. The pages that hold them are what the step
reads, and of these it attends to the chosen tokens alone.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from kvjax.cache import PagedKVCache, init
from kvjax.decode.attend_chosen import Chosen
from kvjax.spec import KVSpec, LayerSpec


def index_pages(spec: KVSpec, *, batch: int, pages: int, page_size: int) -> PagedKVCache:
    """A cache of all rows' index keys and of nothing else: page n of row b is its page b N + n.

    Args:
      spec: of the model, whose layers all keep latents.
      batch: B.
      pages: N, most pages of a row.
      page_size: P.
    """
    layers = tuple(
        LayerSpec.mla(1, 0, index_dim=layer.index_dim, top_tokens=layer.top_tokens)
        for layer in spec.layers
    )
    cache = init(
        dataclasses.replace(spec, layers=layers),
        num_pages=batch * pages,
        batch=batch,
        max_pages=pages,
        page_size=page_size,
    )
    tables = jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages)
    # Position keys of these layers have no elements: nothing is kept but index keys.
    return dataclasses.replace(cache, v_pages=cache.k_pages, block_tables=tables)


def pages_of_choice(
    chosen: Chosen | None,
    lengths: Int32[Array, " B"],
    *,
    room: int,
    pages: int,
    page_size: int,
) -> tuple[Int32[Array, "B K"], Float32[Array, "B N"]]:
    """The full pages that hold a step's chosen tokens, and what every page is worth keeping near.

    Args:
      chosen: of a step; None is all tokens, alike.
      lengths: int32 [B], tokens in pages.
      room: K, as many as can hold chosen tokens.
      pages: N.
      page_size: P.

    Returns:
      The pages, and then N; and the greatest finite score among each page's tokens.
    """
    page = jnp.arange(pages, dtype=jnp.int32)[None]
    is_full = page < (lengths // page_size)[:, None]
    if chosen is None:
        wanted, worth = is_full, jnp.zeros(is_full.shape, jnp.float32)
    else:
        assert chosen.scores is not None
        row = jnp.arange(lengths.shape[0], dtype=jnp.int32)[:, None]
        wanted = jnp.zeros(is_full.shape, bool)
        wanted = wanted.at[row, chosen.token_ids // page_size].set(True, mode="drop") & is_full
        finite = jnp.where(jnp.isfinite(chosen.scores), chosen.scores, jnp.finfo(jnp.float32).min)
        worth = jnp.max(finite.reshape(*is_full.shape, page_size), axis=2)
    order = jnp.argsort(~wanted, axis=1, stable=True).astype(jnp.int32)[:, :room]
    there = jnp.take_along_axis(wanted, order, axis=1)
    return jnp.where(there, order, pages), worth


def tables_of(
    pages: Int32[Array, "B n"], places: Int32[Array, "B n"], *, total: int, none: int
) -> Int32[Array, "B N"]:
    """Block tables by which tokens of a row are found in a pool that holds some of its pages.

    Args:
      pages: int32 [B, n], which; N is none.
      places: int32 [B, n], where each is in the pool.
      total: N.
      none: what stands for pages that are not there, past the pool.
    """
    row = jnp.arange(pages.shape[0], dtype=jnp.int32)[:, None]
    table = jnp.full((pages.shape[0], total), none, jnp.int32)
    return table.at[row, pages].set(places, mode="drop")
