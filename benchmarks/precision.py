"""How far bfloat16 is from float32: the KL of their next-token distributions on a text."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kvjax.config import CacheConfig
from kvjax.decode import inputs
from kvjax.decode.shapes import Shapes, plan
from kvjax.decode.step import Prompts, prefill_chunk, start
from kvjax.model import Model

ROWS = 64
"""Positions whose distributions are held at once."""


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Of the distributions after each token of a text, in nats."""

    mean: float
    largest: float
    same_top: float  # share of positions with the same likeliest token
    tokens: int


def _hidden(static: tuple[Any, Shapes], params: Any, prompts: Prompts) -> Float[Array, "T d"]:
    """Final hidden states of one prompt, chunk by chunk through the paged cache."""
    graphdef, shapes = static
    decoder = nnx.merge(graphdef, params)
    limits = jnp.ones((shapes.batch,), jnp.int32)
    state = start(inputs.empty_cache(shapes), decoder.config.hidden_size, limits)
    chunks = prompts.tokens.shape[0] // shapes.chunk

    def one(state: Any, index: Array) -> tuple[Any, Array]:
        return prefill_chunk(
            decoder, state, prompts, index, chunk=shapes.chunk, implementation=shapes.attention
        )

    _, hidden = jax.lax.scan(one, state, jnp.arange(chunks, dtype=jnp.int32))
    return hidden.reshape(prompts.tokens.shape[0], -1)


def hidden_states(model: Model, tokens: Sequence[int]) -> Float[Array, "T d"]:
    """The model's final hidden states at the tokens of one text."""
    shapes = plan(
        model.config,
        model.spec,
        [len(tokens)],
        new_tokens=0,
        prefill_chunk=512,
        cache=CacheConfig(),
    )
    prompts = inputs.flat_prompts([tokens], shapes)
    program = jax.jit(_hidden, static_argnums=0)
    hidden: Array = program((model.graphdef, shapes), model.params, prompts)
    return hidden[: len(tokens)]


def divergence(exact: Model, fast: Model, tokens: Sequence[int]) -> Divergence:
    """KL(exact || fast) over a text.

    Args:
      exact: the reference, in float32.
      fast: the same model in another dtype.
      tokens: of the text.
    """

    @jax.jit
    def compare(ours: tuple[Any, Array], theirs: tuple[Any, Array]) -> tuple[Array, Array]:
        logits = [
            jax.nn.log_softmax(nnx.merge(model.graphdef, params).logits(hidden))
            for model, (params, hidden) in ((exact, ours), (fast, theirs))
        ]
        p, q = logits
        same = jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)
        return jnp.sum(jnp.exp(p) * (p - q), axis=-1), same

    hidden = [hidden_states(model, tokens) for model in (exact, fast)]
    found, same = [], []
    for begin in range(0, len(tokens) // ROWS * ROWS, ROWS):
        part = [h[begin : begin + ROWS] for h in hidden]
        kl, top = compare((exact.params, part[0]), (fast.params, part[1]))
        found.append(kl)
        same.append(top)
    kl, top = jnp.concatenate(found), jnp.concatenate(same)
    return Divergence(float(kl.mean()), float(kl.max()), float(top.mean()), int(kl.size))
