"""The public function that scores pages by their representatives, and its contract."""

from importlib import import_module
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from kvjax.pallas_kernels.support import Implementation, choose
from kvjax.pallas_kernels.validate_lists import check_representatives

Aggregate = Literal["max", "sum", "mean", "none"]


def page_scores(
    q: Float[Array, "B Hq D"],
    representatives: tuple[Float[Array, "N Hkv D"], ...],
    block_tables: Int32[Array, "B M"],
    page_counts: Int32[Array, "B"],
    *,
    aggregate: Aggregate,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Float32[Array, "B heads M"]:
    """Score the pages of each sequence for one query, without their keys.

    A page is either its mean key, whose score is the dot product (ShadowKV's landmarks,
    arXiv:2410.21465, section 4.1), or the bounds of its keys, channel by channel, whose score,
    sum over d of max(q[d] * low[d], q[d] * high[d]), no key within them exceeds (Quest,
    arXiv:2406.10774, section 3.3). Query head h reads KV head h // (Hq // Hkv). All arithmetic is
    float32. What pages that do not exist hold has no effect.

    Args:
        q: [B, Hq, D], float32, bfloat16 or float16, position encoding already applied.
        representatives: `(mean,)` or `(low, high)`, each [N, Hkv, D], one dtype, a row a page.
        block_tables: int32 [B, M], page ids; an entry exists if it is one of the row's first
            page_counts[b] and names a page from 0 to N - 1.
        page_counts: int32 [B], pages that are to be scored; what is past M does not count.
        aggregate: how the scores of the query heads of a KV head become one: their "max", "sum"
            or "mean"; "none" keeps a score for every query head.
        scale: factor of the scores; None means D ** -0.5.
        implementation: None picks the Mosaic kernel on a TPU that can run it and XLA elsewhere;
            "reference", "xla", "tpu" or "gpu" insists.

    Returns:
        float32 [B, Hkv, M], or [B, Hq, M] if `aggregate` is "none"; -inf for pages that do not
        exist. A page whose representative is NaN has a NaN score, and no other page has.

    Raises:
        ValueError: an argument breaks a rule above, or the named implementation cannot run (the
            message says why). Raised before anything is traced.
    """
    scale = check_representatives(
        q, representatives, block_tables, page_counts, aggregate=aggregate, scale=scale
    )
    chosen = choose(
        "page_scores", implementation, head_dim=q.shape[2], dtype=representatives[0].dtype
    )
    # By name and only now: importing Pallas takes longer than importing JAX.
    backend = import_module(f"kvjax.pallas_kernels.page_scores.{chosen}")
    num_pages, kv_heads, _ = representatives[0].shape
    batch, width = block_tables.shape
    ids = jnp.asarray(block_tables)
    counts = jnp.clip(jnp.asarray(page_counts), 0, width)
    entry = jnp.arange(width, dtype=jnp.int32)[None]
    exists = (entry < counts[:, None]) & (ids >= 0) & (ids < num_pages)
    by_head: Array = getattr(backend, f"page_scores_{chosen}")(
        jnp.asarray(q).astype(jnp.float32) * jnp.float32(scale),
        tuple(map(jnp.asarray, representatives)),
        jnp.clip(ids, 0, num_pages - 1),
        counts,
    )
    grouped = by_head.reshape(batch, kv_heads, -1, width)
    if aggregate == "max":
        scores = grouped.max(axis=2)
    elif aggregate == "none":
        scores = by_head
    else:
        scores = grouped.sum(axis=2) if aggregate == "sum" else grouped.mean(axis=2)
    return jnp.where(exists[:, None], scores, -jnp.inf)
