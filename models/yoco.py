"""A cross-decoder's attention: keys and values are made once (YOCO, arXiv:2405.05254).

A model's first layers are a self-decoder, whose state does not grow with the context: windows, or
gated retention (`kvjax.models.retention`). The others are a cross-decoder: its first layer makes
keys and values of what the self-decoder put out, and all of its layers attend to these. So a
token's way to the last layer is only gone where what comes out is wanted (section 2.3).
"""

from typing import NamedTuple

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float32

from kvjax.models.attention import Attend, Rotations, State
from kvjax.models.config import LayerConfig, ModelConfig
from kvjax.models.linear import Linear
from kvjax.models.norm import RMSNorm
from kvjax.models.rope import rotate


class KeysValues(NamedTuple):
    """What all layers of a cross-decoder attend to."""

    keys: Float32[Array, "T Hkv D"]  # rotated
    values: Float32[Array, "T Hkv D"]


class Source(nnx.Module):
    """Makes keys and values of the residual stream, under a norm of its own (section 2.2)."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, dtype: DTypeLike) -> None:
        self.shape = layer
        narrow = layer.num_kv_heads * layer.head_dim
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.k = Linear(config.hidden_size, narrow, bias=False, dtype=dtype)
        self.v = Linear(config.hidden_size, narrow, bias=False, dtype=dtype)

    def __call__(self, x: Float32[Array, "T d"], turn: Rotations) -> KeysValues:
        """Of each token, from what the self-decoder put out."""
        normal = self.norm(x)
        shape = (x.shape[0], self.shape.num_kv_heads, self.shape.head_dim)
        keys = rotate(self.k(normal).reshape(shape), *turn)
        return KeysValues(keys, self.v(normal).reshape(shape))


class CrossAttention(nnx.Module):
    """One layer's queries to keys and values that the cross-decoder's first layer makes.

    Args:
      config: the model's.
      layer: the layer's shape.
      dtype: of matrices.
      first: whether it is that layer.
    """

    def __init__(
        self, config: ModelConfig, layer: LayerConfig, dtype: DTypeLike, *, first: bool
    ) -> None:
        self.shape = layer
        size, wide = config.hidden_size, layer.num_heads * layer.head_dim
        self.q = Linear(size, wide, bias=False, dtype=dtype)
        self.o = Linear(wide, size, bias=False, dtype=dtype)
        self.source = Source(config, layer, dtype) if first else None

    def crossed(
        self,
        index: int,
        x: Float32[Array, "T d"],
        normal: Float32[Array, "T d"],
        turn: Rotations,
        attend: Attend[State],
        state: State,
        made: KeysValues | None,
    ) -> tuple[Float32[Array, "T d"], State, KeysValues]:
        """Layer `index`'s attention, and the keys and values that it was to.

        Args:
          index: of the layer.
          x: float32 [T, d], the residual stream.
          normal: the same, normalised for queries.
          turn: cosines and sines.
          attend: what queries see.
          state: as in `Attend`.
          made: what the first layer made; None for itself.
        """
        seen = made if self.source is None else self.source(x, turn)
        assert seen is not None
        q = self.q(normal).reshape(x.shape[0], self.shape.num_heads, self.shape.head_dim)
        out, state = attend(index, rotate(q, *turn), *seen, state)
        return self.o(out.reshape(x.shape[0], -1)), state, seen
