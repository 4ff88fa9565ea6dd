"""The gated MLP."""

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float32

from kvjax.models.config import Activation
from kvjax.models.linear import Linear, activate


class MLP(nnx.Module):
    """down(activation(gate(x)) * up(x)), `wide` elements between two products."""

    def __init__(self, size: int, wide: int, activation: Activation, dtype: DTypeLike) -> None:
        self.gate = Linear(size, wide, bias=False, dtype=dtype)
        self.up = Linear(size, wide, bias=False, dtype=dtype)
        self.down = Linear(wide, size, bias=False, dtype=dtype)
        self.activation = activation

    def __call__(self, x: Float32[Array, "T d"]) -> Float32[Array, "T d"]:
        """Maps every token on its own."""
        return self.down(activate(self.activation, self.gate(x)) * self.up(x))
