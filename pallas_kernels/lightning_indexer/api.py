"""The public functions that score tokens by a lightning indexer, and their contract.

DeepSeek sparse attention (DeepSeek-V3.2-Exp, section 2.1) keeps of a token, beside its latent, one
small index key k that all index heads share. A query t, with a vector q[j] and a weight w[j] of
each head, scores a token s by

    I[t, s] = scale * sum over j of w[t, j] * max(q[t, j] . k[s], 0)

and attends to the tokens of greatest score alone, all its heads to the same. The model rotates a
part of q and k by position. (DeepSeek also turns both by a Hadamard matrix before they are rounded;
being orthogonal it changes no product, so it is left to callers who want it.)
"""

from importlib import import_module

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt8

from kvjax.pallas_kernels.lightning_indexer.tiles import query_tiles
from kvjax.pallas_kernels.support import Implementation, choose
from kvjax.pallas_kernels.validate_indexer import check_indexer, tokens_a_page

IndexKeys = Float[Array, "N P Di"] | UInt8[Array, "N half Di"]
"""A pool of index keys; of float4 ones a row holds two tokens."""


def lightning_scores(
    q: Float[Array, "B Hi Di"],
    weights: Float32[Array, "B Hi"],
    keys: IndexKeys,
    block_tables: Int32[Array, "B M"],
    lengths: Int32[Array, "B"],
    *,
    scale: float,
    key_scales: Float32[Array, "N P"] | None = None,
    implementation: Implementation | None = None,
) -> Float32[Array, "B S"]:
    """Score the tokens of each sequence for one query.

    Row b scores slots 0 .. lengths[b] - 1 of the pages block_tables[b] names, slot s being entry
    s % P of page block_tables[b, s // P]; nothing else in the pool has any effect, whatever it
    holds. All sums are float32.

    Args:
        q: [B, Hi, Di], index queries, position encoding applied; float32, bfloat16 or float16.
        weights: float32 [B, Hi], of either sign.
        keys: [N, P, Di], index keys; float32, bfloat16 or float16, or, with `key_scales`,
            float8_e4m3fn, or uint8 [N, P / 2, Di], float4_e2m1fn codes of token t in the low bits
            of row t and of token P / 2 + t in its high bits. P from 8 to 128 tokens.
        block_tables: int32 [B, M], page ids; unused entries hold N (or anything else from 0 up).
        lengths: int32 [B], cached tokens a sequence.
        scale: factor of the scores; DeepSeek's is (Hi * Di) ** -0.5.
        key_scales: float32 [N, P], what a token's float8 or float4 key is multiplied by; positive.
        implementation: None picks the Mosaic kernel on a TPU that can run it and XLA elsewhere;
            "reference", "xla", "tpu" or "gpu" insists.

    Returns:
        float32 [B, S], S = M * P; -inf for slots that hold no token. A key that is NaN has a NaN
        score, a query or weight that is NaN has NaN scores, and no other has.

    Raises:
        ValueError: an argument breaks a rule above, or the named implementation cannot run (the
            message says why). Raised before anything is traced.
    """
    scale = check_indexer(
        q, weights, keys, block_tables, scale=scale, key_scales=key_scales, lengths=lengths
    )
    size, ends = tokens_a_page(keys), jnp.asarray(lengths)
    scores = _scores(
        implementation,
        (jnp.asarray(q)[:, None], jnp.asarray(weights)[:, None] * jnp.float32(scale)),
        (jnp.asarray(keys), key_scales),
        jnp.asarray(block_tables),
        -(-ends // size),
    )[:, 0]
    return _seen(scores, ends)


def ragged_lightning_scores(
    q: Float[Array, "T Hi Di"],
    weights: Float32[Array, "T Hi"],
    keys: IndexKeys,
    block_tables: Int32[Array, "B M"],
    kv_lengths: Int32[Array, "B"],
    cu_q_lengths: Int32[Array, "B+1"],
    *,
    scale: float,
    key_scales: Float32[Array, "N P"] | None = None,
    implementation: Implementation | None = None,
) -> Float32[Array, "T S"]:
    """Score the tokens of each sequence for a flat batch of prefill chunks and decodes.

    Queries are laid out as in `ragged_paged_attention`: those of sequence b are rows
    cu_q_lengths[b] .. cu_q_lengths[b + 1] - 1 and are the last of its kv_lengths[b] cached tokens;
    each scores the slots up to its own. A few queries of one sequence read its keys together.

    Args:
        q: [T, Hi, Di], as in `lightning_scores`.
        weights: float32 [T, Hi], likewise.
        keys: [N, P, Di] or uint8 [N, P / 2, Di], likewise.
        block_tables: int32 [B, M], page ids; unused entries hold N (or anything else from 0 up).
        kv_lengths: int32 [B], cached tokens a sequence, its queries' own included.
        cu_q_lengths: int32 [B + 1], where each sequence's queries start; 0 first, never falling.
        scale: factor of the scores.
        key_scales: float32 [N, P], of float8 and float4 keys.
        implementation: None, "reference", "xla", "tpu" or "gpu", as in `lightning_scores`.

    Returns:
        float32 [T, S], S = M * P; -inf for slots that a query does not see. Rows at or past
        cu_q_lengths[B] are padding and see none.

    Raises:
        ValueError: an argument breaks a rule above, or the named implementation cannot run (the
            message says why). Raised before anything is traced.
    """
    scale = check_indexer(
        q,
        weights,
        keys,
        block_tables,
        scale=scale,
        key_scales=key_scales,
        kv_lengths=kv_lengths,
        cu_q_lengths=cu_q_lengths,
    )
    tiles = query_tiles(jnp.asarray(kv_lengths), jnp.asarray(cu_q_lengths), q.shape[0])
    scores = _scores(
        implementation,
        (
            jnp.asarray(q).at[tiles.queries].get(mode="clip"),
            jnp.asarray(weights).at[tiles.queries].get(mode="clip") * jnp.float32(scale),
        ),
        (jnp.asarray(keys), key_scales),
        jnp.asarray(block_tables).at[tiles.sequences].get(mode="clip"),
        -(-tiles.lengths // tokens_a_page(keys)),
    )
    return _seen(scores.at[tiles.tile, tiles.row].get(mode="clip"), tiles.visible)


def _scores(
    implementation: Implementation | None,
    queries: tuple[Float[Array, "G R Hi Di"], Float32[Array, "G R Hi"]],
    pool: tuple[IndexKeys, Float32[Array, "N P"] | None],
    tables: Int32[Array, "G M"],
    page_counts: Int32[Array, "G"],
) -> Float32[Array, "G R S"]:
    """Score all slots of the pages that each tile of queries looks at."""
    (q, weights), (keys, key_scales) = queries, pool
    # The kernels read float8 and float4 as bytes, and so as what queries are.
    kind = keys.dtype if key_scales is None else jnp.dtype(jnp.bfloat16)
    chosen = choose(
        "lightning_indexer",
        implementation,
        head_dim=keys.shape[2],
        page_size=keys.shape[1],  # rows, which is what a kernel's copies are made of
        dtype=kind,
    )
    # By name and only now: importing Pallas takes longer than importing JAX.
    backend = import_module(f"kvjax.pallas_kernels.lightning_indexer.{chosen}")
    scores: Array = getattr(backend, f"lightning_scores_{chosen}")(
        q if q.dtype == jnp.bfloat16 else q.astype(jnp.float32),
        weights,
        keys,
        None if key_scales is None else jnp.asarray(key_scales),
        jnp.clip(tables, 0, keys.shape[0] - 1),
        jnp.clip(page_counts, 0, tables.shape[1]),
    )
    return scores


def _seen(scores: Float32[Array, "T S"], visible: Int32[Array, "T"]) -> Float32[Array, "T S"]:
    """Scores of the first `visible` slots of each row, and -inf."""
    slot = jnp.arange(scores.shape[1], dtype=jnp.int32)[None]
    return jnp.where(slot < visible[:, None], scores, -jnp.inf)
