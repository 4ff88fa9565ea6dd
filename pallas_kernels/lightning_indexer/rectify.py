"""ReLU that keeps NaN."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def rectified(products: Float[Array, "..."]) -> Float[Array, "..."]:
    """The greater of 0 and each number; NaN stays, which a maximum need not keep on all machines.

    Args:
        products: of any shape.
    """
    return jnp.where(products < 0, jnp.zeros((), products.dtype), products)
