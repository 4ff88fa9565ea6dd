"""Teaches a lightning indexer a model's own attention: DeepSeek's dense warm-up, layer by layer.

The model reads a text once; of every layer the queries and keys stay, before their rotation. Then
each layer's indexer learns alone, from random rows of them: the loss is the KL divergence of its
softmax over the tokens before a query from the layer's attention, the mean of all heads
(DeepSeek-V3.2-Exp, section 2.1.1).
"""

import functools
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float32, Int32

from kvjax.decode import inputs
from kvjax.decode.calls import Progress
from kvjax.decode.identity import fingerprint
from kvjax.decode.layer_attention import AttentionRule, Seen, layer_attention, read_attention
from kvjax.decode.program import compiled
from kvjax.errors import KvjaxError, check_integer
from kvjax.model import Model
from kvjax.policies.indexer import DistilledIndexer
from kvjax.policies.lightning_indexer import (
    IndexerWeights,
    LayerIndexer,
    index_angles,
    index_keys,
    index_queries,
    index_scores,
    initial_weights,
    rounded,
)

ROWS = 128
"""Queries of a training step."""

STEPS_AT_ONCE = 50
"""Training steps of one program."""


class _Fixed(NamedTuple):
    """What a layer's training program is made for."""

    rule: AttentionRule
    learning_rate: float
    steps: int


class _Training(NamedTuple):
    weights: IndexerWeights
    optimizer: Any
    key: Array


def distill_indexer(
    model: Model,
    texts: inputs.PromptLike | Sequence[inputs.PromptLike],
    *,
    tokens: int = 8192,
    heads: int = 8,
    dim: int = 64,
    steps: int = 300,
    learning_rate: float = 1e-3,
    seed: int = 0,
    progress: Progress | None = None,
) -> DistilledIndexer:
    """Train a lightning indexer for a model; takes minutes on a CPU for a small one.

    Args:
      model: whose attention is learned.
      texts: like those that will come, as texts or token ids; see `read_attention`.
      tokens: most that are read, the first ones of every text in equal shares.
      heads: J, the indexer's query heads.
      dim: Di, dimensions of its one key a token; a multiple of 4.
      steps: of training, each layer.
      learning_rate: Adam's, after a tenth of the steps; from there it falls along a cosine.
      seed: of first weights and of what each step looks at.
      progress: called with "distill" and how much of it is done.

    Returns:
      The indexer. Layers with a sliding window have none.

    Raises:
      KvjaxError: a text is shorter than eight pages, a number is out of range, memory has no room
        for queries and keys, the model makes keys from latents, or all its layers have windows.
    """
    check_settings(heads=heads, dim=dim, steps=steps, learning_rate=learning_rate, seed=seed)
    report = progress or (lambda phase, share: None)
    report("distill", 0.0)
    seen = read_attention(model, texts, tokens)
    learned: list[LayerIndexer | None] = []
    losses: list[tuple[float, ...]] = []
    for index, (layer, of_layer) in enumerate(zip(model.config.layers, seen, strict=True)):
        if of_layer is None:
            learned.append(None)
            losses.append(())
            continue
        key = jax.random.fold_in(jax.random.key(seed), index)
        first = initial_weights(
            key,
            query_heads=layer.num_heads,
            kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            heads=heads,
            dim=dim,
        )
        rule = AttentionRule.of(model, index)
        fixed = _Fixed(rule, float(learning_rate), steps)
        weights, lost = _train(fixed, first, of_layer, key)
        learned.append(LayerIndexer.of(weights, rule.frequencies, rule.sharpen))
        losses.append(lost)
        report("distill", (index + 1) / len(seen))
    return DistilledIndexer(fingerprint(model), tuple(learned), tuple(losses))


def check_settings(*, heads: int, dim: int, steps: int, learning_rate: float, seed: int) -> None:
    """Refuse what `distill_indexer` refuses, before a text is read.

    Args:
      heads: see there.
      dim: see there.
      steps: see there.
      learning_rate: see there.
      seed: see there.

    Raises:
      KvjaxError: one of them is out of range.
    """
    check_integer("heads", heads, 1)
    if check_integer("dim", dim, 4) % 4:
        raise KvjaxError(f"dim is {dim}: must be a multiple of 4, since a half of it is turned")
    check_integer("steps", steps, 1)
    check_integer("seed", seed, 0)
    if not (isinstance(learning_rate, numbers.Real) and 0 < learning_rate < 1):
        raise KvjaxError(f"learning_rate is {learning_rate!r}: must be above 0 and below 1")


def _train(
    fixed: _Fixed, first: IndexerWeights, seen: Seen, key: Array
) -> tuple[IndexerWeights, tuple[float, ...]]:
    """The learned weights, and the loss of each step, in nats."""
    state = _Training(first, _optimizer(fixed).init(first), key)
    losses: list[float] = []
    while len(losses) < fixed.steps:
        count = min(STEPS_AT_ONCE, fixed.steps - len(losses))
        program, _ = compiled(_steps, (fixed, count), state, seen)
        state, found = program(state, seen)
        losses += np.asarray(found).tolist()
    return state.weights, tuple(losses)


def _optimizer(fixed: _Fixed) -> optax.GradientTransformation:
    # Without a slow beginning a head can end below 0 for every token, where it learns no more.
    rate = optax.warmup_cosine_decay_schedule(
        0.0, fixed.learning_rate, fixed.steps // 10, fixed.steps
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))


def _steps(
    static: tuple[_Fixed, int], state: _Training, seen: Seen
) -> tuple[_Training, Float32[Array, " n"]]:
    """Some steps of training."""
    fixed, count = static
    optimizer = _optimizer(fixed)
    texts, length = seen.keys.shape[:2]

    def step(state: _Training, _: None) -> tuple[_Training, Array]:
        key, which, where = jax.random.split(state.key, 3)
        text = jax.random.randint(which, (), 0, texts, jnp.int32)
        rows = jax.random.randint(where, (min(ROWS, length),), 1, length, jnp.int32)
        of_text = jax.tree.map(lambda x: x[text], seen)
        lost, slope = jax.value_and_grad(functools.partial(_loss, fixed))(
            state.weights, of_text, rows
        )
        with jax.numpy_dtype_promotion("standard"):  # Optax takes a count to a float by itself
            change, memory = optimizer.update(slope, state.optimizer, state.weights)
        weights: Any = optax.apply_updates(state.weights, change)
        return _Training(weights, memory, key), lost

    return lax.scan(step, state, None, length=count)


def _loss(
    fixed: _Fixed, weights: IndexerWeights, seen: Any, rows: Int32[Array, " R"]
) -> Float32[Array, ""]:
    """KL of the indexer's softmax from the layer's attention, mean over rows, in nats."""
    before = jnp.arange(seen.keys.shape[0], dtype=jnp.int32)[None, :] <= rows[:, None]
    wanted = layer_attention(fixed.rule, seen, rows).mean(axis=1)
    scores = layer_scores(fixed.rule.frequencies, weights, seen, rows)
    guessed = jax.nn.log_softmax(jnp.where(before, scores, -jnp.inf), axis=1)
    apart = wanted * (jnp.log(jnp.maximum(wanted, 1e-30)) - jnp.where(before, guessed, 0))
    return jnp.mean(jnp.sum(jnp.where(before, apart, 0), axis=1))


def layer_scores(
    radians: tuple[float, ...],
    weights: IndexerWeights,
    seen: Any,
    rows: Int32[Array, " R"],
    *,
    page_size: int | None = None,
) -> Float32[Array, "R T"]:
    """An indexer's scores of every token of a text, for some queries of it.

    Args:
      radians: the model's rotary frequencies.
      weights: the layer's.
      seen: one text's, [T, ...].
      rows: int32 [R], positions of the queries.
      page_size: tokens of a page whose keys are rounded together; None rounds none.
    """
    dim = weights.keys.shape[1]
    positions = jnp.arange(seen.keys.shape[0], dtype=jnp.int32)
    keys = index_keys(weights, seen.keys, index_angles(radians, dim, positions))
    if page_size is not None:
        keys = rounded(keys, page_size)
    asked = index_queries(weights, seen.queries[rows], index_angles(radians, dim, rows))
    return index_scores(*asked, keys)
