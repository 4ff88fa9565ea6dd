"""The decoder of the Llama, Mistral, Qwen and Gemma 3 families, one `attend` away from a cache.

A model has no batch axis: it maps one flat stream of tokens, whose owners only `attend` knows.
"""

from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from kvjax.models.config import LayerConfig, ModelConfig
from kvjax.models.linear import Embedding, Linear, activate, project, soft_cap
from kvjax.models.norm import RMSNorm
from kvjax.models.rope import rotate, rotations

State = TypeVar("State")
"""Whatever an `attend` carries from layer to layer: any pytree, or None."""

Heads = Float[Array, "T H D"]
Attend = Callable[[int, Heads, Heads, Heads, State], tuple[Heads, State]]
"""attend(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], state) -> (out [T, Hq, Dv], state).

`layer` is a Python int; q, k and v are float32, rotated and normalised.
"""

Rotations = tuple[Float32[Array, "T half"], Float32[Array, "T half"]]


class Attention(nnx.Module):
    """Projections, norms and RoPE around an `attend`."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, dtype: DTypeLike) -> None:
        self.shape = layer
        size, bias = config.hidden_size, config.qkv_bias
        wide = layer.num_heads * layer.head_dim
        narrow = layer.num_kv_heads * layer.head_dim
        self.q = Linear(size, wide, bias=bias, dtype=dtype)
        self.k = Linear(size, narrow, bias=bias, dtype=dtype)
        self.v = Linear(size, narrow, bias=bias, dtype=dtype)
        self.o = Linear(wide, size, bias=False, dtype=dtype)
        self.q_norm = RMSNorm(layer.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(layer.head_dim, config.norm_eps) if config.qk_norm else None

    def __call__(
        self,
        index: int,
        x: Float32[Array, "T d"],
        turn: Rotations,
        attend: Attend[State],
        state: State,
    ) -> tuple[Float32[Array, "T d"], State]:
        """Layer `index`'s attention of normalised `x`."""
        count, head_dim = x.shape[0], self.shape.head_dim
        q = self.q(x).reshape(count, self.shape.num_heads, head_dim)
        k = self.k(x).reshape(count, self.shape.num_kv_heads, head_dim)
        v = self.v(x).reshape(count, self.shape.num_kv_heads, head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out, state = attend(index, rotate(q, *turn), rotate(k, *turn), v, state)
        return self.o(out.reshape(count, -1)), state


class MLP(nnx.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        size, wide = config.hidden_size, config.intermediate_size
        self.gate = Linear(size, wide, bias=False, dtype=dtype)
        self.up = Linear(size, wide, bias=False, dtype=dtype)
        self.down = Linear(wide, size, bias=False, dtype=dtype)
        self.activation = config.activation

    def __call__(self, x: Float32[Array, "T d"]) -> Float32[Array, "T d"]:
        """Maps every token on its own."""
        return self.down(activate(self.activation, self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    """Attention and MLP, each normalised before (and, for Gemma, after) and added."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, dtype: DTypeLike) -> None:
        size, eps = config.hidden_size, config.norm_eps
        self.attention_norm = RMSNorm(size, eps)
        self.attention = Attention(config, layer, dtype)
        self.attention_post_norm = RMSNorm(size, eps) if config.post_norms else None
        self.mlp_norm = RMSNorm(size, eps)
        self.mlp = MLP(config, dtype)
        self.mlp_post_norm = RMSNorm(size, eps) if config.post_norms else None

    def __call__(
        self,
        index: int,
        x: Float32[Array, "T d"],
        turn: Rotations,
        attend: Attend[State],
        state: State,
    ) -> tuple[Float32[Array, "T d"], State]:
        """The residual stream after layer `index`."""
        y, state = self.attention(index, self.attention_norm(x), turn, attend, state)
        x = x + (y if self.attention_post_norm is None else self.attention_post_norm(y))
        y = self.mlp(self.mlp_norm(x))
        return x + (y if self.mlp_post_norm is None else self.mlp_post_norm(y)), state


class Decoder(nnx.Module):
    """A whole model: token ids in, final hidden states and logits out.

    Make one with `build`, which fills it from a checkpoint; the constructor alone gives zeros.

    Args:
        config: what to build.
        dtype: of matrices, biases and norms stay float32.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike = jnp.float32) -> None:
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nnx.List([Layer(config, layer, dtype) for layer in config.layers])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = (
            None
            if config.tie_embeddings
            else Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        )

    def __call__(
        self,
        tokens: Int32[Array, " T"],
        positions: Int32[Array, " T"],
        attend: Attend[State],
        state: State,
    ) -> tuple[Float32[Array, "T d"], State]:
        """Runs every layer over one flat stream of tokens.

        Args:
            tokens: ids within the vocabulary, of any number of sequences after one another.
            positions: each token's logical position in its own sequence, from 0.
            attend: what a layer's queries see; called once a layer, in order.
            state: what the first `attend` gets.

        Returns:
            Hidden states with the final norm applied, and the state of the last `attend`.
        """
        x = self.embed(tokens)
        if self.config.embed_scale is not None:
            x = x * self.config.embed_scale
        turns: dict[LayerConfig, Rotations] = {}
        for index, shape in enumerate(self.config.layers):
            if shape not in turns:
                turns[shape] = rotations(shape, positions)
            x, state = self.layers[index](index, x, turns[shape], attend, state)
        return self.norm(x), state

    def logits(self, hidden: Float[Array, "*batch d"]) -> Float32[Array, "*batch V"]:
        """Scores of every token of the vocabulary, from hidden states this model returned."""
        table = self.embed.weight if self.head is None else self.head.weight
        return soft_cap(project(hidden, table[...]), self.config.final_soft_cap)
