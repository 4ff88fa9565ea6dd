"""Weight application: the one place where the tricks of matrix products live."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32


def project(x: Float[Array, "*batch I"], weight: Float[Array, "O I"]) -> Float32[Array, "*batch O"]:
    """Multiplies rows by a weight (x @ weight.T), accumulated and returned in float32.

    `x` is cast to the weight's dtype: bfloat16 weights make a bfloat16 product with float32
    accumulation. float32 weights mean float32 on every backend (no TF32, no bfloat16 passes).
    """
    rows = x.reshape(-1, x.shape[-1]).astype(weight.dtype)
    count = rows.shape[0]
    exact = weight.dtype == jnp.float32
    if count == 1 and not exact:
        # XLA's CPU product of one bfloat16 row takes a slow path, about eight times as long as
        # that of two rows. Elsewhere the second row costs nothing: a tile has at least eight.
        rows = jnp.pad(rows, ((0, 1), (0, 0)))
    out: Array = lax.dot_general(
        rows,
        weight,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )
    return out[:count].reshape(*x.shape[:-1], weight.shape[0])


def project_heads(
    equation: str, x: Float[Array, "T H I"], weight: Float[Array, "H J K"]
) -> Float32[Array, "T H O"]:
    """Multiplies each head's rows by its own matrix, in the precision of `project`.

    Args:
      equation: as `jnp.einsum` takes it.
      x: a row a token and head.
      weight: a matrix a head.
    """

    def product(x: Array, weight: Array) -> Array:
        exact = weight.dtype == jnp.float32
        return jnp.einsum(
            equation,
            x,
            weight,
            precision=lax.Precision.HIGHEST if exact else None,
            preferred_element_type=jnp.float32,
        )

    def widened(x: Array, weight: Array) -> Array:
        # Products of bfloat16 numbers are exact in float32. XLA's CPU backend has none of batches
        # of bfloat16 matrices that return float32, and says so only when the program runs.
        return product(x.astype(jnp.float32), weight.astype(jnp.float32))

    result: Array = lax.platform_dependent(
        x.astype(weight.dtype), weight, cpu=widened, default=product
    )
    return result


class Linear(nnx.Module):
    """An affine map whose weight is stored [out, in]; the bias, if any, is float32."""

    def __init__(self, size_in: int, size_out: int, *, bias: bool, dtype: DTypeLike) -> None:
        self.weight = nnx.Param(jnp.zeros((size_out, size_in), dtype))
        self.bias = nnx.Param(jnp.zeros((size_out,), jnp.float32)) if bias else None

    def __call__(self, x: Float[Array, "T I"]) -> Float32[Array, "T O"]:
        """Maps every row."""
        y = project(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...][None, :]


class Embedding(nnx.Module):
    """A table [vocabulary, hidden]: rows by token id, and, tied, the LM head."""

    def __init__(self, vocab_size: int, size: int, *, dtype: DTypeLike) -> None:
        self.weight = nnx.Param(jnp.zeros((vocab_size, size), dtype))

    def __call__(self, tokens: Int32[Array, " T"]) -> Float32[Array, "T d"]:
        """One row a token; ids must lie within the vocabulary (see `check_tokens`)."""
        rows: Array = self.weight[...].at[tokens].get(mode="clip")
        return rows.astype(jnp.float32)


def soft_cap(x: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """Cap * tanh(x / cap): keeps values within (-cap, cap); None leaves them alone."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def activate(name: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The gate's nonlinearity."""
    return jax.nn.silu(x) if name == "silu" else jax.nn.gelu(x, approximate=True)
