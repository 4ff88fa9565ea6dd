"""Decoding over tiers with given tokens instead of drawn ones, and the logits of every step."""

import contextlib
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.decode import Sampling
from kvjax.decode.meter import Meter
from kvjax.decode.results import TierStats
from kvjax.decode.sampling import make_sampler
from kvjax.decode.step import RUNNING, Rules
from kvjax.decode.tiered import TieredCall
from kvjax.decode.tiered_step import tiered_step
from tests.kvjax.decode.tiny import VOCAB

NO_STOPS = jnp.full((8,), -1, jnp.int32)


# Compiling is most of what tests of steps take, and they take few.
@functools.partial(
    jax.jit, static_argnums=(0, 1), compiler_options={"xla_backend_optimization_level": 0}
)
def _step(graphdef, shapes, params, state, rules):
    decoder = nnx.merge(graphdef, params)
    state = tiered_step(decoder, shapes, state, rules)
    return state, decoder.logits(state.hidden)


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef, params, hidden):
    return nnx.merge(graphdef, params).logits(hidden)


@contextlib.contextmanager
def prefilled(of, prompts, *, new_tokens, cache, limits=None):
    """A call, its state after prefill, and the rules of rows that never end."""
    call = TieredCall(of, prompts, new_tokens=new_tokens, cache=cache)
    padding = call.shapes.batch - len(prompts)
    most = jnp.asarray([10_000] * len(prompts) + [0] * padding, jnp.int32)
    rules = Rules(make_sampler(Sampling(), VOCAB), jax.random.key(0), NO_STOPS, most)
    with call.prefilled(rules, Meter(), lambda phase, share: None, limits=limits) as state:
        # A call would have drawn each row's first token by now.
        yield call, dataclasses.replace(state, step=state.step + 1), rules


def step(of, call, state, rules, tokens):
    """One step in which row r sees tokens[r], or stands still where that is None."""
    padding = [None] * (call.shapes.batch - len(tokens))
    rows = [*tokens, *padding]
    state = dataclasses.replace(
        state,
        tokens=jnp.asarray([token or 0 for token in rows], jnp.int32),
        finished=jnp.asarray([RUNNING if t is not None else 1 for t in rows], jnp.int32),
    )
    state, logits = _step(of.graphdef, call.shapes, of.params, state, rules)
    return jax.block_until_ready(state), np.asarray(logits)


class Forced(NamedTuple):
    """A decode that was told its tokens."""

    logits: list[np.ndarray]  # float32 [1 + tokens given, V] of each row
    stats: TierStats
    call: TieredCall


def forced_logits(of, prompts, given, cache, limits=None):
    """Logits of each row's last prompt token and of the tokens it is then given.

    Args:
      of: the model.
      prompts: token ids, a row each.
      given: token ids that follow, a row each; rows may differ in length.
      cache: with `select`.
      limits: int32 [L, Hkv], slots that each head may use; None is all.

    Returns:
      What came of it.
    """
    most = max(map(len, given))
    with prefilled(of, prompts, new_tokens=most + 1, cache=cache, limits=limits) as (
        call,
        state,
        rules,
    ):
        rows = [[row] for row in np.asarray(_logits(of.graphdef, of.params, state.hidden))]
        for offset in range(most):
            tokens = [row[offset] if offset < len(row) else None for row in given]
            state, logits = step(of, call, state, rules, tokens)
            for row, token in enumerate(tokens):
                if token is not None:
                    rows[row].append(logits[row])
        call.check()
        stats = call.stats(state)
    return Forced([np.stack(rows[row]) for row in range(len(prompts))], stats, call)
