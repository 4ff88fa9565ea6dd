"""One way of answering questions about a stored document: its time, bytes and quality."""

import dataclasses
import os
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.needles import EARLIER_QUESTIONS, Needle
from kvjax.config import CacheConfig
from kvjax.decode import PrefixCache, PrefixConfig, PrefixStats
from kvjax.decode.inputs import padded_stops, prng_key
from kvjax.decode.meter import Meter
from kvjax.decode.opening import empty_state, prefill_program
from kvjax.decode.prefixes import NotLoaded
from kvjax.decode.program import compiled
from kvjax.decode.sampling import Sampling, make_sampler
from kvjax.decode.shapes import Shapes, plan
from kvjax.decode.step import DecodeState, Rules, decode_step
from kvjax.model import Model

STEPS = 32
"""Greedy tokens after the first that distributions are compared over."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one question got."""

    logprobs: np.ndarray  # float32 [1 + STEPS, V], the first token's, then of forced greedy steps
    tokens: list[int]  # greedy, of its own


@dataclasses.dataclass(frozen=True)
class Hits:
    """Shares of the pages needed that were in memory, over the questions after the first."""

    device: float
    host: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one method did over all questions."""

    ttft_s: float  # median over runs, compilation excluded
    runs: int  # that the median is over
    answers: list[Answer]  # one a question
    stats: list[PrefixStats]  # one a question; none where nothing was stored
    wait_s: float | None  # that reads were waited for, median over the same runs

    def mean(self, name: str) -> float | None:
        """Mean of a number of `PrefixStats` over the questions; None if nothing was stored."""
        if not self.stats:
            return None
        return statistics.mean(getattr(stats, name) for stats in self.stats)


@dataclasses.dataclass(frozen=True)
class Task:
    """A document and questions about it."""

    model: Model
    document: list[int]
    needles: Sequence[Needle]
    repeats: int  # of the first question; the others are asked once

    def prompt(self, needle: Needle) -> list[int]:
        """The document, then a question."""
        assert self.model.tokenizer is not None
        return self.document + self.model.tokenizer.encode(needle.question, add_bos=False)

    def shapes(self, ids: list[int]) -> Shapes:
        """Of programs that run a prompt whole."""
        config = self.model.config
        return plan(
            config,
            self.model.spec,
            [len(ids)],
            new_tokens=STEPS + 2,
            prefill_chunk=512,
            cache=CacheConfig(),
        )


def rules(model: Model) -> Rules:
    """Greedy, to the last step."""
    return Rules(
        sampler=make_sampler(Sampling(), model.config.vocab_size),
        key=prng_key(0),
        stop_tokens=padded_stops([]),
        limits=jnp.asarray([STEPS + 2], jnp.int32),
    )


def recompute(task: Task, say: Callable[[str], None]) -> Outcome:
    """Prefill of the whole prompt, as if nothing were stored: the reference."""
    return _measured(task, _prefill(task), None, say, repeats=1)


def alone(task: Task) -> float:
    """Seconds that prefilling a question takes without its document: what no method can save."""
    run = _prefill(task)
    assert task.model.tokenizer is not None
    ids = [task.model.tokenizer.encode(n.question, add_bos=False) for n in task.needles]
    run(ids[0])
    return statistics.median(run(question)[3] for question in ids for _ in range(3))


def _prefill(task: Task) -> Callable[[list[int]], Any]:

    def run(ids: list[int]) -> tuple[DecodeState, Shapes, None, float]:
        meter = Meter()
        shapes = task.shapes(ids)
        state = empty_state(task.model, shapes, rules(task.model).limits, meter)
        run_chunks = prefill_program(task.model, ids, shapes, state, meter)
        state = run_chunks(state, lambda phase, share: None)
        return jax.block_until_ready(state), shapes, None, meter.seconds

    return run


def stored(
    task: Task,
    folder: pathlib.Path,
    config: PrefixConfig,
    forced: list[list[int]],
    say: Callable[[str], None],
    kind: type[PrefixCache] = PrefixCache,
) -> Outcome:
    """Re-prefill from a store, from disk each time.

    Memory is empty when a question begins; within one, what was read to choose by serves to attend.
    """
    run = _loader(task, kind(folder, config=config), folder, cold=True)
    return _measured(task, run, forced, say, repeats=task.repeats)


def hits(task: Task, folder: pathlib.Path, config: PrefixConfig) -> Hits:
    """Ask every question twice with pages left in memory, as the configuration has it."""
    run = _loader(task, PrefixCache(folder, config=config), folder)
    stats = [run(task.prompt(needle))[2] for needle in [*task.needles, *task.needles]][1:]
    units = sum(each.units for each in stats)
    return Hits(
        device=sum(each.device_hits for each in stats) / units,
        host=sum(each.host_hits for each in stats) / units,
    )


def reorder(task: Task, folder: pathlib.Path, config: PrefixConfig) -> None:
    """Let earlier questions be asked, and tokens be packed by what was chosen for them."""
    assert task.model.tokenizer is not None
    prefixes = PrefixCache(folder, config=config)
    run = _loader(task, prefixes, folder)
    for question in EARLIER_QUESTIONS:
        run(task.document + task.model.tokenizer.encode(question, add_bos=False))
    prefixes.reorder()


def _loader(
    task: Task, prefixes: PrefixCache, folder: pathlib.Path, *, cold: bool = False
) -> Callable[..., Any]:
    def run(ids: list[int]) -> tuple[DecodeState, Shapes, PrefixStats, float]:
        drop_page_cache(folder)
        if cold:
            prefixes.clear_memory()
        meter = Meter()
        found = prefixes.prefill(
            task.model,
            ids,
            task.shapes(ids),
            cache=CacheConfig(),
            limits=rules(task.model).limits,
            meter=meter,
        )
        if isinstance(found, NotLoaded):
            raise RuntimeError(f"the stored document should have been used: {found.reason}")
        return found.state, found.shapes, found.stats, meter.seconds

    return run


def _measured(
    task: Task,
    run: Callable[[list[int]], Any],
    forced: list[list[int]] | None,
    say: Callable[[str], None],
    *,
    repeats: int,
) -> Outcome:
    times, waits, each, answers = [], [], [], []
    for index, needle in enumerate(task.needles):
        ids = task.prompt(needle)
        say(f"question {index + 1} of {len(task.needles)}")
        state = shapes = stats = None
        for repeat in range(1 if index else repeats + 1):
            state, shapes, stats, seconds = run(ids)
            if index or repeat:  # the first run compiles and warms up
                times.append(seconds)
                waits += [] if stats is None else [stats.wait_seconds]
        assert state is not None and shapes is not None  # noqa: PT018  repeats is at least 1
        answers.append(_answer(task.model, state, shapes, forced[index] if forced else None))
        each += [] if stats is None else [stats]
    wait = statistics.median(waits) if waits else None
    return Outcome(statistics.median(times), len(times), answers, each, wait)


def _answer(model: Model, state: DecodeState, shapes: Shapes, forced: list[int] | None) -> Answer:
    """Distributions over forced tokens (or its own, if None), and its own greedy tokens."""
    arguments = (model.params, state, rules(model))
    free = jnp.full((STEPS,), -1, jnp.int32)
    given = free if forced is None else jnp.asarray(forced[:STEPS], jnp.int32)
    program, _ = compiled(_decode, (model.graphdef, shapes), *arguments, free)
    own_logprobs, own = jax.device_get(program(*arguments, free))
    if forced is None or own.tolist() == forced[:STEPS]:
        return Answer(own_logprobs, own.tolist())
    logprobs, _ = jax.device_get(program(*arguments, given))
    return Answer(logprobs, own.tolist())


def _decode(static: Any, params: Any, state: DecodeState, rules: Rules, given: jax.Array) -> Any:
    """Decode over given tokens, or greedily where they are -1."""
    graphdef, shapes = static
    decoder = nnx.merge(graphdef, params)

    def logprobs(state: DecodeState) -> jax.Array:
        return jax.nn.log_softmax(decoder.logits(state.hidden), axis=-1)[0]

    def step(state: DecodeState, token: jax.Array) -> Any:
        best = jnp.argmax(logprobs(state)).astype(jnp.int32)
        token = jnp.where(token < 0, best, token)
        state = dataclasses.replace(state, tokens=token[None])
        state = decode_step(decoder, state, rules, implementation=shapes.attention)
        return state, (logprobs(state), token)

    first = logprobs(state)
    _, (rest, tokens) = jax.lax.scan(step, state, given)
    return jnp.concatenate([first[None], rest]), tokens


def divergence(exact: Sequence[Answer], other: Sequence[Answer]) -> tuple[float, float]:
    """KL(exact || other) in nats: of the first token, and the mean over forced steps."""
    first, steps = [], []
    for a, b in zip(exact, other, strict=True):
        kl = (np.exp(a.logprobs) * (a.logprobs - b.logprobs)).sum(-1)
        first.append(float(kl[0]))
        steps.append(float(kl[1:].mean()))
    return statistics.mean(first), statistics.mean(steps)


def right_answers(model: Model, needles: Sequence[Needle], answers: Sequence[Answer]) -> int:
    """How many answers state the code that was asked for."""
    assert model.tokenizer is not None
    said = [model.tokenizer.decode(answer.tokens) for answer in answers]
    return sum(needle.code in text for needle, text in zip(needles, said, strict=True))


def drop_page_cache(folder: pathlib.Path) -> None:
    """Ask the operating system to forget what it read of a folder's files."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
