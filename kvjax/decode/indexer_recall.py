"""How much of a model's attention selections keep: an indexer's tokens and pages against others."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32

from kvjax.decode import inputs
from kvjax.decode.calls import Progress
from kvjax.decode.distill_indexer import layer_scores
from kvjax.decode.identity import fingerprint
from kvjax.decode.layer_attention import (
    LEAST_TOKENS,
    AttentionRule,
    Seen,
    layer_attention,
    read_attention,
    rotated_keys,
    rotated_queries,
)
from kvjax.decode.program import compiled
from kvjax.decode.text_ids import texts_as_ids
from kvjax.errors import KvjaxError, check_integer
from kvjax.model import Model
from kvjax.policies import Hierarchical, LowBitKeys, MeanKeys, PageIndex, PerPage, QuestBounds
from kvjax.policies.index import mass_of_scores
from kvjax.policies.indexer import DistilledIndexer
from kvjax.policies.lightning_indexer import IndexerWeights
from kvjax.policies.low_bit import ExactKeys
from kvjax.policies.select import select
from kvjax.spec import DEFAULT_PAGE_SIZE

HELD_OUT = 4
"""One part of so many of every text, its last, is judged by and not learned from."""

QUERIES = 2 * DEFAULT_PAGE_SIZE
"""Last tokens of a text whose attention is looked at."""

PAGES: dict[str, tuple[PageIndex, tuple[int, ...]]] = {
    "page means": (PerPage(MeanKeys()), (16, 8)),
    "Quest's bounds": (PerPage(QuestBounds()), (16, 8)),
    "centroids, then 3-bit keys": (Hierarchical(LowBitKeys()), (16,)),
    "3-bit keys": (PerPage(LowBitKeys()), (16,)),
    "exact keys": (PerPage(ExactKeys()), (16, 8)),
}
"""What pages are chosen by for comparison, every KV head its own; and one of how many are read."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """What one selection keeps.

    Attributes:
      method: its name.
      one_of: it reads one of so many tokens before a query, rounded up to whole pages.
      attention: share of the heads' attention that goes to what is read; mean of layers, heads and
        queries.
      read_bytes: that a layer reads a step for every token before the query, of the index and of
        chosen keys and values in bfloat16, mean of layers.
    """

    method: str
    one_of: int
    attention: float
    read_bytes: float


def learn_and_hold_out(
    model: Model, texts: inputs.PromptLike | Sequence[inputs.PromptLike], tokens: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Two parts of every text: what to learn from, and after it what to judge by.

    Args:
      model: whose tokenizer to use.
      texts: as texts or token ids.
      tokens: most that are used, of all texts in equal shares.

    Raises:
      KvjaxError: the last part of a text is shorter than eight pages, or `tokens` is too small.
    """
    most = check_integer("tokens", tokens, HELD_OUT * LEAST_TOKENS)
    rows = texts_as_ids(model, texts, most)
    rows = [ids[: most // len(rows)] for ids in rows]
    for row, ids in enumerate(rows):
        if len(ids) // HELD_OUT < LEAST_TOKENS:
            raise KvjaxError(
                f"text {row} has {len(ids)} tokens of {tokens} that are read of all: at least "
                f"{HELD_OUT * LEAST_TOKENS} are needed, since a quarter, of eight pages, is not "
                f"learned from; give a longer text, or read more tokens"
            )
    ends = [len(ids) - len(ids) // HELD_OUT for ids in rows]
    return (
        [ids[:end] for ids, end in zip(rows, ends, strict=True)],
        [ids[end:] for ids, end in zip(rows, ends, strict=True)],
    )


def attention_kept(
    model: Model,
    indexer: DistilledIndexer,
    texts: inputs.PromptLike | Sequence[inputs.PromptLike],
    *,
    tokens: int = 4096,
    progress: Progress | None = None,
) -> list[Kept]:
    """Compare what an indexer chooses with what others do, on texts that it was not learned of.

    Queries are the last 32 tokens of every part of a text. What is after the last full page is read
    by all. Of the pages before, all read as many tokens: those that choose pages the first page,
    the last and others, those that choose tokens any, for all heads of a layer alike.

    Args:
      model: that the indexer was learned of.
      indexer: whose choices to judge.
      texts: as texts or token ids.
      tokens: most that are read.
      progress: called with "judge" and how much of it is done.

    Raises:
      KvjaxError: the indexer is of another model, or see `distill_indexer`.
    """
    report = progress or (lambda phase, share: None)
    report("judge", 0.0)
    indexer.check(model=fingerprint(model), name=model.name)
    found: dict[tuple[str, int], list[float]] = {}
    read: dict[tuple[str, int], list[float]] = {}
    layers = model.config.layers
    for index, seen in enumerate(read_attention(model, texts, tokens)):
        layer, learned = layers[index], indexer.layers[index]
        if seen is None or learned is None:
            continue
        rule = AttentionRule.of(model, index)
        pair = 2 * 2 * layer.num_kv_heads * layer.head_dim  # bytes of a token's key and value
        pages = (seen.keys.shape[1] - QUERIES) // DEFAULT_PAGE_SIZE
        for name, one_of, kept, scanned in _layer_kept(rule, learned.weights, seen):
            found.setdefault((name, one_of), []).append(kept)
            share = _room(pages, one_of) / pages
            read.setdefault((name, one_of), []).append(scanned + pair * share)
        report("judge", (index + 1) / len(layers))
    return [
        Kept(name, one_of, float(np.mean(shares)), float(np.mean(read[name, one_of])))
        for (name, one_of), shares in found.items()
    ]


def _layer_kept(
    rule: AttentionRule, weights: IndexerWeights, seen: Seen
) -> list[tuple[str, int, float, float]]:
    """Method, one of how many tokens, share of attention kept, index bytes read a token."""
    size, dim = DEFAULT_PAGE_SIZE, weights.keys.shape[1]
    _, _, kv_heads, head_dim = seen.keys.shape
    rows = []
    for kind in ("tokens", "pages"):
        program, _ = compiled(_indexer_keeps, (rule, kind, 16), weights, seen)
        rows.append((f"indexer, {kind}", 16, float(program(weights, seen)), dim + 4 / size))
    for name, (index, shares) in PAGES.items():
        scanned = index.scanned_bytes_per_page(kv_heads, head_dim, size) / size
        for one_of in shares:
            program, _ = compiled(_pages_keep, (rule, index, one_of), seen)
            rows.append((name, one_of, float(program(seen)), scanned))
    program, _ = compiled(_best_keeps, (rule, 16), seen)
    rows.append(("the best tokens for all heads", 16, float(program(seen)), 0.0))
    return rows


def _room(pages: int, one_of: int) -> int:
    """Pages, or as many tokens, that are read of those before a query."""
    return max(-(-pages // one_of), 2)


def _queries(seen: Any) -> tuple[Int32[Array, " R"], int]:
    """The positions of queries, and the full pages before the first of them."""
    length = seen.keys.shape[0]
    first = length - QUERIES
    return first + jnp.arange(QUERIES, dtype=jnp.int32), first // DEFAULT_PAGE_SIZE


def _over_texts(keep: Any, seen: Seen) -> Float32[Array, ""]:
    return jnp.mean(lax.map(keep, seen))


def _share(attention: Float32[Array, "R Hq T"], chosen: Any, pages: int) -> Float32[Array, ""]:
    """Attention to what is chosen of the pages, and to all tokens after them."""
    tail = jnp.arange(attention.shape[2], dtype=jnp.int32)[None, None] >= pages * DEFAULT_PAGE_SIZE
    return jnp.mean(jnp.sum(jnp.where(chosen | tail, attention, 0), axis=2))


def _best_tokens(scores: Float32[Array, "R T"], one_of: int, pages: int) -> Any:
    """Which tokens of the pages are chosen, all heads alike: bool [R, 1, T]."""
    room = _room(pages, one_of) * DEFAULT_PAGE_SIZE
    best = lax.top_k(scores[:, : pages * DEFAULT_PAGE_SIZE], room)[1]
    row = jnp.arange(scores.shape[0], dtype=jnp.int32)[:, None]
    return jnp.zeros(scores.shape, bool).at[row, best].set(True)[:, None]


def _indexer_keeps(
    static: tuple[AttentionRule, str, int], weights: IndexerWeights, seen: Seen
) -> Float32[Array, ""]:
    rule, kind, one_of = static

    def keep(text: Any) -> Array:
        rows, pages = _queries(text)
        scores = layer_scores(rule.frequencies, weights, text, rows, page_size=DEFAULT_PAGE_SIZE)
        attention = layer_attention(rule, text, rows)
        if kind == "tokens":
            return _share(attention, _best_tokens(scores, one_of, pages), pages)

        def masses(row: Array) -> Array:
            paged = row[: pages * DEFAULT_PAGE_SIZE].reshape(1, pages, DEFAULT_PAGE_SIZE, 1)
            return mass_of_scores(paged, jnp.int32(pages))

        return _share(attention, _chosen(jax.vmap(masses)(scores), one_of, pages, 1, text), pages)

    return _over_texts(keep, seen)


def _best_keeps(static: tuple[AttentionRule, int], seen: Seen) -> Float32[Array, ""]:
    rule, one_of = static

    def keep(text: Any) -> Array:
        rows, pages = _queries(text)
        attention = layer_attention(rule, text, rows)
        return _share(attention, _best_tokens(attention.mean(axis=1), one_of, pages), pages)

    return _over_texts(keep, seen)


def _pages_keep(static: tuple[AttentionRule, PageIndex, int], seen: Seen) -> Float32[Array, ""]:
    rule, index, one_of = static

    def keep(text: Any) -> Array:
        rows, pages = _queries(text)
        keys, queries = (
            rotated_keys(rule, text.keys),
            rotated_queries(rule, text.queries[rows], rows),
        )
        heads = keys.shape[1]
        paged = keys[: pages * DEFAULT_PAGE_SIZE].reshape(pages, DEFAULT_PAGE_SIZE, heads, -1)
        live = jnp.int32(pages)
        built = index.build(paged.swapaxes(1, 2), live)

        def masses(q: Array) -> Array:
            return index.page_mass(built, q, live, rule.scale, soft_cap=rule.cap)

        chosen = _chosen(lax.map(masses, queries), one_of, pages, heads, text)
        return _share(layer_attention(rule, text, rows), chosen, pages)

    return _over_texts(keep, seen)


def _chosen(
    mass: Float32[Array, "R H N"], one_of: int, pages: int, kv_heads: int, seen: Any
) -> Any:
    """Which tokens are in chosen pages: bool [R, Hq or 1, T]."""
    room = _room(pages, one_of)

    def choose(row: Array) -> Array:
        return select(row, jnp.int32(pages), room=room, kv_heads=kv_heads)

    ids = jax.vmap(choose)(mass)
    length = seen.keys.shape[0]
    picked = (ids[:, :, :, None] == jnp.arange(pages, dtype=jnp.int32)[None, None, None]).any(2)
    of_tokens = jnp.repeat(picked, DEFAULT_PAGE_SIZE, axis=2)
    after = ((0, 0), (0, 0), (0, length - of_tokens.shape[2]))
    of_tokens = jnp.pad(of_tokens, after)
    group = seen.queries.shape[1] // kv_heads if kv_heads > 1 else 1
    return jnp.repeat(of_tokens, group, axis=1)
