"""A model's keys and values of a text, and how much the loss depends on each of them."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float32, Int32

from kvjax.models import Decoder, causal_attend
from kvjax.models.rope import rotate, rotations, unrotated

LOGIT_ROWS = 32
"""Rows whose logits are held at once, in the backward pass too."""


_Pair = tuple[Array, Array]


class Captured(NamedTuple):
    """Of one layer and one text of T tokens."""

    keys: Float32[Array, "T Hkv D"]  # without their rotation
    values: Float32[Array, "T Hkv Dv"]
    key_weights: Float32[Array, "T Hkv D"]  # squares of the loss's gradient, without rotation too
    value_weights: Float32[Array, "T Hkv Dv"]


def captured(graphdef: Any, params: Any, tokens: Int32[Array, " T"]) -> tuple[Captured, ...]:
    """Run a text and go back: one `Captured` a layer.

    The loss is the sum of the negative log-probabilities of tokens 1 to T - 1. Its squared gradient
    is Fisher's information of one text (KVQuant, arXiv:2401.18079, section 3.3).

    Args:
      graphdef: of the model.
      params: its weights.
      tokens: int32 [T], a text from its beginning.
    """
    decoder: Decoder = nnx.merge(graphdef, params)
    layers = decoder.config.layers
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    plain = causal_attend(decoder.config, jnp.zeros_like(tokens), positions)

    def loss(moves: Sequence[_Pair]) -> tuple[Array, tuple[_Pair, ...]]:
        def attend(
            layer: int, q: Array, k: Array, v: Array, seen: tuple[_Pair, ...]
        ) -> tuple[Array, tuple[_Pair, ...]]:
            move_k, move_v = moves[layer]
            k, v = k + move_k, v + move_v
            out, _ = jax.checkpoint(functools.partial(plain, layer))(q, k, v, None)
            return out, (*seen, (k, v))

        nothing: tuple[_Pair, ...] = ()
        hidden, seen = decoder(tokens, positions, attend, nothing)
        return _surprise(decoder, hidden[:-1], tokens[1:]), seen

    still = []
    for layer in layers:
        shape = (tokens.shape[0], layer.num_kv_heads, layer.head_dim)
        still.append((jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32)))
    slopes, seen = jax.grad(loss, has_aux=True)(still)
    result = []
    for layer, (k, v), (slope_k, slope_v) in zip(layers, seen, slopes, strict=True):
        cosines, sines = rotations(layer, positions)
        slope_k = rotate(slope_k, cosines, -sines)  # by what the rotation is of
        keys = unrotated(k, layer, positions)
        result.append(Captured(keys, v, slope_k * slope_k, slope_v * slope_v))
    return tuple(result)


def first_keys(
    graphdef: Any, params: Any, tokens: Int32[Array, " T"]
) -> tuple[Float32[Array, "T Hkv D"], ...]:
    """The key that each token has in each layer, without its rotation, where a text begins with it.

    Args:
      graphdef: of the model.
      params: its weights.
      tokens: int32 [T], each a text of its own.
    """
    decoder: Decoder = nnx.merge(graphdef, params)
    nowhere = jnp.zeros_like(tokens)
    plain = causal_attend(decoder.config, jnp.arange(tokens.shape[0], dtype=jnp.int32), nowhere)

    def attend(
        layer: int, q: Array, k: Array, v: Array, seen: tuple[Array, ...]
    ) -> tuple[Array, tuple[Array, ...]]:
        keys = unrotated(k, decoder.config.layers[layer], nowhere)
        return plain(layer, q, k, v, None)[0], (*seen, keys)

    nothing: tuple[Array, ...] = ()
    return decoder(tokens, nowhere, attend, nothing)[1]


def _surprise(
    decoder: Decoder, hidden: Float32[Array, "T d"], targets: Int32[Array, " T"]
) -> Float32[Array, ""]:
    """The sum of targets' negative log-probabilities, a few rows at a time."""
    count = targets.shape[0]
    extra = -count % LOGIT_ROWS
    rows = jnp.pad(hidden, ((0, extra), (0, 0))).reshape(-1, LOGIT_ROWS, hidden.shape[1])
    wanted = jnp.pad(targets, (0, extra)).reshape(-1, LOGIT_ROWS)
    real = (jnp.arange(count + extra, dtype=jnp.int32) < count).reshape(-1, LOGIT_ROWS)

    @jax.checkpoint
    def some(block: tuple[Array, Array, Array]) -> Array:
        hidden, wanted, real = block
        logits = decoder.logits(hidden)
        chosen = jnp.take_along_axis(logits, wanted[:, None], axis=1)[:, 0]
        return jnp.sum(jnp.where(real, jax.nn.logsumexp(logits, axis=1) - chosen, 0.0))

    return jnp.sum(jax.lax.map(some, (rows, wanted, real)))
