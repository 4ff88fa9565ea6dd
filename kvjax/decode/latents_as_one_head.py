"""An `attend` that is given latents, and choices of tokens, as pages hold them."""

import dataclasses
from collections.abc import Callable
from typing import Any, Generic

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.models import Indexed
from kvjax.models.attention import State


@dataclasses.dataclass(frozen=True)
class AsOneHead(Generic[State]):
    """An `attend` for which latents are keys and values of one head, as in pages.

    Attributes:
      attend: takes what pages hold, and which tokens of them were chosen (None: all). Of latents
        that is keys [T, 1, Dr], values [T, 1, Dc] and queries [T, H, Dc + Dr]: absorbed, and the
        rotated part.
      choice: keeps index keys, and chooses by them; None where no layer has an indexer.
    """

    attend: Callable[[int, Array, Array, Array, State, Any], tuple[Array, State]]
    choice: Callable[[int, Indexed, State], tuple[Any, State]] | None = None

    def __call__(
        self, layer: int, q: Array, k: Array, v: Array, state: State
    ) -> tuple[Array, State]:
        """As `kvjax.models.Attend` says."""
        return self.attend(layer, q, k, v, state, None)

    def choose(self, layer: int, indexed: Indexed, state: State) -> tuple[Any, State]:
        """As `kvjax.models.ChoosingAttend` says."""
        assert self.choice is not None
        return self.choice(layer, indexed, state)

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
        return self.chosen_latents(layer, q, q_rope, latent, rotated, None, state)

    def chosen_latents(
        self,
        layer: int,
        q: Float[Array, "T H Dc"],
        q_rope: Float[Array, "T H Dr"],
        latent: Float[Array, "T Dc"],
        rotated: Float[Array, "T Dr"],
        choice: Any,
        state: State,
    ) -> tuple[Float[Array, "T H Dc"], State]:
        """As `kvjax.models.ChoosingAttend` says."""
        both = jnp.concatenate([q, q_rope], axis=-1)
        return self.attend(layer, both, rotated[:, None], latent[:, None], state, choice)
