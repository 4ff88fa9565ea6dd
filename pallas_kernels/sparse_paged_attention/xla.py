"""Sparse paged attention in plain XLA: a loop over the blocks of the lists that hold anything.

A block is a run of columns of one sequence's lists, all KV heads together; where the pool has one
KV head, those of a few sequences, so that short lists are not a block each. Blocks without a token
are not visited, wherever in the lists they stand, so time follows what is listed and not K.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped

from kvjax.pallas_kernels.block_walk import BLOCK_TOKENS, Plan, attend_blocks
from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_pages import KeyPool, ValuePool

TOGETHER = 4
"""Most sequences whose lists share a block, where the pool has one KV head."""


def sparse_paged_attention_xla(
    q: Float[Array, "B Hq D"],
    k_pages: KeyPool,
    v_pages: ValuePool,
    page_ids: Int32[Array, "B Hkv K"],
    page_tokens: Int32[Array, "B Hkv K"],
    *,
    scale: float,
    sink_logits: Float[Array, "Hq"] | None,
    soft_cap: float | None,
    page_stats: bool,
    value_q: Float[Array, "B Hq Dv"] | None = None,
    chosen: Bool[Array, "B Hkv K P"] | None = None,
) -> AttentionOutput:
    """Attend to the listed pages; the contract is that of `sparse_paged_attention`.

    Args:
        q: [B, Hq, D].
        k_pages: [N, Hkv, P, D].
        v_pages: [N, Hkv, P, Dv].
        page_ids: int32 [B, Hkv, K], all from 0 to N - 1.
        page_tokens: int32 [B, Hkv, K], from 0 to P; 0 where there is no page.
        scale: factor of the scores.
        sink_logits: [Hq] or None.
        soft_cap: bound of the scores, or None.
        page_stats: whether to return page statistics.
        value_q: [B, Hq, Dv], queries that score the values too (MLA; no soft cap then), or None.
        chosen: bool [B, Hkv, K, P], which of the tokens that count do; None means all.

    Returns:
        The `AttentionOutput`, T = B.
    """
    page_size = k_pages.shape[2]
    rows, query_heads, head_dim = q.shape
    if k_pages.shape[1] == 1:
        together = next(n for n in range(TOGETHER, 0, -1) if rows % n == 0)
        lists = (rows // together, together, page_ids.shape[2])
        q = q.reshape(lists[0], together * query_heads, head_dim)
        value_q = None if value_q is None else value_q.reshape(*q.shape[:2], -1)
        page_ids, page_tokens = page_ids.reshape(lists), page_tokens.reshape(lists)
        chosen = None if chosen is None else chosen.reshape(*lists, page_size)
        sink_logits = None if sink_logits is None else jnp.tile(sink_logits, together)
    batch, kv_heads, width = page_ids.shape
    columns = -(-width // max(1, BLOCK_TOKENS // page_size))
    pages = -(-width // columns)  # a block, which are about equal

    def by_block(lists: Shaped[Array, "B Hkv K *P"]) -> Shaped[Array, "blocks Hkv pages *P"]:
        rest = lists.shape[3:]
        extra = ((0, 0), (0, 0), (0, columns * pages - width))
        lists = jnp.pad(lists, extra + ((0, 0),) * len(rest))
        lists = lists.reshape(batch, kv_heads, columns, pages, *rest).swapaxes(1, 2)
        return lists.reshape(batch * columns, kv_heads, pages, *rest)

    tokens = by_block(page_tokens)
    used = (tokens > 0).any(axis=(1, 2))
    order = jnp.argsort(~used, stable=True).astype(jnp.int32)
    tokens = tokens[order]
    plan = Plan(
        pages=by_block(page_ids)[order],
        row=order // columns,
        column=order % columns,
        length=used.sum(dtype=jnp.int32),
    )
    slot = jnp.arange(page_size, dtype=jnp.int32)[None, None]
    chosen = None if chosen is None else by_block(chosen)[order]

    def visible(i: Int32[Array, ""]) -> Bool[Array, "Hkv tokens"]:
        seen = slot < tokens[i][..., None]
        seen = seen if chosen is None else seen & chosen[i]
        return seen.reshape(kv_heads, pages * page_size)

    result = attend_blocks(
        q,
        k_pages,
        v_pages,
        plan,
        visible,
        columns=columns,
        scale=scale,
        soft_cap=soft_cap,
        sink_logits=sink_logits,
        page_stats=page_stats,
        value_q=value_q,
    )
    if result.page_max is not None and result.page_sum is not None:
        result = result._replace(
            page_max=result.page_max[:, :, :width], page_sum=result.page_sum[:, :, :width]
        )
    by_row: AttentionOutput = jax.tree.map(
        lambda x: x.reshape(rows, query_heads, *x.shape[2:]), result
    )
    return by_row
