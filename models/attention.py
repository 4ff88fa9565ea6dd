"""Attention up to a cache: what a layer computes around an `attend`."""

from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from kvjax.models.config import LayerConfig, ModelConfig
from kvjax.models.linear import Linear
from kvjax.models.norm import RMSNorm
from kvjax.models.rope import rotate

State = TypeVar("State")
"""Whatever an `attend` carries from layer to layer: any pytree, or None."""

Heads = Float[Array, "T H D"]
Attend = Callable[[int, Heads, Heads, Heads, State], tuple[Heads, State]]
"""attend(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], state) -> (out [T, Hq, Dv], state).

`layer` is a Python int; q, k and v are float32, rotated and normalised. In a cross-decoder (YOCO),
all layers are given the keys and values of its first.
"""


@runtime_checkable
class LatentAttend(Protocol[State]):
    """An `attend` that keeps latents: a layer that has them never makes keys and values of them.

    Its queries are absorbed, so that the score of a token is that of the model's own heads:
    scale * (q . latent + q_rope . rotated).
    """

    def latents(
        self,
        layer: int,
        q: Float[Array, "T H R"],
        q_rope: Float[Array, "T H rope"],
        latent: Float[Array, "T R"],
        rotated: Float[Array, "T rope"],
        state: State,
    ) -> tuple[Float[Array, "T H R"], State]:
        """What each head's query sees: a mean of latents, in place of one of values.

        Args:
          layer: a Python int.
          q: float32 [T, H, R], queries taken to the latents' space.
          q_rope: float32 [T, H, rope], the rotated parts of queries.
          latent: float32 [T, R], all that a token needs to be remembered by, with
          rotated: float32 [T, rope], the part of its keys that all heads share.
          state: as in `Attend`.
        """
        ...


Expand = Callable[
    [Float[Array, "S R"], Float[Array, "S rope"]],
    tuple[Float[Array, "S H D"], Float[Array, "S H Dv"]],
]
"""Every head's keys and values of S tokens, of their latents and the rotated part of their keys."""


@runtime_checkable
class ExpandingAttend(LatentAttend[State], Protocol[State]):
    """An `attend` that keeps latents, and makes keys and values of them where that costs less."""

    def expands(self, layer: int, queries: int) -> bool:
        """Whether it does for so many queries at once: then `expanded` is called, not `latents`.

        Args:
          layer: a Python int.
          queries: T.
        """
        ...

    def expanded(
        self,
        layer: int,
        q: Float[Array, "T H D"],
        latent: Float[Array, "T R"],
        rotated: Float[Array, "T rope"],
        expand: Expand,
        state: State,
    ) -> tuple[Float[Array, "T H Dv"], State]:
        """What each head's query sees, as values.

        Args:
          layer: a Python int.
          q: float32 [T, H, D], as keys are.
          latent: float32 [T, R], as in `LatentAttend`.
          rotated: float32 [T, rope], likewise.
          expand: makes keys and values of latents that are kept.
          state: as in `Attend`.
        """
        ...


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
