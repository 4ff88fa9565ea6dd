"""Root-mean-square and layer normalisation (arXiv:1910.07467, 1607.06450), always in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis.

    The weight is the factor itself: loaders of checkpoints that store it less one (Gemma in
    safetensors) add the one.
    """

    def __init__(self, size: int, eps: float) -> None:
        self.weight = nnx.Param(jnp.ones((size,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch D"]) -> Float32[Array, "*batch D"]:
        """Normalises each row of `x` (any floating dtype) into float32."""
        x = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return x * inverse * weight


class LayerNorm(nnx.Module):
    """(x - mean(x)) / std(x) * weight + bias over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = nnx.Param(jnp.ones((size,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((size,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "T D"]) -> Float32[Array, "T D"]:
        """Normalises each row of `x` (any floating dtype) into float32."""
        x = x.astype(jnp.float32)
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        return x * inverse * self.weight[...][None] + self.bias[...][None]
