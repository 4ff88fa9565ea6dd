"""Attention to the tokens that an indexer chooses (DSA), in pages of latents.

A layer with an indexer keeps an index key beside a token's latent, in the same pages. Every query
scores the tokens of its sequence by these, and attends to the best, all heads to the same. While a
sequence's pages have room for no more tokens than a query may choose, nothing is scored.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from kvjax.cache import IndexPages, PagedKVCache, kept_index_keys, token_slots, write_index
from kvjax.decode.attend_latents import attend_chosen_latents
from kvjax.models import Indexed, Indexer, ModelConfig
from kvjax.pallas_kernels import (
    lightning_scores,
    ragged_lightning_scores,
    top_tokens,
)
from kvjax.pallas_kernels.lightning_indexer.rectify import rectified
from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.support import Implementation

SCORED_ROWS = (64, 32, 16)
"""Queries of a chunk whose scores are held at once: each has 4 bytes for every token there is."""


class Chosen(NamedTuple):
    """What each query attends to.

    Attributes:
      token_ids: int32 [T, K], slots of its sequence; what is out of range is none.
      tables: int32 [T, M], the sequence's pages.
      own: bool [B], in decode, whether the new token is among them: it is not in its page yet.
      sound: bool [T], whether all scores are numbers; a query of which one is not gets NaN.
      scores: float32 [B, M P], in decode, what tokens were chosen by.
    """

    token_ids: Int32[Array, "T K"]
    tables: Int32[Array, "T M"]
    own: Bool[Array, " B"] | None
    sound: Bool[Array, " T"]
    scores: Float32[Array, "B S"] | None = None

    def attended(
        self,
        config: ModelConfig,
        layer: int,
        q: Float[Array, "T H D"],
        cache: PagedKVCache,
        implementation: Implementation | None,
    ) -> AttentionOutput:
        """Attention to what is chosen of what is in pages.

        Args:
          config: the model's.
          layer: whose latents.
          q: [T, H, Dc + Dr].
          cache: whose pages to read.
          implementation: of `token_latent_attention`, or None.
        """
        chosen = self.token_ids, self.tables
        return self.sounded(attend_chosen_latents(config, layer, q, cache, chosen, implementation))

    def sounded(self, result: AttentionOutput) -> AttentionOutput:
        """The attention, NaN where a score is not a number.

        Args:
          result: of the queries that chose.
        """
        lse = jnp.where(self.sound[:, None], result.lse, jnp.nan)
        out = jnp.where(self.sound[:, None, None], result.out, jnp.nan)
        return result._replace(out=out, lse=lse)


def chooses(config: ModelConfig, cache: PagedKVCache, layer: int) -> bool:
    """Whether a layer's queries may leave tokens out, of as many as a sequence can have."""
    indexer = config.layers[layer].indexer
    return indexer is not None and cache.max_pages * cache.page_size > indexer.top_k


@dataclasses.dataclass(frozen=True)
class DecodeChoice:
    """The choice of one new token a sequence, among those in pages and itself.

    Attributes:
      config: the model's.
      lengths: int32 [B], tokens in pages, 0 in rows that are not active.
      active: bool [B].
      implementation: of `lightning_scores`, or None.
    """

    config: ModelConfig
    lengths: Int32[Array, " B"]
    active: Bool[Array, " B"]
    implementation: Implementation | None

    def __call__(
        self, layer: int, indexed: Indexed, cache: PagedKVCache
    ) -> tuple[Chosen | None, PagedKVCache]:
        """Choose, then store the index keys; None where all tokens are attended to."""
        new = kept_index_keys(cache, layer, indexed.key)
        rows = jnp.where(self.active, jnp.arange(cache.batch, dtype=jnp.int32), cache.batch)
        page, offset = token_slots(cache, rows, self.lengths, layer)
        if not chooses(self.config, cache, layer):
            return None, write_index(cache, layer, new, (page, offset))
        indexer, keys, scales = _operands(self.config, cache, layer)
        scores = lightning_scores(
            indexed.q,
            indexed.weights,
            keys,
            cache.block_tables,
            self.lengths,
            scale=indexer.scale,
            key_scales=scales,
            implementation=self.implementation,
        )
        products = jnp.sum(indexed.q * new.values[:, None], axis=2)
        own = indexer.scale * jnp.sum(indexed.weights * rectified(products), axis=1)
        slot = jnp.arange(scores.shape[1], dtype=jnp.int32)[None]
        scores = jnp.where(slot == self.lengths[:, None], own[:, None], scores)
        seen = jnp.where(self.active, self.lengths + 1, 0)
        tokens = top_tokens(scores, seen, k=indexer.top_k).token_ids
        is_own = tokens == self.lengths[:, None]
        tokens = jnp.where(is_own, slot.size, tokens)
        sound = ~jnp.isnan(scores).any(axis=1)
        # As with keys and values: the write must be seen to need what was read.
        at = jnp.where(sound, page, cache.num_pages), offset
        own_chosen = is_own.any(axis=1) & self.active
        chosen = Chosen(tokens, cache.block_tables, own_chosen, sound, scores)
        return chosen, write_index(cache, layer, new, at)


@dataclasses.dataclass(frozen=True)
class ChunkChoice:
    """The choice of a ragged chunk's tokens, each among those before it and itself.

    Attributes:
      config: the model's.
      sequences: int32 [T], each token's sequence; B for padding.
      indices: int32 [T], where among its sequence's stored tokens each goes.
      kv_lengths: int32 [B], tokens of each sequence, the chunk's included.
      cu_lengths: int32 [B + 1], where each sequence's tokens start in the chunk.
      implementation: of `ragged_lightning_scores`, or None.
    """

    config: ModelConfig
    sequences: Int32[Array, " T"]
    indices: Int32[Array, " T"]
    kv_lengths: Int32[Array, " B"]
    cu_lengths: Int32[Array, " B1"]
    implementation: Implementation | None

    def __call__(
        self, layer: int, indexed: Indexed, cache: PagedKVCache
    ) -> tuple[Chosen | None, PagedKVCache]:
        """Store the index keys, then choose; None where all tokens are attended to."""
        new = kept_index_keys(cache, layer, indexed.key)
        slots = token_slots(cache, self.sequences, self.indices, layer)
        cache = write_index(cache, layer, new, slots)
        if not chooses(self.config, cache, layer):
            return None, cache
        indexer, keys, scales = _operands(self.config, cache, layer)
        count = indexed.q.shape[0]
        rows = next((n for n in SCORED_ROWS if count % n == 0), count)

        def of_rows(part: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
            begin, q, weights, seen = part
            later = jnp.maximum(self.cu_lengths[1:] - begin - rows, 0)
            scores = ragged_lightning_scores(
                q,
                weights,
                keys,
                cache.block_tables,
                self.kv_lengths - later,
                jnp.clip(self.cu_lengths - begin, 0, rows),
                scale=indexer.scale,
                key_scales=scales,
                implementation=self.implementation,
            )
            tokens = top_tokens(scores, seen, k=indexer.top_k).token_ids
            return tokens, ~jnp.isnan(scores).any(axis=1)

        seen = jnp.where(self.sequences < cache.batch, self.indices + 1, 0)
        parts = [x.reshape(-1, rows, *x.shape[1:]) for x in (indexed.q, indexed.weights, seen)]
        begins = jnp.arange(0, count, rows, dtype=jnp.int32)
        tokens, sound = lax.map(of_rows, (begins, *parts))
        tables = cache.block_tables.at[self.sequences].get(mode="clip")
        return Chosen(tokens.reshape(count, -1), tables, None, sound.reshape(count)), cache


def _operands(
    config: ModelConfig, cache: PagedKVCache, layer: int
) -> tuple[Indexer, Array, Array | None]:
    """A layer's indexer, and its index keys and their scales as the kernels take them."""
    indexer, pages = config.layers[layer].indexer, cache.index_pages[layer]
    assert indexer is not None
    assert isinstance(pages, IndexPages)
    return indexer, pages.keys[:, 0], None if pages.scales is None else pages.scales[:, 0]
