"""Scores of low-bit pages as their definition reads, in float32, with no regard for memory."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from kvjax.pallas_kernels.packed_bits import PLANES


def low_bit_scores_reference(
    q: Float[Array, "B Hq D"],
    pages: Mapping[str, Array],
    page_ids: Int32[Array, "B Hkv M"],
    page_counts: Int32[Array, "B Hkv"],
    *,
    bits: int,
    scale: float,
    soft_cap: float | None,
) -> Float32[Array, "B Hq M"]:
    """Score every entry of the lists, also those that do not exist; see `low_bit_scores`.

    The yardstick of the other implementations: obvious, not fast. It materialises every listed page
    ([B, Hkv, M, P, D], float32).

    Args:
        q: [B, Hq, D].
        pages: see `low_bit_scores`.
        page_ids: int32 [B, Hkv, M], all from 0 to N - 1.
        page_counts: int32 [B, Hkv], not needed here.
        bits: 2, 3 or 4.
        scale: factor of the scores.
        soft_cap: bound of the scores, or None.

    Returns:
        float32 [B, Hq, M].
    """
    batch, kv_heads, width = page_ids.shape
    head = jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
    listed = {name: each[head, page_ids] for name, each in pages.items()}
    codes, below = jnp.uint8(0), 0
    for name, wide in PLANES[bits].items():
        fields = [(listed[name] >> shift) & (2**wide - 1) for shift in range(0, 8, wide)]
        codes = codes | (jnp.concatenate(fields, axis=3) << below)
        below += wide
    unit = listed["unit"].astype(jnp.float32)
    step = (listed["step"].astype(jnp.float32) * unit[..., :1])[:, :, :, None]
    middle = (listed["middle"].astype(jnp.float32) * unit[..., 1:])[:, :, :, None]
    keys = middle + step * (codes.astype(jnp.float32) - (2**bits - 1) / 2)
    grouped = q.astype(jnp.float32).reshape(batch, kv_heads, -1, q.shape[2])
    highest = jax.lax.Precision.HIGHEST  # a TPU would multiply in bfloat16 otherwise
    scores = scale * jnp.einsum("bhgd,bhmpd->bhgmp", grouped, keys, precision=highest)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    return jax.nn.logsumexp(scores, axis=4).reshape(batch, -1, width)
