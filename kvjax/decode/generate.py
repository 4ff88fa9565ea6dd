"""`generate`: prefill and the decode loop as one jitted program."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int32

from kvjax.cache import Reservation
from kvjax.config import CacheConfig
from kvjax.decode import inputs
from kvjax.decode.meter import Meter
from kvjax.decode.results import FinishReason, Generation
from kvjax.decode.sampling import Sampling, make_sampler
from kvjax.decode.shapes import Shapes, plan
from kvjax.decode.step import (
    FULL,
    STOPPED,
    DecodeState,
    Prompts,
    Rules,
    decode_step,
    draw,
    prefill_chunk,
    start,
)
from kvjax.errors import KvjaxError, check_integer
from kvjax.model import Model
from kvjax.spec import KVSpec

Progress = Callable[[str, float], None]
"""progress(phase, share): phases are "compile", "prefill" and "decode"; share is 0 to 1."""

REASONS: dict[int, FinishReason] = {STOPPED: "stop", FULL: "length"}
"""The word for a row's `finished` code, once it does not run."""


class _Result(NamedTuple):
    tokens: Int32[Array, "B room"]
    finished: Int32[Array, " B"]
    counts: Int32[Array, " B"]
    reservation: Reservation
    finite: Bool[Array, " B"]
    pages_used: Int32[Array, ""]


def generate(
    model: Model,
    prompts: inputs.PromptLike | Sequence[inputs.PromptLike],
    *,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    key: jax.Array | int | None = None,
    stop_tokens: Sequence[int] = (),
    stop_at_eos: bool = True,
    cache: CacheConfig | None = None,
    prefill_chunk: int = 512,
    progress: Progress | None = None,
) -> Generation:
    """Continue prompts through a paged KV cache.

    One program runs chunked prefill over the prompts as one ragged stream, then a
    `lax.while_loop` that ends when every row has. Shapes are bucketed, so few programs are
    compiled; running out of pages, or of the range of a dtype, is a value of the program, raised
    here.

    Args:
      model: what to run.
      prompts: a text, token ids, or a list of either; lengths may differ.
      max_new_tokens: most tokens to draw for each prompt, at least 1.
      sampling: how to draw; None is greedy.
      key: a PRNG key or a seed; None is seed 0. Unused when greedy.
      stop_tokens: ids that end a row, besides the model's own.
      stop_at_eos: whether the model's end-of-sequence tokens end a row.
      cache: page size, pool size, dtype and attention implementation; None is the default.
      prefill_chunk: most tokens prefilled at once.
      progress: called as phases begin and end.

    Returns:
      Tokens, texts, reasons and statistics, a row a prompt.

    Raises:
      KvjaxError: an argument is not usable, or the prompts do not fit the model's context; raised
        before anything is traced. After the run: a row's logits are not finite.
      PoolExhaustedError: the pool is too small; it carries the pages needed and free.
    """
    meter = Meter()
    limit = check_integer("max_new_tokens", max_new_tokens, 1)
    sampling, cache = sampling or Sampling(), cache or CacheConfig()
    ids = inputs.prompt_list(model, prompts)
    stops = inputs.stop_ids(model, stop_tokens, stop_at_eos)
    shapes = plan(
        model.config,
        cache_spec(model, cache),
        [len(row) for row in ids],
        new_tokens=limit,
        prefill_chunk=prefill_chunk,
        cache=cache,
    )
    report = progress or _silent
    arguments = (
        model.params,
        inputs.flat_prompts(ids, shapes),
        Rules(
            sampler=make_sampler(sampling, model.config.vocab_size),
            key=inputs.prng_key(key),
            stop_tokens=inputs.padded_stops(stops),
            limits=inputs.row_limits(len(ids), limit, shapes.batch),
        ),
    )
    report("compile", 0.0)
    program = meter.program(_generate, (model.graphdef, shapes), *arguments)
    report("compile", 1.0)
    report("decode", 0.0)
    result: _Result = jax.device_get(program(*arguments))
    report("decode", 1.0)
    result.reservation.check(jax.eval_shape(lambda: inputs.empty_cache(shapes)))
    for row in np.flatnonzero(~result.finite):
        raise not_finite(f"prompt {row}", model, shapes)
    rows = [result.tokens[i, : result.counts[i]].tolist() for i in range(len(ids))]
    return Generation(
        tokens=rows,
        texts=[text_of(model, row, stops) for row in rows],
        finish_reasons=[REASONS[int(code)] for code in result.finished[: len(ids)]],
        stats=meter.stats(
            shapes,
            prompt_tokens=sum(map(len, ids)),
            new_tokens=sum(map(len, rows)),
            pages_used=int(result.pages_used),
        ),
    )


def _generate(static: tuple[Any, Shapes], params: Any, prompts: Prompts, rules: Rules) -> _Result:
    graphdef, shapes = static
    decoder = nnx.merge(graphdef, params)
    state = prefill(decoder, shapes, prompts, rules)
    state = draw(decoder, state, rules)
    out = jnp.zeros((shapes.batch, shapes.room), jnp.int32).at[:, 0].set(state.tokens)
    counts = (rules.limits > 0).astype(jnp.int32)

    def goes_on(carry: tuple[DecodeState, Array, Array]) -> Array:
        state, _, _ = carry
        return jnp.any(state.active) & state.sound

    def step(carry: tuple[DecodeState, Array, Array]) -> tuple[DecodeState, Array, Array]:
        state, out, counts = carry
        active = state.active
        state = decode_step(decoder, state, rules, implementation=shapes.attention)
        column = jnp.where(active, state.step - 1, shapes.room)
        row = jnp.arange(shapes.batch, dtype=jnp.int32)
        out = out.at[row, column].set(state.tokens, mode="drop")
        return state, out, counts + active.astype(jnp.int32)

    state, out, counts = jax.lax.while_loop(goes_on, step, (state, out, counts))
    used = jnp.sum(state.cache.page_refs > 0, dtype=jnp.int32)
    return _Result(out, state.finished, counts, state.reservation, state.finite, used)


def prefill(decoder: Any, shapes: Shapes, prompts: Prompts, rules: Rules) -> DecodeState:
    """Run every chunk that holds a prompt's token, inside a program.

    Args:
      decoder: the model.
      shapes: the program's.
      prompts: the stream.
      rules: for the rows' limits.
    """
    state = start(inputs.empty_cache(shapes), decoder.config.hidden_size, rules.limits)
    chunks = (prompts.cu_lengths[-1] + (shapes.chunk - 1)) // shapes.chunk

    def goes_on(carry: tuple[Array, DecodeState]) -> Array:
        index, state = carry
        return (index < chunks) & state.reservation.ok

    def step(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        index, state = carry
        state, _ = prefill_chunk(
            decoder, state, prompts, index, chunk=shapes.chunk, implementation=shapes.attention
        )
        return index + 1, state

    return jax.lax.while_loop(goes_on, step, (jnp.int32(0), state))[1]


def cache_spec(model: Model, cache: CacheConfig) -> KVSpec:
    """What the cache of a call stores: the model's layers in the configured dtype."""
    spec = model.spec
    return spec if cache.dtype is None else dataclasses.replace(spec, dtype=cache.dtype)


def text_of(model: Model, tokens: Sequence[int], stops: Sequence[int]) -> str:
    """The text of drawn tokens, without a final stop token and control tokens."""
    if model.tokenizer is None:
        return ""
    shown = tokens[:-1] if tokens and tokens[-1] in set(stops) else tokens
    return model.tokenizer.decode(list(shown))


def not_finite(where: str, model: Model, shapes: Shapes) -> KvjaxError:
    """What to raise where logits are NaN or infinite.

    Args:
      where: the prompt or the token.
      model: whose logits they are.
      shapes: the program's.
    """
    return KvjaxError(
        f"{where}: the logits of {model.name} are not finite; its weights are {model.dtype} and "
        f"its keys and values {shapes.spec.dtype}, which may not reach far enough: try "
        f"CacheConfig(dtype='float32'), and load the model with dtype='float32'"
    )


def _silent(phase: str, share: float) -> None:
    """Report nothing."""
    del phase, share
