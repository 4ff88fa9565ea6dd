"""Decoding a question and its answer after a prefilled document, over tiers or with all pages."""

import contextlib
import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.mapped_decode import MappedPrompt, mapped_step, nothing_newer
from benchmarks.needles import Needle
from benchmarks.reprefill_measure import Answer
from kvjax.config import CacheConfig
from kvjax.decode import Sampling
from kvjax.decode.inputs import padded_stops, prng_key
from kvjax.decode.meter import Meter
from kvjax.decode.opening import empty_state, prefill_program
from kvjax.decode.program import compiled
from kvjax.decode.results import TierStats
from kvjax.decode.sampling import make_sampler
from kvjax.decode.shapes import Shapes, plan
from kvjax.decode.step import DecodeState, Rules, decode_step
from kvjax.decode.tiered import TieredCall
from kvjax.decode.tiered_step import tiered_step
from kvjax.model import Model
from kvjax.models import Decoder

STEPS = 32
"""Tokens of an answer."""

QUESTION = 48
"""Tokens of a question, at most."""


@dataclasses.dataclass(frozen=True)
class Decoded:
    """One method's answers to the questions about a document."""

    answers: list[Answer]
    step_s: float  # median over the questions' forced runs
    chosen: float  # pages of one layer and KV head that a step reads, all together; mean
    missed: float  # of these, how many are not near
    tiers: TierStats | None  # after prefill; None with all pages


def rules(model: Model, rows: int) -> Rules:
    """Greedy, without an end."""
    return Rules(
        sampler=make_sampler(Sampling(), model.config.vocab_size),
        key=prng_key(0),
        stop_tokens=padded_stops([]),
        limits=jnp.full((rows,), 1 << 20, jnp.int32),
    )


def decoded(
    model: Model,
    document: list[int],
    needles: Sequence[Needle],
    cache: CacheConfig,
    forced: list[list[int]] | None,
    say: Callable[[str], None],
    mapped: pathlib.Path | None = None,
) -> Decoded:
    """Ask every question of one prefilled document; question and answer are decoded token by token.

    Args:
      model: what runs.
      document: prefilled once, exactly.
      needles: what is asked about.
      cache: with `select`, or without for all pages.
      forced: answers whose distributions are wanted; None takes the method's own.
      say: told what goes on.
      mapped: a file to put the prompt into, from which every step reads all of it.
    """
    assert model.tokenizer is not None
    answers, times, traffic = [], [], []
    with _prefilled(model, document, cache, mapped) as (state, static, stats):
        for index, needle in enumerate(needles):
            say(f"question {index + 1} of {len(needles)}")
            question = model.tokenizer.encode(needle.question, add_bos=False)
            free, _, _ = _asked(model, state, static, question, None)
            if forced is None or free.tokens == forced[index]:
                _, seconds, moved = _asked(model, state, static, question, free.tokens)
                answers.append(free)
            else:
                told, seconds, moved = _asked(model, state, static, question, forced[index])
                answers.append(Answer(told.logprobs, free.tokens))
            steps = len(question) + STEPS
            times.append(seconds / steps)
            traffic.append([number / steps for number in moved])
        chosen, missed = np.mean(traffic, axis=0).tolist()
        return Decoded(answers, statistics.median(times), chosen, missed, stats())


@contextlib.contextmanager
def _prefilled(
    model: Model, document: list[int], cache: CacheConfig, mapped: pathlib.Path | None
) -> Iterator[Any]:
    """The state after a document, what its steps are specialised on, and the tiers' statistics."""
    new, meter = QUESTION + STEPS + 1, Meter()
    asking = rules(model, 1)
    if cache.select is None:
        shapes = plan(
            model.config,
            model.spec,
            [len(document)],
            new_tokens=new,
            prefill_chunk=512,
            cache=cache,
        )
        state = empty_state(model, shapes, asking.limits, meter)
        state = prefill_program(model, document, shapes, state, meter)(state, lambda *_: None)
        if mapped is None:
            yield state, (model.graphdef, shapes, _all_pages), lambda: None
            return
        prompt = MappedPrompt(mapped, state.cache, len(document))
        newer = nothing_newer(prompt, len(model.config.layers), new)
        state = dataclasses.replace(state, cache=newer)
        yield state, (model.graphdef, prompt, _from_disk), lambda: None
        return
    call = TieredCall(model, [document], new_tokens=new, cache=cache)
    with call.prefilled(asking, meter, lambda *_: None) as state:
        state = dataclasses.replace(state, step=state.step + 1)  # as after a drawn token
        yield state, (model.graphdef, call.shapes, tiered_step), lambda: call.stats(state)


def _all_pages(decoder: Decoder, shapes: Shapes, state: DecodeState, rules: Rules) -> DecodeState:
    return decode_step(decoder, state, rules, implementation=shapes.attention)


def _from_disk(decoder: Decoder, prompt: MappedPrompt, state: DecodeState, _: Rules) -> DecodeState:
    return mapped_step(decoder, prompt, state)


def _asked(
    model: Model, state: DecodeState, static: Any, question: list[int], answer: list[int] | None
) -> tuple[Answer, float, list[int]]:
    """A question and then its answer, given or its own; the seconds; pages chosen and missed."""
    given = [*question, *(answer or [-1] * STEPS)]
    room = np.full(QUESTION + STEPS, -1, np.int32)
    room[: len(given)] = given
    arguments = (model.params, state, rules(model, 1), jnp.asarray(room), jnp.int32(len(given)))
    program, _ = compiled(_decode, static, *arguments)
    began = time.perf_counter()
    logprobs, tokens, *moved = jax.block_until_ready(program(*arguments))
    seconds = time.perf_counter() - began
    first = len(question)
    logprobs = np.asarray(logprobs)[first - 1 : first + STEPS]
    own = np.asarray(tokens)[first : first + STEPS].tolist()
    return Answer(logprobs, own), seconds, [int(number) for number in moved]


def _decode(
    static: Any,
    params: Any,
    state: DecodeState,
    rules: Rules,
    given: jax.Array,
    count: jax.Array,
) -> Any:
    """Decode `count` tokens, those that are given or, where they are -1, the likeliest."""
    graphdef, shapes, one_step = static
    decoder = nnx.merge(graphdef, params)
    room = given.shape[0]

    def step(carry: Any) -> Any:
        index, state, logprobs, tokens = carry
        before = logprobs[jnp.maximum(index - 1, 0)]
        token = jnp.where(given[index] < 0, jnp.argmax(before).astype(jnp.int32), given[index])
        state = dataclasses.replace(state, tokens=token[None])
        state = one_step(decoder, shapes, state, rules)
        found = jax.nn.log_softmax(decoder.logits(state.hidden), axis=-1)[0]
        return index + 1, state, logprobs.at[index].set(found), tokens.at[index].set(token)

    vocabulary = decoder.config.vocab_size
    carry = (jnp.int32(0), state, jnp.zeros((room, vocabulary)), jnp.zeros((room,), jnp.int32))
    carry = jax.lax.while_loop(lambda carry: carry[0] < count, step, carry)
    _, state, logprobs, tokens = carry
    if one_step is not tiered_step:
        return logprobs, tokens, 0, 0
    traffic = state.cache.traffic
    return logprobs, tokens, jnp.sum(traffic.chosen), jnp.sum(traffic.missed)
