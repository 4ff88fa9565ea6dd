"""The public functions of attention over MLA latents, and their contract.

MLA (DeepSeek-V2, arXiv:2405.04434, section 2.1) keeps of a token one latent c and one rotated
position key r, which all heads share. A head's key is W_UK c and r, its value W_UV c. The absorbed
form never makes them: the query takes W_UK in (q_latent = q_nope W_UK), and W_UV is applied to
what attention returns, so that attention has one KV head whose value is c and whose key is c and r.

There are two pools, not one of [c, r]. A TPU pads rows to 128 lanes, so 512 + 64 elements take 640
either way, but a latent that lies alone begins and ends at a tile's edge whatever its width is, and
is key and value as it lies. To the kernels of paged attention the two are keys and values, so these
serve. And formats treat them apart: DeepSeek-V3.2 stores c in float8 and r in bfloat16.
"""

from importlib import import_module
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_pages import PackedPages
from kvjax.pallas_kernels.sparse_paged_attention.lists import bounded_lists
from kvjax.pallas_kernels.support import Implementation, choose
from kvjax.pallas_kernels.validate import check_at_least
from kvjax.pallas_kernels.validate_latents import check_latent_lists, check_latents

LatentPool = Float[Array, "N P Dc"] | PackedPages
RopePool = Float[Array, "N P Dr"] | PackedPages
"""Latents and position keys: plain, or packed as pages of one head, [N, 1, P, D]."""


def latent_attention(
    q_latent: Float[Array, "B H Dc"],
    q_rope: Float[Array, "B H Dr"],
    latents: LatentPool,
    ropes: RopePool,
    block_tables: Int32[Array, "B M"],
    lengths: Int32[Array, "B"],
    *,
    scale: float,
    page_stats: bool = False,
    implementation: Implementation | None = None,
) -> AttentionOutput:
    """Attend one query a sequence to the latents of its pages, all heads to the same.

    Row b reads slots 0 .. lengths[b] - 1 of the pages block_tables[b] names, slot s being entry
    s % P of page block_tables[b, s // P]; nothing else in the pools has any effect, whatever it
    holds. The score of a slot is scale * (q_latent . latent + q_rope . rope), the output is the sum
    of latents by softmax: the caller applies W_UV. Parts over disjoint slots merge by
    `merge_attention`, before or after W_UV. All sums are float32.

    Args:
        q_latent: [B, H, Dc], q_nope W_UK; float32, bfloat16 or float16.
        q_rope: [B, H, Dr], the rotated part of the queries, in the same dtype.
        latents: [N, P, Dc], float32, bfloat16 or float16, normalized as the model does; P from 8 to
            128 tokens. Or packed, [N, 1, P, Dc].
        ropes: [N, P, Dr], rotated position keys, in the latents' dtype. Or packed, [N, 1, P, Dr].
        block_tables: int32 [B, M], page ids; unused entries hold N (or anything else from 0 up).
        lengths: int32 [B], cached tokens a sequence; 0 gives out 0.
        scale: factor of the scores, that of the model's own heads: 1 / sqrt(nope + rope), times
            what YaRN adds. Never one of Dc + Dr, which says nothing about the model.
        page_stats: also return `page_max` and `page_sum`.
        implementation: None picks the Mosaic kernel on a TPU that can run it and XLA elsewhere;
            "reference", "xla", "tpu" or "gpu" insists.

    Returns:
        The `AttentionOutput`, T = B, Hq = H, Dv = Dc.

    Raises:
        ValueError: an argument breaks a rule above, or the named implementation cannot run (the
            message says why). Raised before anything is traced.
    """
    scale = check_latents(
        q_latent,
        q_rope,
        latents,
        ropes,
        block_tables,
        scale=scale,
        page_stats=page_stats,
        lengths=lengths,
    )
    return _attend(
        "latent_attention",
        implementation,
        (q_latent, q_rope, latents, ropes),
        jnp.asarray(block_tables),
        jnp.asarray(lengths),
        scale=scale,
        page_stats=page_stats,
    )


def ragged_latent_attention(
    q_latent: Float[Array, "T H Dc"],
    q_rope: Float[Array, "T H Dr"],
    latents: LatentPool,
    ropes: RopePool,
    block_tables: Int32[Array, "B M"],
    kv_lengths: Int32[Array, "B"],
    cu_q_lengths: Int32[Array, "B+1"],
    *,
    scale: float,
    page_stats: bool = False,
    residual: int | None = None,
    implementation: Implementation | None = None,
) -> AttentionOutput:
    """Attend a flat batch of prefill chunks and decodes to the latents of their sequences' pages.

    Queries are laid out as in `ragged_paged_attention`: those of sequence b are rows
    cu_q_lengths[b] .. cu_q_lengths[b + 1] - 1 and are the last of its kv_lengths[b] cached tokens;
    each sees the slots up to its own. Rows at or past cu_q_lengths[B] are padding: out 0, lse -inf.
    For many queries the expanded form is cheaper (`absorbed_or_expanded` says from how many).

    Args:
        q_latent: [T, H, Dc], as in `latent_attention`.
        q_rope: [T, H, Dr], likewise.
        latents: [N, P, Dc], plain or packed, likewise.
        ropes: [N, P, Dr], plain or packed, likewise.
        block_tables: int32 [B, M], page ids; unused entries hold N (or anything else from 0 up).
        kv_lengths: int32 [B], cached tokens a sequence, its queries' own included.
        cu_q_lengths: int32 [B + 1], where each sequence's queries start; 0 first, never falling.
        scale: factor of the scores, as in `latent_attention`.
        page_stats: also return `page_max` and `page_sum`, over the table of each query's sequence.
        residual: newest tokens that a query does not see here, because they were not encoded when
            it came, as in `ragged_paged_attention`. None sees all of them.
        implementation: None, "reference", "xla", "tpu" or "gpu", as in `latent_attention`.

    Returns:
        The `AttentionOutput`, T = q_latent.shape[0], Hq = H, Dv = Dc.

    Raises:
        ValueError: an argument breaks a rule above, or the named implementation cannot run (the
            message says why). Raised before anything is traced.
    """
    scale = check_latents(
        q_latent,
        q_rope,
        latents,
        ropes,
        block_tables,
        scale=scale,
        page_stats=page_stats,
        kv_lengths=kv_lengths,
        cu_q_lengths=cu_q_lengths,
    )
    if residual is not None:
        check_at_least("residual", residual, latents.shape[-2], ", a page, or None")
    return _attend(
        "ragged_latent_attention",
        implementation,
        (q_latent, q_rope, latents, ropes),
        jnp.asarray(block_tables),
        jnp.asarray(kv_lengths),
        jnp.asarray(cu_q_lengths),
        scale=scale,
        page_stats=page_stats,
        residual=None if residual is None else int(residual),
    )


def sparse_latent_attention(
    q_latent: Float[Array, "B H Dc"],
    q_rope: Float[Array, "B H Dr"],
    latents: LatentPool,
    ropes: RopePool,
    page_ids: Int32[Array, "B K"],
    page_tokens: Int32[Array, "B K"] | Bool[Array, "B K P"],
    *,
    scale: float,
    page_stats: bool = False,
    implementation: Implementation | None = None,
) -> AttentionOutput:
    """Attend each query to the pages, or the tokens of pages, that it lists: one list, all heads.

    This is the attention of DeepSeek-V3.2's sparse layers (DSA), over tokens (`pages_of_tokens`
    turns a choice of tokens into pages), or over whole pages. Rows need not be sequences: queries
    of one sequence that choose apart are rows of their own. Pages in which nothing counts are not
    read; a page of which anything counts is read once, whole.

    Args:
        q_latent: [B, H, Dc], as in `latent_attention`.
        q_rope: [B, H, Dr], likewise.
        latents: [N, P, Dc], plain or packed, likewise.
        ropes: [N, P, Dr], plain or packed, likewise.
        page_ids: int32 [B, K], no page twice in a row; what is not from 0 to N - 1 names no page.
        page_tokens: int32 [B, K], how many of the first tokens of each page count, or bool
            [B, K, P], which ones do.
        scale: factor of the scores, as in `latent_attention`.
        page_stats: also return `page_max` and `page_sum`, [B, H, K], in the list's order.
        implementation: None, "reference", "xla", "tpu" or "gpu", as in `latent_attention`.

    Returns:
        The `AttentionOutput`, T = B, Hq = H, Dv = Dc; a row whose list is empty has out 0.

    Raises:
        ValueError: an argument breaks a rule above, or the named implementation cannot run (the
            message says why). Raised before anything is traced.
    """
    scale = check_latent_lists(
        q_latent,
        q_rope,
        latents,
        ropes,
        page_ids,
        page_tokens,
        scale=scale,
        page_stats=page_stats,
    )
    num_pages, page_size = latents.shape[0], latents.shape[-2]
    chosen, counts = None, jnp.asarray(page_tokens)
    if counts.ndim == 3:
        chosen, counts = counts[:, None], jnp.where(counts.any(axis=2), page_size, 0)
    ids, counts = bounded_lists(
        jnp.asarray(page_ids)[:, None], counts[:, None], num_pages, page_size
    )
    return _attend(
        "sparse_latent_attention",
        implementation,
        (q_latent, q_rope, latents, ropes),
        ids,
        counts,
        chosen,
        scale=scale,
        page_stats=page_stats,
    )


def _attend(
    name: str,
    implementation: Implementation | None,
    operands: tuple[Array, Array, LatentPool, RopePool],
    *lists: Array | None,
    **options: Any,
) -> AttentionOutput:
    """Choose an implementation of the function called `name`, and call it."""
    q_latent, q_rope, *pools = operands
    latents, ropes = (_of_one_head(pool) for pool in pools)
    chosen = implementation_for(operands, implementation)
    # By name and only now: importing Pallas takes longer than importing JAX.
    backend = import_module(f"kvjax.pallas_kernels.latent_attention.{chosen}")
    result: AttentionOutput = getattr(backend, f"{name}_{chosen}")(
        jnp.asarray(q_latent),
        jnp.asarray(q_rope),
        latents,
        ropes,
        *lists,
        **options,
    )
    return result


def implementation_for(
    operands: tuple[Array, Array, LatentPool, RopePool], implementation: Implementation | None
) -> Implementation:
    """The implementation that a call with these queries and pools runs.

    Args:
        operands: `q_latent`, `q_rope`, `latents` and `ropes`.
        implementation: the caller's choice, or None.

    Raises:
        ValueError: the named implementation cannot run; the message says why.
    """
    q_latent, _, latents, ropes = operands
    pools = (latents, ropes)
    plain = next((pool for pool in pools if not isinstance(pool, PackedPages)), q_latent)
    return choose(
        "latent_attention",
        implementation,
        head_dim=ropes.shape[-1],
        v_head_dim=latents.shape[-1],
        page_size=latents.shape[-2],
        dtype=plain.dtype,
        pools=pools,
    )


def _of_one_head(pool: Any) -> Any:
    """A pool as other kernels take it, with an axis of one KV head."""
    return pool if isinstance(pool, PackedPages) else jnp.asarray(pool)[:, None]
