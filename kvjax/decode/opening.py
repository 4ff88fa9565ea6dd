"""The programs that take one prompt to the end of prefill, a program each."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int32

from kvjax.decode import inputs
from kvjax.decode.calls import Progress
from kvjax.decode.meter import Meter
from kvjax.decode.shapes import Shapes
from kvjax.decode.step import DecodeState, Prompts, prefill_last, start
from kvjax.model import Model

IN_PLACE: dict[str, Any] = {"donate": (1,), "result_as": 1}
"""Options of a program that takes parameters and a state, and hands the state on."""


def empty_state(
    model: Model, shapes: Shapes, limits: Int32[Array, " B"], meter: Meter
) -> DecodeState:
    """The state before anything ran, its pools as programs hand them on.

    Args:
      model: where it will run.
      shapes: the programs'.
      limits: as in `Rules`.
      meter: of the call.
    """
    empty = (model.config.hidden_size, shapes)
    sharding = jax.tree.leaves(model.params)[0].sharding
    state = jax.eval_shape(lambda limits: _start(empty, limits), limits)
    formats = inputs.formats_between(state, sharding)
    made: DecodeState = meter.program(_start, empty, limits, formats=formats)(limits)
    return made


def prefill_program(
    model: Model, ids: list[int], shapes: Shapes, state: DecodeState, meter: Meter
) -> Callable[[DecodeState, Progress], DecodeState]:
    """Compile the prefill of one prompt.

    Args:
      model: what to run.
      ids: the prompt.
      shapes: the programs'.
      state: as `empty_state` made it.
      meter: of the call.

    Returns:
      A function that prefills chunk after chunk, given the empty state, which it consumes, and
      what to call with "prefill" and how much of it is done. It raises `PoolExhaustedError` if the
      pool is too small.
    """
    prompts = inputs.flat_prompts([ids], shapes)
    static = (model.graphdef, shapes)
    index = jnp.int32(0)
    program = meter.program(_prefill_chunk, static, model.params, state, prompts, index, **IN_PLACE)
    chunks = -(-len(ids) // shapes.chunk)

    def run(state: DecodeState, progress: Progress) -> DecodeState:
        for chunk in range(chunks):
            state = program(model.params, state, prompts, jnp.int32(chunk))
            state.reservation.check(state.cache)  # also waits, so that progress tells the truth
            progress("prefill", (chunk + 1) / chunks)
        return state

    return run


def _start(empty: tuple[int, Shapes], limits: Int32[Array, " B"]) -> DecodeState:
    hidden_size, shapes = empty
    return start(inputs.empty_cache(shapes), hidden_size, limits)


def _prefill_chunk(
    static: tuple[Any, Shapes], params: Any, state: DecodeState, prompts: Prompts, index: Array
) -> DecodeState:
    graphdef, shapes = static
    return prefill_last(
        nnx.merge(graphdef, params),
        state,
        prompts,
        index,
        chunk=shapes.chunk,
        implementation=shapes.attention,
    )
