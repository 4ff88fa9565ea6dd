"""The decode loop inside a program: steps until every row has ended, with what each drew."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from kvjax.decode.step import BROKEN, DecodeState


class Drawn(NamedTuple):
    """What rows have drawn."""

    state: DecodeState  # after the last step
    tokens: Int32[Array, "B room"]
    counts: Int32[Array, " B"]  # of them, how many are a row's


def draw_rows(
    state: DecodeState,
    step: Callable[[DecodeState], DecodeState],
    *,
    limits: Int32[Array, " B"],
    room: int,
) -> Drawn:
    """Step until every row has ended; what is drawn from logits that are not finite is no token.

    Args:
      state: each row's first token drawn.
      step: one decode step.
      limits: int32 [B], most tokens a row may draw.
      room: tokens a row has room for.
    """
    batch = state.tokens.shape[0]
    out = jnp.zeros((batch, room), jnp.int32).at[:, 0].set(state.tokens)

    def goes_on(drawn: Drawn) -> Array:
        return jnp.any(drawn.state.active) & drawn.state.sound

    def next_token(drawn: Drawn) -> Drawn:
        state, out, counts = drawn
        active = state.active
        state = step(state)
        column = jnp.where(active, state.step - 1, room)
        row = jnp.arange(batch, dtype=jnp.int32)
        out = out.at[row, column].set(state.tokens, mode="drop")
        return Drawn(state, out, counts + drew(state, active))

    def drew(state: DecodeState, active: Array) -> Array:
        return (active & (state.finished != BROKEN)).astype(jnp.int32)

    first = Drawn(state, out, drew(state, limits > 0))
    return jax.lax.while_loop(goes_on, next_token, first)
