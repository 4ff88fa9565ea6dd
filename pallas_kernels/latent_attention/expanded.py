"""Attention over latents that makes every head's keys and values of them, a block at a time."""

from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.ragged_paged_attention.reference import ragged_paged_attention_reference
from kvjax.pallas_kernels.ragged_paged_attention.xla import ragged_paged_attention_xla
from kvjax.pallas_kernels.validate_latents import check_expanded

Expand = Callable[
    [Float[Array, "S Dc"], Float[Array, "S Dr"]],
    tuple[Float[Array, "S H D"], Float[Array, "S H Dv"]],
]
"""Every head's keys and values of S tokens, of their latents and position keys."""

EXPANDED_QUERIES = 512
"""Most queries for which a token is expanded once; of more, it is for each so many."""


def expanded_latent_attention(
    q: Float[Array, "T H D"],
    latents: Float[Array, "N P Dc"],
    ropes: Float[Array, "N P Dr"],
    block_tables: Int32[Array, "B M"],
    kv_lengths: Int32[Array, "B"],
    cu_q_lengths: Int32[Array, "B+1"],
    *,
    expand: Expand,
    scale: float,
    implementation: Literal["reference", "xla"] | None = None,
) -> AttentionOutput:
    """Attend a flat batch to its sequences' latents as to the keys and values made of them.

    The same as `ragged_latent_attention` of absorbed queries, with outputs that are values already,
    and cheaper for many queries of a sequence (`absorbed_or_expanded`). Keys and values exist for
    one block of a sequence's tokens at a time, whatever the context. There is no Mosaic or Triton
    kernel: it is loops of matrix multiplications.

    Args:
        q: [T, H, D], as the keys that `expand` makes.
        latents: [N, P, Dc].
        ropes: [N, P, Dr].
        block_tables: int32 [B, M], as in `ragged_latent_attention`.
        kv_lengths: int32 [B], likewise.
        cu_q_lengths: int32 [B + 1], likewise.
        expand: makes keys [S, H, D] and values [S, H, Dv] of latents [S, Dc] and position keys
            [S, Dr], each token's of its own.
        scale: factor of the scores, 1 / sqrt(D) in DeepSeek's models.
        implementation: None means "xla"; "reference" expands all pages at once.

    Returns:
        The `AttentionOutput`, Hq = H, without page statistics.

    Raises:
        ValueError: an argument breaks a rule above; the message names it. Raised before anything
            is traced.
    """
    scale = check_expanded(
        q,
        latents,
        ropes,
        block_tables,
        scale=scale,
        implementation=implementation,
        kv_lengths=kv_lengths,
        cu_q_lengths=cu_q_lengths,
    )
    tables, lengths, starts = map(jnp.asarray, (block_tables, kv_lengths, cu_q_lengths))
    options: dict[str, Any] = {"sink_tokens": 0, "page_stats": False}
    options |= dict.fromkeys(("window", "sink_logits", "soft_cap"))
    q, latents, ropes = jnp.asarray(q), jnp.asarray(latents), jnp.asarray(ropes)
    if implementation == "reference":
        pages, size, _ = latents.shape
        made = expand(latents.reshape(pages * size, -1), ropes.reshape(pages * size, -1))
        keys, values = (x.reshape(pages, size, *x.shape[1:]).swapaxes(1, 2) for x in made)
        return ragged_paged_attention_reference(
            q, keys, values, tables, lengths, starts, scale=scale, **options
        )
    return ragged_paged_attention_xla(
        q,
        ropes[:, None],
        latents[:, None],
        tables,
        lengths,
        starts,
        scale=scale,
        expand=expand,
        query_block=EXPANDED_QUERIES,
        **options,
    )
