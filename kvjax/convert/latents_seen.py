"""What a model's latents are like on a text, and what an error of them costs."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float32, Int32, PRNGKeyArray

from kvjax.convert.surprise import sampled_surprise
from kvjax.models import Attend, Decoder, ModelConfig, causal_attend

_ROUNDS = 4
_LEAST = 0.05


class LatentsSeen(NamedTuple):
    """Sums over a text's tokens, of one layer.

    Tokens count by how much the loss depends on them, some hundreds of times as much for the first
    of a text, to which all others attend, as for others. With w that weight, 1 on average, sums
    are of w x, of w x x and of g g / w: so that what makes the first token different is kept, and
    is not taken for what makes others different.
    """

    total: Float32[Array, " R"]
    products: Float32[Array, "R R"]
    slopes: Float32[Array, "R R"]  # of the loss's gradient by a token's latent


def latents_seen(
    graphdef: Any, params: Any, tokens: Int32[Array, " T"], key: PRNGKeyArray
) -> tuple[LatentsSeen, ...]:
    """Run a text and go back: one `LatentsSeen` a layer.

    Args:
      graphdef: of a model with latents in every layer.
      params: its weights.
      tokens: int32 [T], a text of its own.
      key: of the tokens that the loss draws.
    """
    decoder: Decoder = nnx.merge(graphdef, params)
    config, count = decoder.config, tokens.shape[0]
    positions = jnp.arange(count, dtype=jnp.int32)
    plain = causal_attend(config, jnp.zeros_like(tokens), positions)

    def loss(moves: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
        nothing: tuple[Array, ...] = ()
        hidden, seen = decoder(tokens, positions, MovedLatents(config, plain, moves), nothing)
        return sampled_surprise(decoder, hidden, key), seen

    still = tuple(jnp.zeros((count, _rank(config, index))) for index in range(len(config.layers)))
    slopes, seen = jax.grad(loss, has_aux=True)(still)
    return tuple(_sums(latent, slope) for latent, slope in zip(seen, slopes, strict=True))


def _sums(latent: Float32[Array, "T R"], slope: Float32[Array, "T R"]) -> LatentsSeen:
    weights = token_weights(slope)[:, None]
    return LatentsSeen(
        jnp.sum(weights * latent, axis=0),
        (weights * latent).T @ latent,
        (slope / weights).T @ slope,
    )


def token_weights(slope: Float32[Array, "T R"]) -> Float32[Array, " T"]:
    """How much the loss depends on each token, 1 on average, whatever its elements' scales.

    Weights and scales are found in turns, as in Tyler's estimate of a scatter matrix whose samples
    have scales of their own.

    Args:
      slope: the loss's gradient by each token's latent.
    """
    squares = jnp.square(slope)
    weights = jnp.ones(slope.shape[0], jnp.float32)
    for _ in range(_ROUNDS):
        scales = jnp.mean(squares / weights[:, None], axis=0, keepdims=True)
        weights = jnp.mean(squares / (scales + 1e-30), axis=1)
        weights = jnp.maximum(weights / jnp.mean(weights), _LEAST)
    return weights / jnp.mean(weights)


def _rank(config: ModelConfig, layer: int) -> int:
    latent = config.layers[layer].latent
    assert latent is not None
    return latent.rank


@dataclasses.dataclass(frozen=True)
class MovedLatents:
    """Causal attention of one text's tokens to their latents, each moved by a little.

    Attributes:
      config: whose scale to use.
      attend: for layers that keep keys and values.
      moves: float32 [T, R] a layer.
    """

    config: ModelConfig
    attend: Attend[Any]
    moves: tuple[Array, ...]

    def __call__(self, layer: int, q: Array, k: Array, v: Array, state: Any) -> tuple[Array, Any]:
        """As `kvjax.models.Attend` says."""
        return self.attend(layer, q, k, v, state)

    def latents(
        self,
        layer: int,
        q: Float32[Array, "T H R"],
        q_rope: Float32[Array, "T H rope"],
        latent: Float32[Array, "T R"],
        rotated: Float32[Array, "T rope"],
        state: tuple[Array, ...],
    ) -> tuple[Float32[Array, "T H R"], tuple[Array, ...]]:
        """As `kvjax.models.LatentAttend` says; the state collects latents."""
        scale = self.config.scale(layer)

        @jax.checkpoint
        def seen(q: Array, q_rope: Array, latent: Array, rotated: Array) -> Array:
            scores = jnp.einsum("thr,sr->hts", q, latent)
            scores += jnp.einsum("thr,sr->hts", q_rope, rotated)
            visible = jnp.tri(scores.shape[1], dtype=bool)[None]
            weights = jax.nn.softmax(jnp.where(visible, scores * scale, -jnp.inf), axis=-1)
            return jnp.einsum("hts,sr->thr", weights, latent)

        moved = latent + self.moves[layer]
        return seen(q, q_rope, moved, rotated), (*state, latent)
