"""`generate`: prefill and the decode loop as one jitted program."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int32

from kvjax.cache import Reservation
from kvjax.config import CacheConfig
from kvjax.decode import inputs
from kvjax.decode.calls import REASONS, Progress, cache_spec, not_finite, text_of
from kvjax.decode.generate_loop import draw_rows
from kvjax.decode.meter import Meter
from kvjax.decode.prefixes import PrefixCache
from kvjax.decode.results import Generation, RowsFailedError, Stats
from kvjax.decode.sampling import Sampling
from kvjax.decode.shapes import Shapes, check_chunk, plan
from kvjax.decode.step import (
    DecodeState,
    Prompts,
    Rules,
    decode_step,
    draw,
    prefill_last,
    start,
)
from kvjax.decode.stream import stream
from kvjax.decode.tiered import TieredCall, loop
from kvjax.decode.tiered_state import TieredShapes
from kvjax.errors import KvjaxError, check_integer
from kvjax.model import Model


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
    stop_tokens: Collection[int] | None = (),
    stop_at_eos: bool = True,
    cache: CacheConfig | None = None,
    prefill_chunk: int = 512,
    progress: Progress | None = None,
    prefixes: PrefixCache | None = None,
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
      cache: page size, pool size, dtype and attention implementation; with `select`, which pages a
        step reads and where the others live. None is the default.
      prefill_chunk: most tokens prefilled at once; with `cache.select`, a prompt is prefilled
        whole, layer by layer, in a program of its own before the loop.
      progress: called as phases begin and end.
      prefixes: where to look for a stored beginning of the prompt, which is then read instead of
        computed, as much of it as the budget allows; for one prompt.

    Returns:
      Tokens, texts, reasons and statistics, a row a prompt.

    Raises:
      KvjaxError: an argument is not usable, or the prompts do not fit the model's context; raised
        before anything is traced.
      RowsFailedError: after the run: the logits of a prompt are not finite, or its pages could not
        be read; the other prompts' answers are in its `generation`.
      PoolExhaustedError: the pool is too small; it carries the pages needed and free.
      ValueError: `cache.place.store` is no store.
      StoreError: it cannot be written.
    """
    if prefixes is not None:
        return _streamed(
            model,
            inputs.only_prompt(model, prompts),
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            key=key,
            stop_tokens=stop_tokens,
            stop_at_eos=stop_at_eos,
            cache=cache,
            prefill_chunk=prefill_chunk,
            progress=progress,
            prefixes=prefixes,
        )
    meter = Meter()
    limit = check_integer("max_new_tokens", max_new_tokens, 1)
    sampling = inputs.given_or_default("sampling", sampling, Sampling)
    cache = inputs.given_or_default("cache", cache, CacheConfig)
    ids = inputs.prompt_list(model, prompts)
    stops = inputs.stop_ids(model, stop_tokens, stop_at_eos)
    if cache.select is not None:
        check_chunk(prefill_chunk)
        call = TieredCall(model, ids, new_tokens=limit, cache=cache)
        rules = inputs.rules(model, sampling, key, stops, limit, len(ids), call.shapes.batch)
        return _over_tiers(call, model, ids, stops, rules, progress or _silent, meter)
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
        inputs.rules(model, sampling, key, stops, limit, len(ids), shapes.batch),
    )
    report("compile", 0.0)
    program = meter.program(_generate, (model.graphdef, shapes), *arguments)
    report("compile", 1.0)
    report("decode", 0.0)
    result: _Result = jax.device_get(program(*arguments))
    report("decode", 1.0)
    result.reservation.check(jax.eval_shape(lambda: inputs.empty_cache(shapes)))
    rows = [result.tokens[i, : result.counts[i]].tolist() for i in range(len(ids))]
    stats = meter.stats(
        shapes,
        prompt_tokens=sum(map(len, ids)),
        new_tokens=sum(map(len, rows)),
        pages_used=int(result.pages_used),
        rows=[len(row) + len(drawn) for row, drawn in zip(ids, rows, strict=True)],
    )
    failures = _not_finite(model, shapes, np.asarray(result.finite))
    return _answers(model, rows, stops, np.asarray(result.finished), stats, failures)


def _over_tiers(
    call: TieredCall,
    model: Model,
    ids: list[list[int]],
    stops: list[int],
    rules: Rules,
    report: Progress,
    meter: Meter,
) -> Generation:
    """`generate` where steps read selected pages."""
    with call.prefilled(rules, meter, report) as state:
        report("decode", 0.0)
        state, tokens, counts = loop(call, model, state, rules, meter)
        report("decode", 1.0)
        tokens, counts, finished, finite = jax.device_get(
            (tokens, counts, state.finished, state.finite)
        )
        meter.stop()
        rows = [tokens[i, : counts[i]].tolist() for i in range(len(ids))]
        failures = {**_not_finite(model, call.shapes, finite), **call.failures()}
        for row, drawn in enumerate(rows):
            if row not in failures:
                call.keep_generated(row, drawn)
        tiers = call.stats(state)
    stats = meter.stats(
        call.shapes,
        prompt_tokens=sum(map(len, ids)),
        new_tokens=sum(map(len, rows)),
        pages_used=call.shapes.row_pages * len(ids),
        tiers=tiers,
    )
    return _answers(model, rows, stops, finished, stats, failures)


def _not_finite(
    model: Model, shapes: Shapes | TieredShapes, finite: Bool[np.ndarray, " B"]
) -> dict[int, KvjaxError]:
    """What is wrong with rows whose logits are not finite."""
    rows = np.flatnonzero(~finite).tolist()
    return {row: not_finite(f"prompt {row}", model, shapes) for row in rows}


def _answers(
    model: Model,
    rows: list[list[int]],
    stops: list[int],
    finished: Int32[np.ndarray, " B"],
    stats: Stats,
    failures: Mapping[int, KvjaxError],
) -> Generation:
    """What rows drew.

    Raises:
      RowsFailedError: some failed.
    """
    reasons = [REASONS[int(code)] for code in finished[: len(rows)]]
    generation = Generation(
        tokens=rows,
        texts=[text_of(model, row, stops) for row in rows],
        finish_reasons=["error" if i in failures else reason for i, reason in enumerate(reasons)],
        stats=stats,
    )
    if failures:
        first = failures[min(failures)]
        raise RowsFailedError(failures, generation) from first.__cause__
    return generation


def _streamed(model: Model, ids: list[int], **options: Any) -> Generation:
    """What a stream gives, gathered."""
    events = list(stream(model, ids, **options))
    last = events[-1]
    assert last.finish_reason is not None and last.stats is not None  # noqa: PT018  every stream ends so
    return Generation(
        tokens=[[event.token for event in events]],
        texts=["".join(event.text for event in events)],
        finish_reasons=[last.finish_reason],
        stats=last.stats,
    )


def _generate(static: tuple[Any, Shapes], params: Any, prompts: Prompts, rules: Rules) -> _Result:
    graphdef, shapes = static
    decoder = nnx.merge(graphdef, params)
    state = prefill(decoder, shapes, prompts, rules)
    state = draw(decoder, state, rules)

    def step(state: DecodeState) -> DecodeState:
        return decode_step(decoder, state, rules, implementation=shapes.attention)

    state, out, counts = draw_rows(state, step, limits=rules.limits, room=shapes.room)
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
        state = prefill_last(
            decoder, state, prompts, index, chunk=shapes.chunk, implementation=shapes.attention
        )
        return index + 1, state

    return jax.lax.while_loop(goes_on, step, (jnp.int32(0), state))[1]


def _silent(phase: str, share: float) -> None:
    """Report nothing."""
    del phase, share
