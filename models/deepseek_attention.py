"""Multi-head latent attention (MLA, arXiv:2405.04434, section 2.1)."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float32

from kvjax.models.attention import (
    Attend,
    ExpandingAttend,
    LatentAttend,
    Rotations,
    State,
)
from kvjax.models.config import LayerConfig, ModelConfig
from kvjax.models.linear import Linear, project_heads
from kvjax.models.norm import RMSNorm
from kvjax.models.rope import halves, rotate

_LATENT_EPS = 1e-6  # of latents' norms: no configuration says it; rms_norm_eps is of the others


class LowRank(nnx.Module):
    """A projection through a normalised latent: up(norm(down(x)))."""

    def __init__(self, down: Linear, up: Linear) -> None:
        self.down = down
        self.norm = RMSNorm(down.weight.shape[0], _LATENT_EPS)
        self.up = up

    def __call__(self, x: Float32[Array, "T I"]) -> Float32[Array, "T O"]:
        """Maps every row."""
        return self.up(self.norm(self.down(x)))


class LatentAttention(nnx.Module):
    """Projections down to latents and up to heads, their norms and RoPE around an `attend`.

    `latents` are all that a token needs to be remembered by; `expand` makes every head's key and
    value of them with `k_up` [H * nope, R] and `v_up` [H * Dv, R], R the latent's rank. An `attend`
    that keeps latents gets them as they are: then `absorb` takes queries through `k_up` instead,
    and `values_of` what attention returns through `v_up`, which is the same by associativity.
    """

    def __init__(self, config: ModelConfig, layer: LayerConfig, dtype: DTypeLike) -> None:
        assert layer.latent is not None
        self.shape, self.latent = layer, layer.latent
        self.nope_dim = layer.head_dim - layer.rope_dim  # elements that are not rotated

        def linear(size_in: int, size_out: int, *, bias: bool = False) -> Linear:
            return Linear(size_in, size_out, bias=bias, dtype=dtype)

        size, heads = config.hidden_size, layer.num_heads
        rank, query_rank = self.latent.rank, self.latent.query_rank
        wide, biases = heads * layer.head_dim, self.latent.biases
        self.q: Linear | LowRank
        if query_rank is None:
            self.q = linear(size, wide, bias=biases)
        else:
            self.q = LowRank(linear(size, query_rank), linear(query_rank, wide))
        self.kv_down = linear(size, rank + layer.rope_dim, bias=biases)
        self.kv_norm = RMSNorm(rank, _LATENT_EPS) if self.latent.normalized else None
        self.k_up = linear(rank, heads * self.nope_dim)  # a bias would add the same to all scores
        self.v_up = linear(rank, heads * layer.value_dim, bias=biases)
        self.o = linear(heads * layer.value_dim, size)

    def __call__(
        self,
        index: int,
        x: Float32[Array, "T d"],
        turn: Rotations,
        attend: Attend[State],
        state: State,
    ) -> tuple[Float32[Array, "T d"], State]:
        """Layer `index`'s attention of normalised `x`."""
        q, q_rope = self.queries(x, turn)
        latent, rotated = self.latents(x, turn)
        if isinstance(attend, ExpandingAttend) and attend.expands(index, x.shape[0]):
            both = jnp.concatenate([q, q_rope], axis=-1)
            out, state = attend.expanded(index, both, latent, rotated, self.expand, state)
        elif isinstance(attend, LatentAttend):
            mean, state = attend.latents(index, self.absorb(q), q_rope, latent, rotated, state)
            out = self.values_of(mean)
        else:
            k, v = self.expand(latent, rotated)
            out, state = attend(index, jnp.concatenate([q, q_rope], axis=-1), k, v, state)
        return self.o(out.reshape(x.shape[0], -1)), state

    def queries(
        self, x: Float32[Array, "T d"], turn: Rotations
    ) -> tuple[Float32[Array, "T H nope"], Float32[Array, "T H rope"]]:
        """Every head's query: the part for keys made from latents, and the rotated part."""
        return self.split(self.q(x), turn)

    def split(
        self, q: Float32[Array, "T HD"], turn: Rotations
    ) -> tuple[Float32[Array, "T H nope"], Float32[Array, "T H rope"]]:
        """Both parts of projected queries, the second one rotated."""
        q = q.reshape(q.shape[0], self.shape.num_heads, self.shape.head_dim)
        return q[..., : self.nope_dim], self._turned(q[..., self.nope_dim :], turn)

    def latents(
        self, x: Float32[Array, "T d"], turn: Rotations
    ) -> tuple[Float32[Array, "T R"], Float32[Array, "T rope"]]:
        """Every token's latent, and the rotated part of all its keys."""
        down = self.kv_down(x)
        rotated = self._turned(down[:, None, self.latent.rank :], turn)
        latent = down[:, : self.latent.rank]
        return latent if self.kv_norm is None else self.kv_norm(latent), rotated[:, 0]

    def expand(
        self, latent: Float32[Array, "T R"], rotated: Float32[Array, "T rope"]
    ) -> tuple[Float32[Array, "T H D"], Float32[Array, "T H Dv"]]:
        """Every head's key and value of tokens whose `latents` these are."""
        count, heads = latent.shape[0], self.shape.num_heads
        own = self.k_up(latent).reshape(count, heads, self.nope_dim)
        shared = jnp.broadcast_to(rotated[:, None], (count, heads, self.shape.rope_dim))
        values = self.v_up(latent).reshape(count, heads, self.shape.value_dim)
        return jnp.concatenate([own, shared], axis=-1), values

    def absorb(self, q: Float32[Array, "T H nope"]) -> Float32[Array, "T H R"]:
        """Queries for latents themselves: q . (k_up latent) is (q k_up) . latent."""
        weight = self.k_up.weight[...]
        return project_heads("thn,hnr->thr", q, weight.reshape(*q.shape[1:], -1))

    def values_of(self, mean: Float32[Array, "T H R"]) -> Float32[Array, "T H Dv"]:
        """Every head's mean of values, of its mean of latents."""
        heads, bias = mean.shape[1], self.v_up.bias
        weight = self.v_up.weight[...].reshape(heads, -1, mean.shape[2])
        values = project_heads("thr,hvr->thv", mean, weight)
        return values if bias is None else values + bias[...].reshape(1, heads, -1)

    def _turned(self, heads: Float32[Array, "T H rope"], turn: Rotations) -> Array:
        return rotate(halves(heads) if self.latent.interleaved else heads, *turn)
