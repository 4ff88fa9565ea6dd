"""Gated retention: attention whose past is one matrix a head (YOCO, arXiv:2405.05254, section 3.1).

A head's state is S[t] = gate[t] S[t - 1] + k[t] v[t]^T, and a token's output q[t] S[t]. So nothing
grows with the context. Written out for a whole stream, a token sees those before it by q . k times
the product of the gates between them; this file has that form, which is a yardstick.
"""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from kvjax.models.attention import Attend, Rotations, State
from kvjax.models.config import LayerConfig, ModelConfig
from kvjax.models.linear import Linear
from kvjax.models.rope import rotate

TEMPERATURE = 16
"""A gate is the sigmoid of what is projected, to the power of 1 / 16: near 1 at first."""


@runtime_checkable
class RetainingAttend(Protocol[State]):
    """An `attend` that keeps a state for layers of gated retention."""

    def retained(
        self,
        layer: int,
        q: Float[Array, "T H D"],
        k: Float[Array, "T H D"],
        v: Float[Array, "T H Dv"],
        log_gates: Float[Array, "T H"],
        state: State,
    ) -> tuple[Float[Array, "T H Dv"], State]:
        """What each head's query gets of the tokens up to its own.

        Args:
          layer: a Python int.
          q: float32 [T, H, D], rotated, times the layer's scale.
          k: float32 [T, H, D], rotated.
          v: float32 [T, H, Dv].
          log_gates: float32 [T, H], the logarithm of what the state before a token is multiplied
            by; at most 0.
          state: as in `Attend`.
        """
        ...


class GatedRetention(nnx.Module):
    """One layer's projections, gates and norm around an `attend` that keeps a state."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, dtype: DTypeLike) -> None:
        self.shape, self.eps = layer, config.norm_eps
        size, wide = config.hidden_size, layer.num_heads * layer.head_dim
        self.q = Linear(size, wide, bias=False, dtype=dtype)
        self.k = Linear(size, wide, bias=False, dtype=dtype)
        self.v = Linear(size, wide, bias=False, dtype=dtype)
        self.gate = Linear(size, wide, bias=False, dtype=dtype)  # of the output
        self.decay = Linear(size, layer.num_heads, bias=False, dtype=dtype)  # of the state
        self.o = Linear(wide, size, bias=False, dtype=dtype)

    def __call__(
        self,
        index: int,
        x: Float32[Array, "T d"],
        turn: Rotations,
        attend: Attend[State],
        state: State,
    ) -> tuple[Float32[Array, "T d"], State]:
        """Layer `index`'s retention of normalised `x`."""
        if not isinstance(attend, RetainingAttend):
            raise ValueError(
                f"attend is {attend!r}: layer {index} is of gated retention, so it must have "
                "retained, as what causal_attend returns has"
            )
        shape = (x.shape[0], self.shape.num_heads, self.shape.head_dim)
        q, k, v = (part(x).reshape(shape) for part in (self.q, self.k, self.v))
        q = rotate(q, *turn) * self.shape.head_dim**-0.5
        log_gates = jax.nn.log_sigmoid(self.decay(x)) / TEMPERATURE
        out, state = attend.retained(index, q, rotate(k, *turn), v, log_gates, state)
        out *= lax.rsqrt(jnp.mean(jnp.square(out), axis=-1, keepdims=True) + self.eps)
        return self.o(jax.nn.silu(self.gate(x)) * out.reshape(x.shape[0], -1)), state


def parallel_retention(
    q: Float[Array, "T H D"],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H Dv"],
    log_gates: Float[Array, "T H"],
    *,
    segments: Int32[Array, " T"],
    positions: Int32[Array, " T"],
) -> Float32[Array, "T H Dv"]:
    """What `RetainingAttend.retained` gives, from all pairs of a stream's tokens; head by head.

    Args:
      q: as there.
      k: as there.
      v: as there.
      log_gates: as there.
      segments: int32 [T], which sequence each token belongs to.
      positions: int32 [T], each token's place in its sequence.
    """
    seen = segments[:, None] == segments[None]
    seen &= positions[None] <= positions[:, None]

    def one_head(head: tuple[Array, Array, Array, Array]) -> Array:
        q, k, v, log_gate = head
        so_far = jnp.sum(jnp.where(seen, log_gate[None], 0), axis=1)
        kept = jnp.exp(jnp.where(seen, so_far[:, None] - so_far[None], -jnp.inf))
        scores = kept * jnp.matmul(q, k.T, precision=lax.Precision.HIGHEST)
        out: Array = jnp.matmul(scores, v, precision=lax.Precision.HIGHEST)
        return out

    by_head = tuple(x.astype(jnp.float32).swapaxes(0, 1) for x in (q, k, v, log_gates))
    out: Array = lax.map(one_head, by_head).swapaxes(0, 1)
    return out
