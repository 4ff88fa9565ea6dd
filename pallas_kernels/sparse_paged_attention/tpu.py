"""Sparse paged attention as a Mosaic TPU kernel (for a TPU, or interpreted)."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int32

from kvjax.pallas_kernels.merge_attention.xla import add_sink
from kvjax.pallas_kernels.mosaic.attend import attend_work
from kvjax.pallas_kernels.mosaic.block import Masking
from kvjax.pallas_kernels.mosaic.pools import block_itemsize
from kvjax.pallas_kernels.mosaic.tiles import choose_tiles
from kvjax.pallas_kernels.mosaic.work import list_work, lists_per_kernel
from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_pages import KeyPool, ValuePool


def sparse_paged_attention_tpu(
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
    interpret: bool | pltpu.InterpretParams = False,
) -> AttentionOutput:
    """Attend to the listed pages; the contract is that of `sparse_paged_attention`.

    It is the kernel of `paged_attention` with every (sequence, KV head) as a sequence of its own,
    over a pool of N * Hkv pages of one head: the pool stays where it is, and one head's page, which
    is contiguous, is one copy. Lists are sorted so that whole pages come first; only the pages
    after them are masked, by their token counts in scalar memory. Packed pools are unpacked in
    VMEM, as in `paged_attention`; their scales are gathered, by page and head.

    Args:
        q: [B, Hq, D].
        k_pages: [N, Hkv, P, D], plain or packed.
        v_pages: [N, Hkv, P, Dv], likewise.
        page_ids: int32 [B, Hkv, K], all from 0 to N - 1.
        page_tokens: int32 [B, Hkv, K], from 0 to P; 0 where there is no page.
        scale: factor of the scores.
        sink_logits: [Hq] or None.
        soft_cap: bound of the scores, or None.
        page_stats: whether to return page statistics.
        value_q: [B, Hq, Dv], queries that score the values too (MLA; no soft cap then), or None.
        chosen: bool [B, Hkv, K, P], which of the tokens that count do; None means all.
        interpret: whether, and how, to interpret the kernel instead of compiling it.

    Returns:
        The `AttentionOutput`, T = B.
    """
    batch, heads, head_dim = q.shape
    _, kv_heads, page_size, v_head_dim = v_pages.shape
    width = page_ids.shape[2]
    lists, group = batch * kv_heads, heads // kv_heads
    out_dtype = q.dtype if sink_logits is None else jnp.dtype(jnp.float32)
    tiles = choose_tiles(
        num_queries=lists,
        group=group,
        kv_heads=1,
        page_size=page_size,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        q_itemsize=q.dtype.itemsize,
        kv_itemsize=block_itemsize((k_pages, v_pages), q.dtype),
        out_itemsize=out_dtype.itemsize,
        decode=True,
        scored_values=value_q is not None,
    )
    head = jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
    ids = (page_ids * kv_heads + head).reshape(lists, width)
    tokens = page_tokens.reshape(lists, width)
    if chosen is not None:
        # The choice says what counts of a page; what is left to say is which pages are read.
        slot = jnp.arange(page_size, dtype=jnp.int32)[None, None]
        chosen = chosen.reshape(lists, width, page_size) & (slot < tokens[..., None])
        tokens = jnp.where(chosen.any(axis=2), page_size, 0)
    kind = jnp.where(tokens == page_size, 0, jnp.where(tokens > 0, 1, 2))
    order = jnp.argsort(kind, axis=1, stable=True).astype(jnp.int32)
    ids, tokens = (jnp.take_along_axis(each, order, axis=1) for each in (ids, tokens))
    if chosen is not None:
        chosen = jnp.take_along_axis(chosen, order[..., None], axis=1)

    rows = q.reshape(lists, group, head_dim)
    value_rows = None if value_q is None else value_q.reshape(lists, group, v_head_dim)
    most = lists_per_kernel(lists, width, -(-lists // tiles.tokens))
    parts = [
        attend_work(
            rows[start : start + most],
            k_pages,
            v_pages,
            ids[start : start + most],
            list_work(
                tokens[start : start + most],
                block_tokens=tiles.tokens,
                block_pages=tiles.pages,
                page_size=page_size,
            ),
            page_tokens=tokens[start : start + most],
            tiles=tiles,
            masking=Masking(scale, None, 0, soft_cap),
            page_stats=page_stats,
            out_dtype=out_dtype,
            decode=True,
            interpret=interpret,
            value_q=None if value_rows is None else value_rows[start : start + most],
            chosen=None if chosen is None else chosen[start : start + most],
        )
        for start in range(0, lists, most)
    ]
    listed: AttentionOutput = jax.tree.map(lambda *rows: jnp.concatenate(rows), *parts)
    result = AttentionOutput(
        listed.out.reshape(batch, heads, v_head_dim), listed.lse.reshape(batch, heads)
    )
    if sink_logits is not None:
        result = add_sink(result, sink_logits)
    result = result._replace(out=result.out.astype(q.dtype))
    if listed.page_max is None or listed.page_sum is None:
        return result
    place = jnp.argsort(order, axis=1)[:, None]  # where each entry of the caller's list went

    def by_entry(x: Float[Array, "lists G K"]) -> Float[Array, "B Hq K"]:
        at = jnp.broadcast_to(place, x.shape)
        return jnp.take_along_axis(x, at, axis=2).reshape(batch, heads, width)

    return result._replace(page_max=by_entry(listed.page_max), page_sum=by_entry(listed.page_sum))
