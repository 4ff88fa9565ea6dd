"""An `attend` that is given latents, and choices of tokens, as pages hold them."""

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.models import Expand, Indexed
from kvjax.models.attention import State


class Expanded(NamedTuple):
    """That latents are to be attended to as the keys and values that are made of them."""

    expand: Expand


@dataclasses.dataclass(frozen=True)
class AsOneHead(Generic[State]):
    """An `attend` for which latents are keys and values of one head, as in pages.

    Attributes:
      attend: takes what pages hold, and which tokens of them were chosen (None: all). Of latents
        that is keys [T, 1, Dr], values [T, 1, Dc] and queries [T, H, Dc + Dr]: absorbed, and the
        rotated part.
      choice: keeps index keys, and chooses by them; None where no layer has an indexer.
      expanding: of a layer and a number of queries, whether keys and values are made of latents;
        `attend` is then given queries [T, H, D] of these, and an `Expanded` in place of a choice.
        None is never.
      retain: of layers of gated retention, as `kvjax.models.RetainingAttend` says; None where none
        is.
    """

    attend: Callable[[int, Array, Array, Array, State, Any], tuple[Array, State]]
    choice: Callable[[int, Indexed, State], tuple[Any, State]] | None = None
    expanding: Callable[[int, int], bool] | None = None
    retain: Callable[[int, Array, Array, Array, Array, State], tuple[Array, State]] | None = None

    def __call__(
        self, layer: int, q: Array, k: Array, v: Array, state: State
    ) -> tuple[Array, State]:
        """As `kvjax.models.Attend` says."""
        return self.attend(layer, q, k, v, state, None)

    def choose(self, layer: int, indexed: Indexed, state: State) -> tuple[Any, State]:
        """As `kvjax.models.ChoosingAttend` says."""
        assert self.choice is not None
        return self.choice(layer, indexed, state)

    def retained(
        self,
        layer: int,
        q: Float[Array, "T H D"],
        k: Float[Array, "T H D"],
        v: Float[Array, "T H Dv"],
        log_gates: Float[Array, "T H"],
        state: State,
    ) -> tuple[Float[Array, "T H Dv"], State]:
        """As `kvjax.models.RetainingAttend` says."""
        assert self.retain is not None
        return self.retain(layer, q, k, v, log_gates, state)

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

    def expands(self, layer: int, queries: int) -> bool:
        """As `kvjax.models.ExpandingAttend` says."""
        return self.expanding is not None and self.expanding(layer, queries)

    def expanded(
        self,
        layer: int,
        q: Float[Array, "T H D"],
        latent: Float[Array, "T Dc"],
        rotated: Float[Array, "T Dr"],
        expand: Expand,
        state: State,
    ) -> tuple[Float[Array, "T H Dv"], State]:
        """As `kvjax.models.ExpandingAttend` says."""
        one_head = rotated[:, None], latent[:, None]
        return self.attend(layer, q, *one_head, state, Expanded(expand))

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
