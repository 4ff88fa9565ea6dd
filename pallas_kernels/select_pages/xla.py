"""The choice of pages with XLA's top-k, of which equal scores keep their order."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from kvjax.pallas_kernels.select_pages.selection import Selection


def select_pages_xla(
    ranked: Float32[Array, "B Hkv M"], counts: Int32[Array, "B Hkv"], room: int
) -> Selection:
    """Choose the greatest; the contract is that of `select_pages`.

    Args:
        ranked: float32 [B, Hkv, M], no NaN; pages that do not exist are -inf and last.
        counts: int32 [B, Hkv], how many to choose, at most K and M.
        room: K.

    Returns:
        The `Selection`.
    """
    width = ranked.shape[2]
    best = lax.top_k(ranked, min(room, width))[1].astype(jnp.int32)  # best first
    place = jnp.arange(best.shape[2], dtype=jnp.int32)[None, None]
    chosen = jnp.sort(jnp.where(place < counts[..., None], best, width), axis=2)
    missing = room - best.shape[2]
    return Selection(jnp.pad(chosen, ((0, 0), (0, 0), (0, missing)), constant_values=width), counts)
