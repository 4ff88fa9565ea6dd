"""Attention over latents of tokens that each query names, read as finely as a machine reads."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.pallas_kernels.latent_attention.api import (
    LatentPool,
    RopePool,
    implementation_for,
    sparse_latent_attention,
)
from kvjax.pallas_kernels.latent_attention.token_pages import pages_of_tokens
from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_pages import PackedPages
from kvjax.pallas_kernels.sparse_paged_attention.xla import sparse_paged_attention_xla
from kvjax.pallas_kernels.support import Implementation
from kvjax.pallas_kernels.validate_latents import check_latent_tokens

GRANULE = 8
"""Tokens that a TPU copies together: rows of a tile."""


def token_latent_attention(
    q_latent: Float[Array, "B H Dc"],
    q_rope: Float[Array, "B H Dr"],
    latents: LatentPool,
    ropes: RopePool,
    token_ids: Int32[Array, "B T"],
    block_tables: Int32[Array, "B M"],
    *,
    scale: float,
    implementation: Implementation | None = None,
) -> AttentionOutput:
    """Attend each query to the tokens that it names: one list, all heads (DSA).

    Rows need not be sequences: queries of one sequence that choose apart are rows of their own. XLA
    gathers the tokens and nothing else. The kernels read the parts of 8 tokens that hold a chosen
    one, whatever a page's size is (of packed pools the pages), each once.

    Args:
        q_latent: [B, H, Dc], as in `latent_attention`.
        q_rope: [B, H, Dr], likewise.
        latents: [N, P, Dc], plain or packed, likewise.
        ropes: [N, P, Dr], plain or packed, likewise.
        token_ids: int32 [B, T], slots of each row's sequence, none twice, in any order; what is not
            from 0 to M * P - 1 names none, as in what `top_tokens` returns.
        block_tables: int32 [B, M], page ids; what is not from 0 to N - 1 holds no token.
        scale: factor of the scores, as in `latent_attention`.
        implementation: None, "reference", "xla", "tpu" or "gpu", as in `latent_attention`.

    Returns:
        The `AttentionOutput`, T = B, Hq = H, Dv = Dc; a row that names nothing has out 0.

    Raises:
        ValueError: an argument breaks a rule above, or the named implementation cannot run (the
            message says why). Raised before anything is traced.
    """
    scale = check_latent_tokens(
        q_latent, q_rope, latents, ropes, token_ids, block_tables, scale=scale
    )
    chosen = implementation_for((q_latent, q_rope, latents, ropes), implementation)
    tokens, tables = jnp.asarray(token_ids), jnp.asarray(block_tables)
    num_pages, size = latents.shape[0], latents.shape[-2]
    plain = not isinstance(latents, PackedPages) and not isinstance(ropes, PackedPages)
    if chosen == "xla" and plain:
        column = jnp.clip(tokens // size, 0, tables.shape[1] - 1)
        pages = jnp.take_along_axis(tables, column, axis=1)
        named = (tokens >= 0) & (tokens < tables.shape[1] * size)
        named &= (pages >= 0) & (pages < num_pages)
        return sparse_paged_attention_xla(
            jnp.asarray(q_rope),
            _parts(ropes, 1)[:, None],
            _parts(latents, 1)[:, None],
            jnp.where(named, pages * size + tokens % size, 0)[:, None],
            named.astype(jnp.int32)[:, None],
            scale=scale,
            sink_logits=None,
            soft_cap=None,
            page_stats=False,
            value_q=jnp.asarray(q_latent),
        )
    if plain and size % GRANULE == 0:
        parts = size // GRANULE
        part = jnp.arange(parts, dtype=jnp.int32)[None, None]
        known = (tables >= 0) & (tables < num_pages)
        tables = jnp.where(known[..., None], tables[..., None] * parts + part, num_pages * parts)
        tables = tables.reshape(tables.shape[0], -1)
        latents, ropes = _parts(latents, GRANULE), _parts(ropes, GRANULE)
        num_pages, size = num_pages * parts, GRANULE
    listed = pages_of_tokens(tokens, tables, num_pages=num_pages, page_size=size)
    return sparse_latent_attention(
        q_latent,
        q_rope,
        latents,
        ropes,
        listed.page_ids,
        listed.page_tokens,
        scale=scale,
        implementation=chosen,
    )


def _parts(pool: Any, tokens: int) -> Float[Array, "parts tokens D"]:
    """A pool as one of smaller pages, which lie as the tokens of larger ones do."""
    return jnp.asarray(pool).reshape(-1, tokens, pool.shape[2])
