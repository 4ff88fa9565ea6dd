"""Scores of a lightning indexer as their definition reads, in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt8

from kvjax.pallas_kernels.lightning_indexer.float4 import float4_page
from kvjax.pallas_kernels.lightning_indexer.rectify import rectified


def lightning_scores_reference(
    q: Float[Array, "G R Hi Di"],
    weights: Float32[Array, "G R Hi"],
    keys: Float[Array, "N P Di"] | UInt8[Array, "N half Di"],
    key_scales: Float32[Array, "N P"] | None,
    page_ids: Int32[Array, "G M"],
    page_counts: Int32[Array, "G"],
) -> Float32[Array, "G R S"]:
    """Score every slot of the tables, also those that hold no token.

    The yardstick of the other implementations: obvious, not fast.

    Args:
        q: [G, R, Hi, Di], tiles of queries that look at the same pages.
        weights: float32 [G, R, Hi], scaled.
        keys: [N, P, Di], or float4 codes, uint8 [N, P / 2, Di].
        key_scales: float32 [N, P], or None.
        page_ids: int32 [G, M], all from 0 to N - 1.
        page_counts: int32 [G], not needed here.

    Returns:
        float32 [G, R, M * P].
    """
    tokens = (page_ids.shape[0], -1)
    if keys.dtype == jnp.uint8:
        keys = float4_page(keys.astype(jnp.int32), axis=1)
    held = keys[page_ids].astype(jnp.float32).reshape(*tokens, keys.shape[2])
    if key_scales is not None:
        held *= key_scales[page_ids].reshape(tokens)[..., None]
    highest = jax.lax.Precision.HIGHEST  # a TPU would multiply in bfloat16 otherwise
    products = jnp.einsum("grhd,gsd->grhs", q.astype(jnp.float32), held, precision=highest)
    return jnp.sum(weights[..., None] * rectified(products), axis=2)
