"""Sparse paged attention as a Pallas Triton kernel.

Expiry note: the Triton backend of Pallas is deprecated since JAX 0.11 and will be removed; this
file goes with it. Until then it runs only when asked for by name (`implementation="gpu"`), and JAX
says so with a DeprecationWarning when the program is lowered. The default on a GPU is XLA.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int32

from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_pages import KeyPool, ValuePool
from kvjax.pallas_kernels.triton_walk import Refs, Scoring, walk_pages


def sparse_paged_attention_gpu(
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
    interpret: bool = False,
) -> AttentionOutput:
    """Attend to the listed pages; the contract is that of `sparse_paged_attention`.

    One program a (sequence, KV head) walks its list page by page.

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
        interpret: whether to run the kernel in Pallas' interpreter, on any platform.

    Returns:
        The `AttentionOutput`, T = B.
    """
    batch, query_heads, _ = q.shape
    kv_heads, _, v_head_dim = v_pages.shape[1:]
    width = page_ids.shape[2]
    scoring = Scoring(scale, soft_cap, has_sink=sink_logits is not None)
    if sink_logits is None:
        sink_logits = jnp.zeros(query_heads, jnp.float32)
    shapes = [
        jax.ShapeDtypeStruct((batch, query_heads, v_head_dim), q.dtype),
        jax.ShapeDtypeStruct((batch, query_heads), jnp.float32),
    ]
    arrays = [q, k_pages, v_pages, page_ids, page_tokens, sink_logits]
    arrays += [each for each in (value_q, chosen) if each is not None]
    if page_stats:
        shapes += [jax.ShapeDtypeStruct((batch, query_heads, width), jnp.float32)] * 2
    result = pl.pallas_call(
        functools.partial(
            _kernel,
            scoring=scoring,
            scored_values=value_q is not None,
            some_chosen=chosen is not None,
        ),
        grid=(batch, kv_heads),
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="sparse_paged_attention",
    )(*arrays)
    return AttentionOutput(*result)


def _kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    ids_ref: Any,
    tokens_ref: Any,
    sink_ref: Any,
    *refs: Any,
    scoring: Scoring,
    scored_values: bool,
    some_chosen: bool,
) -> None:
    left = list(refs)
    value_q = left.pop(0) if scored_values else None
    chosen_ref = left.pop(0) if some_chosen else None
    row, kv_head = pl.program_id(0), pl.program_id(1)

    def page_of(entry: Any) -> Any:
        return plgpu.load(ids_ref.at[row, kv_head, entry])

    def visible_of(entry: Any, offset: Any) -> Any:
        counted = offset < plgpu.load(tokens_ref.at[row, kv_head, entry])
        if chosen_ref is None:
            return counted
        at = chosen_ref.at[row, kv_head, entry, offset]
        return counted & plgpu.load(at, mask=counted, other=False)

    read = Refs(q_ref, k_ref, v_ref, sink_ref, *left)._replace(value_q=value_q)
    walk_pages(read, scoring, row, kv_head, page_of, visible_of, 0, ids_ref.shape[2])
