"""Decoding over tiers that is told its tokens: the distribution after each, and what it took."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float32, Int32

from kvjax.config import CacheConfig
from kvjax.decode import inputs
from kvjax.decode.meter import Meter
from kvjax.decode.results import TierStats
from kvjax.decode.sampling import Sampling, make_sampler
from kvjax.decode.step import DecodeState, Rules
from kvjax.decode.tiered import TieredCall
from kvjax.decode.tiered_state import TieredShapes
from kvjax.decode.tiered_step import tiered_step
from kvjax.model import Model

Say = Callable[[str, float], None]


class Told(NamedTuple):
    """What steps with given tokens gave."""

    logprobs: Float32[np.ndarray, "T B V"]  # of the token after each given one
    step_seconds: float  # median of the runs
    fetch_seconds: float  # of a step, that host callbacks took
    shapes: TieredShapes
    tiers: TierStats


def told(
    model: Model,
    prompts: Sequence[Sequence[int]],
    given: Sequence[Sequence[int]],
    cache: CacheConfig,
    *,
    runs: int = 1,
    slots: int | None = None,
) -> Told:
    """Prefill prompts, then decode tokens that are given.

    Args:
      model: what runs.
      prompts: token ids, a row each.
      given: T token ids that follow each of them.
      cache: with `select`.
      runs: of the steps, which all begin after the same prefill; times are their median.
      slots: of every layer's KV heads, the open page's included, if fewer than `cache` has room
        for: one set of programs serves several sizes.

    Raises:
      KvjaxError: as `TieredCall` says, or reading failed.
    """
    rows = [list(row) for row in prompts]
    steps = len(given[0])
    call = TieredCall(model, rows, new_tokens=steps + 1, cache=cache)
    batch, meter = call.shapes.batch, Meter()
    tokens = np.zeros((steps, batch), np.int32)
    tokens[:, : len(rows)] = np.asarray(given, np.int32).T
    limits = np.zeros(batch, np.int32)
    limits[: len(rows)] = np.iinfo(np.int32).max  # padding rows stand still
    rules = Rules(
        sampler=make_sampler(Sampling(), model.config.vocab_size),
        key=inputs.prng_key(0),
        stop_tokens=inputs.padded_stops([]),
        limits=jnp.asarray(limits),
    )
    times, waits = [], []
    usable = None if slots is None else jnp.full(np.shape(call.shapes.slots), slots, jnp.int32)
    with call.prefilled(rules, meter, lambda phase, share: None, limits=usable) as state:
        state = dataclasses.replace(state, step=state.step + 1)  # as after a drawn token
        arguments = (model.params, state, rules, jnp.asarray(tokens))
        program = meter.program(_told, (model.graphdef, call.shapes), *arguments)
        for _ in range(runs):
            began, waited = meter.seconds, call.fetch_seconds
            last, logprobs = jax.block_until_ready(program(*arguments))
            call.check()
            times.append((meter.seconds - began) / steps)
            waits.append((call.fetch_seconds - waited) / steps)
        tiers = call.stats(last)
    return Told(
        np.asarray(logprobs)[:, : len(rows)],
        float(np.median(times)),
        float(np.median(waits)),
        call.shapes,
        tiers,
    )


def kl_divergence(exact: Float32[np.ndarray, "*n V"], other: Float32[np.ndarray, "*n V"]) -> float:
    """Mean KL(exact || other) in nats.

    Args:
      exact: float32 [..., V], log-probabilities.
      other: float32 [..., V], log-probabilities.
    """
    return float(np.mean(np.sum(np.exp(exact) * (exact - other), axis=-1)))


def _told(
    static: tuple[Any, TieredShapes],
    params: Any,
    state: DecodeState,
    rules: Rules,
    given: Int32[Array, "T B"],
) -> tuple[DecodeState, Float32[Array, "T B V"]]:
    graphdef, shapes = static
    decoder = nnx.merge(graphdef, params)

    def step(state: DecodeState, tokens: Array) -> tuple[DecodeState, Array]:
        state = tiered_step(decoder, shapes, dataclasses.replace(state, tokens=tokens), rules)
        return state, jax.nn.log_softmax(decoder.logits(state.hidden), axis=-1)

    return lax.scan(step, state, given)
