"""kvjax as one engine of the decode benchmark, in a process of its own like every peer.

    python -m benchmarks.kvjax_engine REQUEST.json

It runs the functions that `kvjax.decode.generate` is made of (chunked prefill, `decode_step` in a
`lax.while_loop`), with two things a benchmark needs and a caller does not: the state is kept
between prefill and decode, and a batch is made of one sequence by copying its pages to pages of
their own.
"""

import dataclasses
import importlib.metadata
import time
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from benchmarks.peers import measure
from kvjax.cache import pool_bytes
from kvjax.config import CacheConfig
from kvjax.decode import inputs
from kvjax.decode.generate import generate, prefill
from kvjax.decode.program import compiled
from kvjax.decode.sampling import Sampling, make_sampler
from kvjax.decode.shapes import Shapes, plan
from kvjax.decode.step import RUNNING, DecodeState, Prompts, Rules, decode_step, draw
from kvjax.load import load
from kvjax.programs import keep_programs
from kvjax.spec import KVSpec

UNTIMED_STEPS = 2
"""Steps of the shorter of two loops; the longer one's further steps are what is timed."""

PAIRS = 2
"""Pairs of loops whose difference is taken, for each point."""

ALTERNATIVES = 16
"""Likeliest tokens reported for each greedy one, to tell near ties from a wrong model."""

SWEEP = (512, 1024, 2048, 4096, 6144)
"""Lengths decoded in the program of the longest context, for the fit of step time against bytes."""


def _prefill(static: tuple[Any, Shapes], params: Any, prompts: Prompts, rules: Rules) -> Any:
    graphdef, shapes = static
    decoder = nnx.merge(graphdef, params)
    return draw(decoder, prefill(decoder, shapes, prompts, rules), rules)


def _decode(static: tuple[Any, Shapes], params: Any, state: DecodeState, rules: Rules) -> Any:
    """Steps until the rows are full, as the loop in `generate` takes them."""
    graphdef, shapes = static
    decoder = nnx.merge(graphdef, params)

    def goes_on(carry: tuple[DecodeState, Array]) -> Array:
        state, _ = carry
        return jnp.any(state.active) & state.sound

    def step(carry: tuple[DecodeState, Array]) -> tuple[DecodeState, Array]:
        state, out = carry
        state = decode_step(decoder, state, rules, implementation=shapes.attention)
        return state, out.at[:, state.step - 1].set(state.tokens, mode="drop")

    out = jnp.zeros((state.cache.batch, shapes.room), jnp.int32)
    return jax.lax.while_loop(goes_on, step, (state, out))


def _likeliest(graphdef: Any, params: Any, hidden: Array) -> tuple[Array, Array]:
    logprobs = jax.nn.log_softmax(nnx.merge(graphdef, params).logits(hidden[:1])[0])
    values, tokens = jax.lax.top_k(logprobs, ALTERNATIVES)
    return tokens, values


def copy_rows(state: DecodeState, rows: int) -> DecodeState:
    """A state of `rows` sequences, each with a copy of the only sequence's pages.

    Args:
      state: of one sequence.
      rows: how many to make.
    """
    cache = state.cache
    count = cache.num_pages
    first = jnp.arange(rows, dtype=jnp.int32)[:, None] * count
    tables = jnp.broadcast_to(cache.block_tables, (rows, cache.max_pages))
    wide = dataclasses.replace(
        cache,
        k_pages=tuple(jnp.concatenate([pool] * rows) for pool in cache.k_pages),
        v_pages=tuple(jnp.concatenate([pool] * rows) for pool in cache.v_pages),
        block_tables=jnp.where(tables < count, tables + first, rows * count),
        lengths=jnp.tile(cache.lengths, rows),
        skipped=jnp.tile(cache.skipped, rows),
        page_refs=jnp.tile(cache.page_refs, rows),
    )
    return dataclasses.replace(
        state,
        cache=wide,
        hidden=jnp.tile(state.hidden, (rows, 1)),
        tokens=jnp.tile(state.tokens, rows),
        finished=jnp.tile(state.finished, rows),
        finite=jnp.tile(state.finite, rows),
    )


class Kvjax:
    """A model, and the state of the sequences under way."""

    copies_cache = True

    def __init__(self, request: measure.Request):
        jax.config.update("jax_platforms", "cpu")  # where its peers run
        keep_programs(request.cache_dir)
        dtype: Any = request.dtype
        self.model = load(request.gguf, dtype=dtype, cache_dir=request.cache_dir)
        self.weights = f"{request.dtype}, dequantized from the file"
        self.kv = f"{request.dtype}, paged"
        packages = ("jax", "jaxlib", "flax")
        self.versions = {name: importlib.metadata.version(name) for name in packages}
        self.steps, self.quick = request.steps, request.quick
        self.contexts = sorted(int(context) for context in request.prompts)
        self.prompts = request.prompts
        self.compile_s = 0.0
        self.state: Any = None  # a `DecodeState`, or None before there is one

    def run(self, function: Any, static: Any, *args: Any, donate: tuple[int, ...] = ()) -> Any:
        """Run a program, compiled before its time is taken; `seconds` holds the time."""
        program, took = compiled(function, static, *args, donate=donate)
        self.compile_s += took
        begin = time.perf_counter()
        answer = jax.block_until_ready(program(*args))
        self.seconds = time.perf_counter() - begin
        return answer

    def rules(self, rows: int, limit: int) -> Rules:
        """Greedy, nothing stops early, `limit` tokens a row."""
        return Rules(
            sampler=make_sampler(Sampling(), self.model.config.vocab_size),
            key=inputs.prng_key(None),
            stop_tokens=inputs.padded_stops([]),
            limits=jnp.full((rows,), limit, jnp.int32),
        )

    def arguments(self, prompt: list[int]) -> tuple[Any, ...]:
        """What the prefill program takes, with room for the steps that follow."""
        self.shapes = plan(
            self.model.config,
            self.model.spec,
            [len(prompt)],
            new_tokens=self.steps + UNTIMED_STEPS + 2,
            prefill_chunk=512,
            cache=CacheConfig(),
        )
        self.static = (self.model.graphdef, self.shapes)
        prompts = inputs.flat_prompts([prompt], self.shapes)
        return self.model.params, prompts, self.rules(1, 1)

    def prepare(self, prompt: list[int]) -> None:
        """Compile what `prefill` of this prompt runs."""
        args = self.arguments(prompt)
        self.compile_s += compiled(_prefill, self.static, *args)[1]

    def prefill(self, prompt: list[int]) -> int:
        """Read one prompt in chunks."""
        self.state = None  # frees the pools before others are made
        args = self.arguments(prompt)
        self.state = self.run(_prefill, self.static, *args)
        self.state.reservation.check(self.state.cache)
        self.keep_start()
        return int(self.state.tokens[0])

    def keep_start(self) -> None:
        """Remember where decoding begins; loops give their state away."""
        self.length, self.tokens = len_of(self.state), self.state.tokens
        self.start_tokens = [int(token) for token in self.tokens]
        self.start_hidden = self.state.hidden + 0.0

    def widen(self, prompts: list[list[int]]) -> None:
        """Copy the one sequence's pages for every row."""
        self.rewind(self.length)
        self.state = copy_rows(self.state, len(prompts))
        self.start_tokens *= len(prompts)

    def rewind(self, length: int) -> None:
        """Go back to `length` tokens in every row, the next ones to be decoded again."""
        state = self.state
        rows = state.cache.batch
        self.state = dataclasses.replace(
            state,
            cache=dataclasses.replace(state.cache, lengths=jnp.full((rows,), length, jnp.int32)),
            tokens=jnp.asarray(self.start_tokens, jnp.int32),
            finished=jnp.full((rows,), RUNNING, jnp.int32),
            step=jnp.int32(0),
        )

    def loop(self, count: int) -> list[int]:
        """Take `count` decode steps in one program; the first row's tokens."""
        rules = self.rules(self.state.cache.batch, count)
        args = (self.model.params, self.state, rules)
        self.state, out = self.run(_decode, self.static, *args, donate=(1,))
        self.state.reservation.check(self.state.cache)
        return [int(token) for token in out[0, :count]]

    def step_seconds(
        self, length: int, count: int, pairs: int = PAIRS
    ) -> tuple[list[float], list[int]]:
        """Seconds a step: what a longer loop takes beyond a shorter one, over its further steps.

        Returns:
          A number a pair, and the first row's tokens.
        """
        self.rewind(length)
        self.loop(UNTIMED_STEPS)  # touches the memory for the first time
        answers: list[float] = []
        tokens: list[int] = []
        for _ in range(pairs):
            self.rewind(length)
            self.loop(UNTIMED_STEPS)
            short = self.seconds
            self.rewind(length)
            tokens = self.loop(UNTIMED_STEPS + count)
            answers.append((self.seconds - short) / count)
        return answers, tokens

    def time_steps(self, count: int) -> tuple[list[float], list[int]]:
        """Seconds a step at the prompt's length, and the first row's tokens."""
        return self.step_seconds(self.length, count)

    def step(self) -> list[int]:
        """Decode one token for each sequence (the warm-up only)."""
        self.rewind(self.length)
        return self.loop(1)

    def facts(self, context: int, batch: int) -> dict[str, Any]:
        """What is known of a point besides its time."""
        cache = self.state.cache
        answer: dict[str, Any] = {
            "kv_bytes_read": batch * read_bytes(self.model.spec, context),
            "steps_taken": UNTIMED_STEPS + self.steps,
            "pages_used": int(jnp.sum(cache.page_refs > 0)),
            "pages_total": cache.num_pages,
            "pool_bytes": sum(pool_bytes(cache).values()),
            "compile_s": self.compile_s,
        }
        if batch == 1:
            answer["likeliest"] = self.likeliest()
        if self.quick:
            return answer
        if context == self.contexts[-1] and batch == 1:
            lengths = [length for length in SWEEP if length < context] or [context // 2]
            answer["sweep"] = [
                {
                    "kv_bytes": batch * read_bytes(self.model.spec, length),
                    "step_ms": 1e3 * min(self.step_seconds(length, self.steps)[0]),
                }
                for length in [*lengths, context]
            ]
        if context == self.contexts[0] and batch == 1:
            answer["generate_step_ms"] = self.generate_step_ms(context)
        return answer

    def likeliest(self) -> list[tuple[list[int], list[float]]]:
        """For each greedy token, the likeliest tokens and their log-probabilities there."""
        graphdef, params = self.model.graphdef, self.model.params
        answer = []
        hidden = self.start_hidden
        self.rewind(self.length)
        for index in range(self.steps + UNTIMED_STEPS + 1):
            if index:
                self.state = dataclasses.replace(
                    self.state, finished=jnp.zeros_like(self.state.finished), step=jnp.int32(0)
                )
                self.loop(1)
                hidden = self.state.hidden
            tokens, values = self.run(_likeliest, graphdef, params, hidden)
            answer.append(([int(t) for t in tokens], [float(v) for v in values]))
        return answer

    def generate_step_ms(self, context: int) -> float:
        """Milliseconds a step of `kvjax.decode.generate` itself, by the same difference."""
        prompt = self.prompts[str(context)][0]
        lengths = (18, 32)  # of one bucket of shapes, so that both run the same program
        best: dict[int, float] = {}
        for new_tokens in lengths * 2:
            answer = generate(
                self.model, prompt, max_new_tokens=new_tokens, stop_at_eos=False
            ).stats.run_seconds
            best[new_tokens] = min(answer, best.get(new_tokens, answer))
        return 1e3 * (best[lengths[1]] - best[lengths[0]]) / (lengths[1] - lengths[0])


def read_bytes(spec: KVSpec, length: int) -> int:
    """Bytes of keys and values that one decode step of one sequence has to read."""
    seen = sum(
        layer.elements_per_token * min(length, layer.window or length) for layer in spec.layers
    )
    return spec.bytes_per_element * seen


def len_of(state: DecodeState) -> int:
    """Tokens in the cache of the first sequence."""
    return int(state.cache.lengths[0])


if __name__ == "__main__":
    measure.main(Kvjax)
