"""How far a converted model is from what it was made of, on texts that it has not seen."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32, Int32

from kvjax.convert.surprise import LOGIT_ROWS
from kvjax.convert.texts import positions_of
from kvjax.decode.program import compiled
from kvjax.model import Model
from kvjax.models import Decoder, causal_attend


@dataclasses.dataclass(frozen=True)
class Judgement:
    """Means over all tokens of some windows but the first of each.

    Attributes:
      kl: of the original's distributions from the other model's, in nats a token.
      perplexity: the other model's.
      original_perplexity: the original's.
      agreement: share of tokens after which both think the same token likeliest.
      tokens: how many were predicted.
    """

    kl: float
    perplexity: float
    original_perplexity: float
    agreement: float
    tokens: int

    @property
    def ratio(self) -> float:
        """The other model's perplexity in times of the original's."""
        return self.perplexity / self.original_perplexity


def final_states(model: Model, windows: Int32[np.ndarray, "n W"]) -> Float32[np.ndarray, "n W d"]:
    """A model's last hidden state at each token, every window a text of its own.

    Args:
      model: what runs.
      windows: token ids.
    """
    rows = []
    for window in windows:
        given = model.params, jnp.asarray(window, jnp.int32)
        program, _ = compiled(_states, model.graphdef, *given)
        rows.append(np.asarray(program(*given)))
    return np.stack(rows)


def _states(graphdef: Any, params: Any, tokens: Int32[Array, " W"]) -> Float32[Array, "W d"]:
    decoder: Decoder = nnx.merge(graphdef, params)
    positions = positions_of(tokens)
    attend = causal_attend(decoder.config, jnp.zeros_like(tokens), positions)
    return decoder(tokens, positions, attend, None)[0]


def judged(
    original: Model,
    other: Model,
    windows: Int32[np.ndarray, "n W"],
    *,
    states: Float32[np.ndarray, "n W d"] | None = None,
    other_states: Float32[np.ndarray, "n W d"] | None = None,
) -> Judgement:
    """Compare two models' predictions.

    Args:
      original: the yardstick.
      other: with the same vocabulary.
      windows: token ids.
      states: the original's `final_states`, if they are known.
      other_states: the other's, if they are known, or what came of them through a cache.
    """
    exact = final_states(original, windows) if states is None else states
    others = final_states(other, windows) if other_states is None else other_states
    found = []
    for window, mine, theirs in zip(windows, exact, others, strict=True):
        given = (original.params, other.params, mine, theirs, jnp.asarray(window, jnp.int32))
        program, _ = compiled(_compared, (original.graphdef, other.graphdef), *given)
        found.append(np.asarray(program(*given), np.float64))
    kl, nll, original_nll, same = np.concatenate(found, axis=1).mean(axis=1).tolist()
    tokens = len(windows) * (windows.shape[1] - 1)
    return Judgement(max(kl, 0.0), math.exp(nll), math.exp(original_nll), same, tokens)


def _compared(
    graphdefs: tuple[Any, Any],
    params: Any,
    other_params: Any,
    exact: Float32[Array, "W d"],
    other: Float32[Array, "W d"],
    tokens: Int32[Array, " W"],
) -> Float32[Array, "4 n"]:
    """KL, both negative log-probabilities, and whether both agree, but after the last token."""
    mine: Decoder = nnx.merge(graphdefs[0], params)
    theirs: Decoder = nnx.merge(graphdefs[1], other_params)
    count = tokens.shape[0] - 1
    extra = -count % LOGIT_ROWS

    def blocks(x: Array) -> Array:
        x = jnp.pad(x, ((0, extra), *((0, 0),) * (x.ndim - 1)))
        return x.reshape(-1, LOGIT_ROWS, *x.shape[1:])

    def some(block: tuple[Array, Array, Array]) -> Array:
        exact, other, target = block
        p = jax.nn.log_softmax(mine.logits(exact), axis=-1)
        q = jax.nn.log_softmax(theirs.logits(other), axis=-1)
        same = (jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)).astype(jnp.float32)

        def missed(logprobs: Array) -> Array:
            return -jnp.take_along_axis(logprobs, target[:, None], axis=-1)[:, 0]

        return jnp.stack([jnp.sum(jnp.exp(p) * (p - q), axis=-1), missed(q), missed(p), same])

    found = jax.lax.map(some, (blocks(exact[:-1]), blocks(other[:-1]), blocks(tokens[1:])))
    return jnp.swapaxes(found, 0, 1).reshape(4, -1)[:, :count]
