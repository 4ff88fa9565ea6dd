"""The choice of pages as its definition reads: sort everything, take the first."""

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from kvjax.pallas_kernels.select_pages.selection import Selection


def select_pages_reference(
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
    order = jnp.argsort(-ranked, axis=2, stable=True).astype(jnp.int32)
    rank = jnp.argsort(order, axis=2)
    page = jnp.arange(width, dtype=jnp.int32)[None, None]
    kept = jnp.sort(jnp.where(rank < counts[..., None], page, width), axis=2)
    kept = jnp.pad(kept, ((0, 0), (0, 0), (0, room)), constant_values=width)
    return Selection(kept[:, :, :room], counts)
