"""The decoder of all families that kvjax runs, one `attend` away from a cache.

A model has no batch axis: it maps one flat stream of tokens, whose owners only `attend` knows.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from kvjax.models.attention import Attend, Attention, Rotations, State
from kvjax.models.config import LayerConfig, ModelConfig
from kvjax.models.deepseek_attention import LatentAttention
from kvjax.models.deepseek_experts import ExpertsMLP
from kvjax.models.deepseek_indexer import SparseLatentAttention
from kvjax.models.linear import Embedding, Linear, project, soft_cap
from kvjax.models.mlp import MLP
from kvjax.models.norm import RMSNorm
from kvjax.models.retention import GatedRetention
from kvjax.models.rope import rotations
from kvjax.models.yoco import CrossAttention, KeysValues


class Layer(nnx.Module):
    """Attention and MLP, each normalised before (and, for Gemma, after) and added."""

    def __init__(self, config: ModelConfig, index: int, dtype: DTypeLike) -> None:
        size, eps, layer = config.hidden_size, config.norm_eps, config.layers[index]
        kind = Attention if layer.latent is None else LatentAttention
        kind = kind if layer.indexer is None else SparseLatentAttention
        self.attention_norm = RMSNorm(size, eps)
        self.attention: Attention | LatentAttention | CrossAttention | GatedRetention
        if layer.retention:
            self.attention = GatedRetention(config, layer, dtype)
        elif config.cross_from is not None and index >= config.cross_from:
            self.attention = CrossAttention(config, layer, dtype, first=index == config.cross_from)
        else:
            self.attention = kind(config, layer, dtype)
        self.attention_post_norm = RMSNorm(size, eps) if config.post_norms else None
        self.mlp_norm = RMSNorm(size, eps)
        self.mlp: MLP | ExpertsMLP
        if config.experts is not None and index in config.experts.layers:
            self.mlp = ExpertsMLP(size, config.experts, config.activation, dtype)
        else:
            self.mlp = MLP(size, config.intermediate_size, config.activation, dtype)
        self.mlp_post_norm = RMSNorm(size, eps) if config.post_norms else None

    def __call__(
        self,
        index: int,
        x: Float32[Array, "T d"],
        turn: Rotations,
        attend: Attend[State],
        state: State,
        left: Any,
    ) -> tuple[Float32[Array, "T d"], State, Any]:
        """The residual stream after layer `index`, and what it leaves to those after it.

        That is the newest choice of tokens, or a cross-decoder's keys and values; None of others.
        """
        y = self.attention_norm(x)
        if isinstance(self.attention, SparseLatentAttention):
            y, state, left = self.attention.chosen(index, y, turn, attend, state, left)
        elif isinstance(self.attention, CrossAttention):
            y, state, left = self.attention.crossed(index, x, y, turn, attend, state, left)
        else:
            y, state = self.attention(index, y, turn, attend, state)
        x = x + (y if self.attention_post_norm is None else self.attention_post_norm(y))
        y = self.mlp(self.mlp_norm(x))
        return x + (y if self.mlp_post_norm is None else self.mlp_post_norm(y)), state, left


class Decoder(nnx.Module):
    """A whole model: token ids in, final hidden states and logits out.

    Make one with `build`, which fills it from a checkpoint; the constructor alone gives zeros.

    Args:
        config: what to build.
        dtype: of matrices; biases, norms and routers stay float32.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike = jnp.float32) -> None:
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nnx.List([Layer(config, i, dtype) for i in range(len(config.layers))])
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
        x, state = self.through(
            range(len(self.layers)), self.embedded(tokens), positions, attend, state
        )
        return self.norm(x), state

    def embedded(self, tokens: Int32[Array, " T"]) -> Float32[Array, "T d"]:
        """The residual stream before the first layer."""
        x = self.embed(tokens)
        return x if self.config.embed_scale is None else x * self.config.embed_scale

    def through(
        self,
        layers: range,
        x: Float32[Array, "T d"],
        positions: Int32[Array, " T"],
        attend: Attend[State],
        state: State,
    ) -> tuple[Float32[Array, "T d"], State]:
        """Runs some layers in order: all, or those of one of the two decoders.

        Args:
            layers: their indices; a cross-decoder's are run from its first.
            x: float32 [T, d], the residual stream before them.
            positions: as in a call of the whole.
            attend: likewise.
            state: likewise.

        Returns:
            The residual stream after them, without the final norm, and the state.
        """
        turns: dict[LayerConfig, Rotations] = {}
        left = None
        for index in layers:
            shape = self.config.layers[index]
            if shape not in turns:
                turns[shape] = rotations(shape, positions)
            x, state, left = self.layers[index](index, x, turns[shape], attend, state, left)
        return x, state

    def shared_keys_values(
        self, x: Float32[Array, "T d"], positions: Int32[Array, " T"]
    ) -> KeysValues:
        """What the cross-decoder attends to, and all that it needs of most tokens.

        Args:
            x: float32 [T, d], the residual stream after the self-decoder.
            positions: as in a call of the whole.
        """
        first = self.config.cross_from
        assert first is not None
        attention = self.layers[first].attention
        assert isinstance(attention, CrossAttention)
        assert attention.source is not None
        made: KeysValues = attention.source(x, rotations(self.config.layers[first], positions))
        return made

    def logits(self, hidden: Float[Array, "*batch d"]) -> Float32[Array, "*batch V"]:
        """Scores of every token of the vocabulary, from hidden states this model returned."""
        table = self.embed.weight if self.head is None else self.head.weight
        return soft_cap(project(hidden, table[...]), self.config.final_soft_cap)
