"""Multi-head latent attention to tokens that a lightning indexer chooses (DSA)."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from kvjax.models.attention import Attend, Rotations, State
from kvjax.models.config import LayerConfig, ModelConfig
from kvjax.models.deepseek_attention import LatentAttention, LowRank
from kvjax.models.linear import Linear
from kvjax.models.norm import LayerNorm
from kvjax.models.rope import halves, rotate

_KEY_EPS = 1e-6  # of the index keys' norm: no configuration says it


class Indexed(NamedTuple):
    """What tokens are chosen by: token s scores sum_j w_j ReLU(q_j . k_s) * scale for a query.

    Attributes:
        q: float32 [T, Hi, Di], index queries, a part of each rotated.
        weights: float32 [T, Hi].
        key: float32 [T, Di], the index key that a token is remembered by.
    """

    q: Float[Array, "T Hi Di"]
    weights: Float[Array, "T Hi"]
    key: Float[Array, "T Di"]


@runtime_checkable
class ChoosingAttend(Protocol[State]):
    """An `attend` that chooses tokens: what a layer with an indexer needs."""

    def choose(self, layer: int, indexed: Indexed, state: State) -> tuple[Any, State]:
        """Keep the tokens' index keys, and choose what each query attends to.

        Args:
          layer: a Python int; one whose indexer does not share.
          indexed: of the stream's tokens.
          state: as in `Attend`.

        Returns:
          The choice, as `chosen_latents` takes it, in this layer and those that share it.
        """
        ...

    def chosen_latents(
        self,
        layer: int,
        q: Float[Array, "T H R"],
        q_rope: Float[Array, "T H rope"],
        latent: Float[Array, "T R"],
        rotated: Float[Array, "T rope"],
        choice: Any,
        state: State,
    ) -> tuple[Float[Array, "T H R"], State]:
        """As `LatentAttend.latents`, of chosen tokens alone.

        Args:
          layer: a Python int.
          q: float32 [T, H, R], queries taken to the latents' space.
          q_rope: float32 [T, H, rope], the rotated parts of queries.
          latent: float32 [T, R].
          rotated: float32 [T, rope].
          choice: what `choose` returned.
          state: as in `Attend`.
        """
        ...


class LightningIndexer(nnx.Module):
    """Index queries of a layer's query latents; one index key and the weights of its input.

    The first elements of queries and keys are rotated by the layer's own angles. DeepSeek turns
    both by a Hadamard matrix too, so that they round better: as it is orthogonal, no product
    changes, and it is left out.
    """

    def __init__(self, config: ModelConfig, layer: LayerConfig, dtype: DTypeLike) -> None:
        assert layer.indexer is not None
        assert layer.latent is not None
        assert layer.latent.query_rank is not None
        self.shape, self.rope_dim = layer.indexer, layer.rope_dim
        heads, dim, size = self.shape.num_heads, self.shape.head_dim, config.hidden_size
        self.q = Linear(layer.latent.query_rank, heads * dim, bias=False, dtype=dtype)
        self.k = Linear(size, dim, bias=False, dtype=dtype)
        self.k_norm = LayerNorm(dim, _KEY_EPS)
        self.weights = Linear(size, heads, bias=False, dtype=jnp.float32)

    def __call__(
        self, x: Float32[Array, "T d"], latent: Float32[Array, "T Rq"], turn: Rotations
    ) -> Indexed:
        """What tokens are chosen by.

        Args:
            x: float32 [T, d], the layer's normalised input.
            latent: float32 [T, Rq], normalised latents of its queries.
            turn: cosines and sines of the tokens' positions.
        """
        q = self.q(latent).reshape(x.shape[0], self.shape.num_heads, self.shape.head_dim)
        key = self.k_norm(self.k(x))[:, None]
        return Indexed(self._turned(q, turn), self.weights(x), self._turned(key, turn)[:, 0])

    def _turned(self, heads: Float32[Array, "T H Di"], turn: Rotations) -> Array:
        first, rest = heads[..., : self.rope_dim], heads[..., self.rope_dim :]
        first = halves(first) if self.shape.interleaved else first
        return jnp.concatenate([rotate(first, *turn), rest], axis=-1)


class SparseLatentAttention(LatentAttention):
    """Latent attention whose `attend` sees chosen tokens: those of its indexer, or a shared choice.

    There is only the absorbed form: what is not chosen is not made keys and values of.
    """

    def __init__(self, config: ModelConfig, layer: LayerConfig, dtype: DTypeLike) -> None:
        super().__init__(config, layer, dtype)
        assert layer.indexer is not None
        shares = layer.indexer.shares
        self.indexer = None if shares else LightningIndexer(config, layer, dtype)

    def chosen(
        self,
        index: int,
        x: Float32[Array, "T d"],
        turn: Rotations,
        attend: Attend[State] | ChoosingAttend[State],
        state: State,
        choice: Any,
    ) -> tuple[Float32[Array, "T d"], State, Any]:
        """Layer `index`'s attention of normalised `x`, and the choice that later layers may share.

        Raises:
            ValueError: `attend` does not choose tokens.
        """
        if not isinstance(attend, ChoosingAttend):
            raise ValueError(
                f"attend is {attend!r}: layer {index} attends to tokens that an indexer chooses, "
                "so it must have choose and chosen_latents, as what causal_attend returns has"
            )
        if self.indexer is None:
            q, q_rope = self.queries(x, turn)
        else:
            assert isinstance(self.q, LowRank)
            latent = self.q.norm(self.q.down(x))
            q, q_rope = self.split(self.q.up(latent), turn)
            choice, state = attend.choose(index, self.indexer(x, latent, turn), state)
        of_tokens = self.latents(x, turn)
        mean, state = attend.chosen_latents(
            index, self.absorb(q), q_rope, *of_tokens, choice, state
        )
        return self.o(self.values_of(mean).reshape(x.shape[0], -1)), state, choice
