"""An `attend` that is given latents as pages hold them."""

import dataclasses
from collections.abc import Callable
from typing import Generic

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.models.attention import State


@dataclasses.dataclass(frozen=True)
class AsOneHead(Generic[State]):
    """An `attend` for which latents are keys and values of one head, as in pages.

    Attributes:
      attend: takes of latents keys [T, 1, Dr], values [T, 1, Dc] and queries [T, H, Dc + Dr]:
        absorbed, and the rotated part.
    """

    attend: Callable[[int, Array, Array, Array, State], tuple[Array, State]]

    def __call__(
        self, layer: int, q: Array, k: Array, v: Array, state: State
    ) -> tuple[Array, State]:
        """As `kvjax.models.Attend` says."""
        return self.attend(layer, q, k, v, state)

    def latents(
        self,
        layer: int,
        q: Float[Array, "T H Dc"],
        q_rope: Float[Array, "T H Dr"],
        latent: Float[Array, "T Dc"],
        rotated: Float[Array, "T Dr"],
        state: State,
    ) -> tuple[Float[Array, "T H Dc"], State]:
        """As `kvjax.models.LatentAttend` says."""
        both = jnp.concatenate([q, q_rope], axis=-1)
        return self.attend(layer, both, rotated[:, None], latent[:, None], state)
