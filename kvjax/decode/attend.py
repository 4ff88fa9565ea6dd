"""Where a model and a cache meet: the `attend` a decoder is given."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from kvjax.cache import (
    PagedKVCache,
    encoded_lengths,
    put_chunk,
    put_token,
    token_slots,
    with_state,
    write,
)
from kvjax.decode.attend_chosen import Chosen, ChunkChoice, DecodeChoice
from kvjax.decode.attend_latents import (
    attend_expanded_latents,
    attend_latents,
    attend_ragged_latents,
    expands_latents,
    keeps_latents,
    scored_keys,
)
from kvjax.decode.attend_recent import Chunk, attend_chunk, attend_ring
from kvjax.decode.attend_retention import retain_chunk, retain_token
from kvjax.decode.latents_as_one_head import AsOneHead, Expanded
from kvjax.models import Attend, ModelConfig
from kvjax.pallas_kernels import (
    PackedPages,
    float8_paged_attention,
    merge_attention,
    paged_attention,
    ragged_paged_attention,
)
from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.support import Implementation


def decode_attend(
    config: ModelConfig,
    cache: PagedKVCache,
    active: Bool[Array, " B"],
    implementation: Implementation | None,
    *,
    stores: Bool[Array, " B"] | None = None,
) -> AsOneHead[PagedKVCache]:
    """Attend with one new token a sequence, whose page is reserved.

    Each layer attends to the pages as they are and to the new token apart, merges the two by their
    log-sum-exp, and only then writes the token. Written first, the pool would be read after an
    update in the same step, and XLA may copy a pool for that. A layer that shares another's pages
    (YOCO) does the same with that layer's keys and values, which it is given, and writes nothing:
    the token is in the pages by then, but past what is attended to.

    Args:
      config: the model's.
      cache: the cache before the step, with pages reserved.
      active: bool [B]; rows that are not active read and write nothing, and their output is unused.
      implementation: of `paged_attention`, or None.
      stores: bool [B], rows whose token's page is reserved, those that `encode_due` was told of:
        elsewhere nothing newer takes the place of what is kept. None is all that are active.
    """
    stores = active if stores is None else stores
    batch = cache.batch
    lengths = jnp.where(active, cache.lengths, 0)
    rows = jnp.where(active, jnp.arange(batch, dtype=jnp.int32), batch)

    def attend(
        layer: int, q: Array, k: Array, v: Array, state: PagedKVCache, chosen: Chosen | None
    ) -> tuple[Array, PagedKVCache]:
        k, v = _as_kept(state, k, v)
        packed = state.recent[layer] is not None
        own = attend_token(config, layer, q, scored_keys(state, layer, k, v), v)
        if chosen is None:
            old = _attend_pages(config, layer, q, state, lengths, active, implementation)
        else:
            old = chosen.attended(config, layer, q, state, implementation)
            assert chosen.own is not None
            own = own._replace(lse=jnp.where(chosen.own[:, None], own.lse, -jnp.inf))
        if packed:
            newest = attend_ring(config, state, layer, q, active)
            return merged(old, newest, own).out, put_token(state, layer, k, v, stores)
        out = merged(old, own).out
        if state.spec.source(layer) != layer:
            return out, state
        # The write must be seen to need the read's result: XLA may run an independent write first,
        # and copies the whole pool if it does. (A row whose attention is NaN is not written; its
        # logits are NaN too, and end it.)
        page, offset = token_slots(cache, rows, cache.lengths, layer)
        page = jnp.where(jnp.isnan(old.lse).any(axis=1), cache.num_pages, page)
        return out, write(state, layer, k, v, (page, offset))

    def retain(
        layer: int, q: Array, k: Array, v: Array, log_gates: Array, state: PagedKVCache
    ) -> tuple[Array, PagedKVCache]:
        out, new = retain_token(_state(state, layer), q, k, v, log_gates, stores)
        return out, with_state(state, layer, new)

    choice = DecodeChoice(config, lengths, active, implementation)
    return AsOneHead(attend, choice, retain=retain)


def _state(cache: PagedKVCache, layer: int) -> Float32[Array, "B H D Dv"]:
    state = cache.states[layer]
    assert state is not None
    return state


def _attend_pages(
    config: ModelConfig,
    layer: int,
    q: Float[Array, "B Hq D"],
    cache: PagedKVCache,
    lengths: Int32[Array, " B"],
    active: Bool[Array, " B"],
    implementation: Implementation | None,
) -> AttentionOutput:
    """Attend to what stands in pages: all tokens, or those that are encoded."""
    keys, values = cache.pools(layer)
    tables, encoded = cache.tables(layer), lengths
    if isinstance(keys, PackedPages) and isinstance(values, PackedPages):
        tables, lengths = _after_sinks(cache, lengths)
        _, encoded = _after_sinks(cache, jnp.where(active, encoded_lengths(cache), 0))
        if cache.format is not None and cache.format.products == "float8":
            return float8_paged_attention(
                q,
                keys,
                values,
                tables,
                encoded,
                scale=config.scale(layer),
                implementation=implementation,
            )
    if keeps_latents(cache, layer):
        return attend_latents(config, layer, q, cache, tables, encoded, implementation)
    return paged_attention(
        q,
        keys,
        values,
        tables,
        encoded,
        scale=config.scale(layer),
        window=config.layers[layer].window,
        soft_cap=config.attn_soft_cap,
        query_positions=lengths,
        implementation=implementation,
    )


def _after_sinks(
    cache: PagedKVCache, lengths: Int32[Array, " B"]
) -> tuple[Int32[Array, "B M"], Int32[Array, " B"]]:
    """Sequences without their sinks: the tables of what is behind those, and lengths.

    What pages hold of sinks is never written nor read. Attention is of positions relative to the
    query's, so that all can be counted from the first token behind them.
    """
    sinks = cache.sink_tokens
    return cache.block_tables[:, sinks // cache.page_size :], jnp.maximum(lengths - sinks, 0)


def _as_kept(
    cache: PagedKVCache, k: Float[Array, "T Hkv D"], v: Float[Array, "T Hkv Dv"]
) -> tuple[Float[Array, "T Hkv D"], Float[Array, "T Hkv Dv"]]:
    """Keys and values as every later step will read them, while they are not encoded."""
    dtype = jnp.dtype(cache.spec.dtype)
    return k.astype(dtype), v.astype(dtype)


def attend_token(
    config: ModelConfig,
    layer: int,
    q: Float[Array, "B Hq D"],
    k: Float[Array, "B Hkv D"],
    v: Float[Array, "B Hkv Dv"],
) -> AttentionOutput:
    """Attention of each row's query to its own token: the token's value, and the score.

    Args:
      config: the model's.
      layer: whose scale to use.
      q: [B, Hq, D].
      k: [B, Hkv, D], as the cache stores it.
      v: [B, Hkv, Dv], as the cache stores it.
    """
    batch, heads, dim = q.shape
    group, cap = heads // k.shape[1], config.attn_soft_cap
    grouped = q.reshape(batch, k.shape[1], group, dim).astype(jnp.float32)
    score = config.scale(layer) * jnp.sum(grouped * k[:, :, None].astype(jnp.float32), axis=-1)
    if cap is not None:
        score = cap * jnp.tanh(score / cap)
    value = jnp.repeat(v.astype(jnp.float32), group, axis=1)
    return AttentionOutput(value, score.reshape(batch, heads))


def merged(*parts: AttentionOutput) -> AttentionOutput:
    """Attention over all that the parts saw, in float32.

    Args:
      parts: of the same queries, over disjoint keys.
    """
    return merge_attention(
        jnp.stack([part.out.astype(jnp.float32) for part in parts]),
        jnp.stack([part.lse for part in parts]),
    )


def chunk_attend(
    config: ModelConfig,
    cache: PagedKVCache,
    sequences: Int32[Array, " T"],
    indices: Int32[Array, " T"],
    cu_lengths: Int32[Array, " B1"],
    implementation: Implementation | None,
    *,
    stores: Bool[Array, ""] | bool = True,
) -> AsOneHead[PagedKVCache]:
    """Attend with a ragged chunk of new tokens, whose pages are reserved: write, then attend.

    Args:
      config: the model's.
      cache: the cache before the chunk, with pages reserved.
      sequences: int32 [T], each token's sequence; B for padding.
      indices: int32 [T], where among its sequence's stored tokens each goes.
      cu_lengths: int32 [B + 1], where each sequence's tokens start in the chunk.
      implementation: of `ragged_paged_attention`, or None.
      stores: whether the chunk's pages are reserved; otherwise nothing is stored.
    """
    kv_lengths = cache.lengths + jnp.diff(cu_lengths)

    def attend(
        layer: int,
        q: Array,
        k: Array,
        v: Array,
        state: PagedKVCache,
        chosen: Chosen | Expanded | None,
    ) -> tuple[Array, PagedKVCache]:
        packed = state.recent[layer] is not None
        before = state
        if packed:
            k, v = _as_kept(state, k, v)
            state = put_chunk(state, layer, k, v, cu_lengths, stores)
        elif state.spec.source(layer) == layer:
            at = token_slots(cache, sequences, indices, layer)
            state = write(state, layer, k, v, at)
        if isinstance(chosen, Chosen):
            return chosen.attended(config, layer, q, state, implementation).out, state
        tables, lengths = state.tables(layer), kv_lengths
        if chosen is not None:
            where = tables, lengths, cu_lengths
            result = attend_expanded_latents(config, layer, q, state, *where, chosen.expand)
            return result.out, state
        if packed:
            tables, lengths = _after_sinks(state, kv_lengths)
        residual = state.recent_tokens if packed else None
        if keeps_latents(state, layer):
            ends = tables, lengths, cu_lengths, residual
            result = attend_ragged_latents(config, layer, q, state, *ends, implementation)
        else:
            result = ragged_paged_attention(
                q,
                *state.pools(layer),
                tables,
                lengths,
                cu_lengths,
                scale=config.scale(layer),
                window=config.layers[layer].window,
                soft_cap=config.attn_soft_cap,
                residual=residual,
                implementation=implementation,
            )
        if packed:
            chunk = Chunk(sequences, indices, scored_keys(state, layer, k, v), v)
            result = merged(result, attend_chunk(config, before, state, layer, q, chunk))
        return result.out, state

    def retain(
        layer: int, q: Array, k: Array, v: Array, log_gates: Array, state: PagedKVCache
    ) -> tuple[Array, PagedKVCache]:
        old = _state(state, layer)
        out, new = retain_chunk(old, q, k, v, log_gates, cu_lengths)
        return out, with_state(state, layer, jnp.where(stores, new, old))

    def expanding(layer: int, queries: int) -> bool:
        return expands_latents(config, layer, queries, cache, implementation)

    choice = ChunkChoice(config, sequences, indices, kv_lengths, cu_lengths, implementation)
    return AsOneHead(attend, choice, expanding, retain)


def newest_attend(
    config: ModelConfig, lengths: Int32[Array, " B"], implementation: Implementation | None
) -> Attend[PagedKVCache]:
    """Attend with one token a sequence whose keys and values are in pages already; write nothing.

    For layers of a cross-decoder, in a prompt of which the last token alone goes on.

    Args:
      config: the model's.
      lengths: int32 [B], tokens of each sequence, that one included; 0 attends to nothing.
      implementation: of `paged_attention`, or None.
    """

    def attend(
        layer: int, q: Array, k: Array, v: Array, state: PagedKVCache
    ) -> tuple[Array, PagedKVCache]:
        del k, v  # what is kept of them is in the pages
        out = paged_attention(
            q,
            *state.pools(layer),
            state.tables(layer),
            lengths,
            scale=config.scale(layer),
            soft_cap=config.attn_soft_cap,
            implementation=implementation,
        )
        return out.out, state

    return attend
