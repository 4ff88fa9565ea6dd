"""Attention to chosen tokens and retention without a cache, over the stream itself: yardsticks."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from kvjax.models.attention import Attend
from kvjax.models.config import ModelConfig
from kvjax.models.deepseek_indexer import Indexed
from kvjax.models.retention import parallel_retention

_HIGHEST = lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class CausalAttend:
    """An `attend` with no cache, which chooses tokens or retains where a layer asks for it.

    Attributes:
        config: the model's.
        segments: int32 [T], which sequence each token belongs to.
        positions: int32 [T], each token's logical position in its sequence.
        dense: attention of layers that choose nothing.
    """

    config: ModelConfig
    segments: Int32[Array, " T"]
    positions: Int32[Array, " T"]
    dense: Attend[None]

    def __call__(
        self, layer: int, q: Array, k: Array, v: Array, state: None
    ) -> tuple[Float32[Array, "T Hq Dv"], None]:
        """As `kvjax.models.Attend` says."""
        return self.dense(layer, q, k, v, state)

    def retained(
        self,
        layer: int,
        q: Float[Array, "T H D"],
        k: Float[Array, "T H D"],
        v: Float[Array, "T H Dv"],
        log_gates: Float[Array, "T H"],
        state: None,
    ) -> tuple[Float32[Array, "T H Dv"], None]:
        """As `kvjax.models.RetainingAttend` says."""
        where = {"segments": self.segments, "positions": self.positions}
        return parallel_retention(q, k, v, log_gates, **where), state

    def choose(self, layer: int, indexed: Indexed, state: None) -> tuple[Bool[Array, "T T"], None]:
        """As `kvjax.models.ChoosingAttend` says: which tokens of the stream each query sees."""
        indexer = self.config.layers[layer].indexer
        assert indexer is not None
        products = jnp.einsum("thd,sd->ths", indexed.q, indexed.key, precision=_HIGHEST)
        scores = jnp.sum(indexed.weights[..., None] * jax.nn.relu(products), axis=1)
        seen = self.segments[:, None] == self.segments[None]
        seen &= self.positions[None] <= self.positions[:, None]
        rank = jnp.where(jnp.isnan(scores), -jnp.inf, scores * indexer.scale + 0.0)
        # What is seen first, then by score; of equal scores the earlier position.
        place = jnp.broadcast_to(self.positions[None], rank.shape)
        *_, order = lax.sort(
            (~seen, -rank, place, jnp.broadcast_to(jnp.arange(rank.shape[1])[None], rank.shape)),
            dimension=1,
            num_keys=3,
        )
        among_first = jnp.argsort(order, axis=1) < indexer.top_k
        return seen & among_first, state

    def chosen_latents(
        self,
        layer: int,
        q: Float[Array, "T H R"],
        q_rope: Float[Array, "T H rope"],
        latent: Float[Array, "T R"],
        rotated: Float[Array, "T rope"],
        choice: Bool[Array, "T T"],
        state: None,
    ) -> tuple[Float[Array, "T H R"], None]:
        """As `kvjax.models.ChoosingAttend` says."""
        scores = jnp.einsum("thr,sr->ths", q, latent, precision=_HIGHEST)
        scores += jnp.einsum("thd,sd->ths", q_rope, rotated, precision=_HIGHEST)
        scores = jnp.where(choice[:, None], scores * self.config.scale(layer), -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        return jnp.einsum("ths,sr->thr", weights, latent, precision=_HIGHEST), state
