"""`stream`: the same chunks and steps as `generate`, a program each, so tokens come as drawn."""

import dataclasses
import time
from collections.abc import Callable, Collection, Generator, Iterator
from typing import Any, NamedTuple

import jax
from flax import nnx

from kvjax.config import CacheConfig
from kvjax.decode import inputs
from kvjax.decode.calls import REASONS, Progress, cache_spec, not_finite
from kvjax.decode.meter import Meter
from kvjax.decode.opening import IN_PLACE, empty_state, prefill_program
from kvjax.decode.prefilled_pages import check_layers
from kvjax.decode.prefix_config import check_format, check_latents
from kvjax.decode.prefixes import Loaded, NotLoaded, PrefixCache
from kvjax.decode.results import FinishReason, StreamEvent
from kvjax.decode.sampling import Sampling
from kvjax.decode.shapes import Shapes, check_chunk, plan
from kvjax.decode.step import DecodeState, Rules, decode_step, draw
from kvjax.decode.tiered import TieredCall
from kvjax.decode.tiered_state import TieredShapes
from kvjax.decode.tiered_step import tiered_step
from kvjax.errors import KvjaxError, check_integer
from kvjax.model import Model
from kvjax.models.tokenizer import StreamDecoder


def stream(
    model: Model,
    prompt: inputs.PromptLike,
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
) -> Iterator[StreamEvent]:
    """Continue one prompt, giving each token as it is drawn.

    Arguments are checked when `stream` is called, not when the first token is asked for. Tokens
    equal `generate`'s.

    Args:
      model: what to run.
      prompt: a text or token ids.
      max_new_tokens: most tokens to draw, at least 1.
      sampling: how to draw; None is greedy.
      key: a PRNG key or a seed; None is seed 0.
      stop_tokens: ids that end the stream, besides the model's own.
      stop_at_eos: whether the model's end-of-sequence tokens end it.
      cache: as for `generate`.
      prefill_chunk: as for `generate`.
      progress: called with "compile" and "prefill" and how much of it is done.
      prefixes: where to look for a stored beginning of the prompt; its pages are then read instead
        of computed, as many as the budget allows.

    Returns:
      An iterator of events, at least one; the last carries the reason and the statistics.

    Raises:
      KvjaxError: as for `generate`.
      PoolExhaustedError: as for `generate`.
      ValueError: as for `generate`.
      StoreError: as for `generate`; when the first token is asked for.
    """
    began = time.perf_counter()
    limit = check_integer("max_new_tokens", max_new_tokens, 1)
    sampling = inputs.given_or_default("sampling", sampling, Sampling)
    cache = inputs.given_or_default("cache", cache, CacheConfig)
    if not isinstance(prefixes, PrefixCache | None):
        raise KvjaxError(f"prefixes is {prefixes!r}: must be a kvjax.PrefixCache, or None")
    if prefixes is not None and cache.select is not None:
        raise KvjaxError(
            "prefixes are given and cache.select too: a stored prefix is chosen from once, before "
            "the first token, with its own budget; leave out one of them"
        )
    if prefixes is not None:
        check_format(prefixes.config, cache)
        check_latents(prefixes.config, model)
    ids = inputs.token_ids(model, prompt)
    if prefixes is not None:
        check_layers(model)
    stops = inputs.stop_ids(model, stop_tokens, stop_at_eos)
    report = progress or (lambda phase, share: None)
    if cache.select is not None:
        check_chunk(prefill_chunk)
        call = TieredCall(model, [ids], new_tokens=limit, cache=cache)
        rules = inputs.rules(model, sampling, key, stops, limit, 1, call.shapes.batch)
        spent = time.perf_counter() - began
        return _events_over_tiers(call, model, ids, stops, rules, report, spent)
    shapes = plan(
        model.config,
        cache_spec(model, cache),
        [len(ids)],
        new_tokens=limit,
        prefill_chunk=prefill_chunk,
        cache=cache,
    )
    shapes = dataclasses.replace(shapes, room=1)  # tokens are given, not gathered
    rules = inputs.rules(model, sampling, key, stops, limit, 1, shapes.batch)
    # What passes until the first event is asked for is not ours.
    spent = time.perf_counter() - began
    return _events(model, ids, stops, shapes, cache, rules, report, spent, prefixes)


def _events(
    model: Model,
    ids: list[int],
    stops: list[int],
    shapes: Shapes,
    cache: CacheConfig,
    rules: Rules,
    progress: Progress,
    spent: float,
    prefixes: PrefixCache | None,
) -> Iterator[StreamEvent]:
    meter = Meter(spent)
    progress("compile", 0.0)
    found: Loaded | NotLoaded | None = None
    if prefixes is not None:
        found = prefixes.prefill(model, ids, shapes, cache=cache, limits=rules.limits, meter=meter)
    if isinstance(found, Loaded):
        state, shapes = found.state, found.shapes
    else:
        state = empty_state(model, shapes, rules.limits, meter)
        prefill = prefill_program(model, ids, shapes, state, meter)
    progress("compile", 0.5)
    static = (model.graphdef, shapes)
    opening = meter.program(_draw, static, model.params, state, rules, **IN_PLACE)
    program = meter.program(_step, static, model.params, state, rules, **IN_PLACE)
    progress("compile", 1.0)
    if not isinstance(found, Loaded):
        state = prefill(state, progress)
    state = opening(model.params, state, rules)
    last = yield from _tokens(
        model, state, lambda state: program(model.params, state, rules), stops, shapes, meter
    )
    stats = meter.stats(
        shapes,
        prompt_tokens=len(ids),
        new_tokens=last.drawn,
        pages_used=shapes.num_pages - int(last.state.cache.pages_free),
        ttft_seconds=last.ttft_seconds,
        prefix=found.stats if isinstance(found, Loaded) else None,
        prefix_unused=found.reason if isinstance(found, NotLoaded) else None,
    )
    yield StreamEvent(last.token, last.text, last.reason, stats)


def _events_over_tiers(
    call: TieredCall,
    model: Model,
    ids: list[int],
    stops: list[int],
    rules: Rules,
    progress: Progress,
    spent: float,
) -> Iterator[StreamEvent]:
    meter = Meter(spent)
    with call.prefilled(rules, meter, progress) as state:
        static = (model.graphdef, call.shapes)
        opening = meter.program(_draw, static, model.params, state, rules, **IN_PLACE)
        program = meter.program(_tiered_step, static, model.params, state, rules, **IN_PLACE)

        def step(state: DecodeState) -> DecodeState:
            state = jax.block_until_ready(program(model.params, state, rules))
            call.check()
            return state

        state = opening(model.params, state, rules)
        drawn: list[int] = []
        last = yield from _noted(_tokens(model, state, step, stops, call.shapes, meter), drawn)
        meter.stop()
        call.keep_generated(0, [*drawn, last.token])
        tiers = call.stats(last.state)
    stats = meter.stats(
        call.shapes,
        prompt_tokens=len(ids),
        new_tokens=last.drawn,
        pages_used=call.shapes.row_pages,
        ttft_seconds=last.ttft_seconds,
        tiers=tiers,
    )
    yield StreamEvent(last.token, last.text, last.reason, stats)


class _Last(NamedTuple):
    """The last token, which ends the stream."""

    token: int
    text: str
    reason: FinishReason
    drawn: int  # tokens
    ttft_seconds: float
    state: DecodeState


def _tokens(
    model: Model,
    state: DecodeState,
    step: Callable[[DecodeState], DecodeState],
    stops: list[int],
    shapes: Shapes | TieredShapes,
    meter: Meter,
) -> Generator[StreamEvent, None, _Last]:
    """Give every token but the last as it is drawn; returns the last."""
    detokenizer = None if model.tokenizer is None else StreamDecoder(model.tokenizer)
    drawn = 0
    ttft = None
    while True:
        tokens, finished, reservation, finite = jax.device_get(
            (state.tokens, state.finished, state.reservation, state.finite)
        )
        if isinstance(shapes, Shapes):  # slots over tiers are enough by construction
            reservation.check(state.cache)
        if not finite.all():
            raise not_finite("prompt", model, shapes)
        if ttft is None:
            ttft = meter.seconds
        token, code = int(tokens[0]), REASONS.get(int(finished[0]))
        drawn += 1
        text = ""
        if detokenizer is not None:
            text = "" if token in stops else detokenizer.step(token)
            text += detokenizer.finish() if code else ""
        if code is not None:
            return _Last(token, text, code, drawn, ttft, state)
        yield StreamEvent(token, text, None, None)
        state = step(state)


def _noted(
    events: Generator[StreamEvent, None, _Last], drawn: list[int]
) -> Generator[StreamEvent, None, _Last]:
    """The same events; their tokens are added to a list."""
    while True:
        try:
            event = next(events)
        except StopIteration as end:
            last: _Last = end.value
            return last
        drawn.append(event.token)
        yield event


def _draw(static: tuple[Any, Any], params: Any, state: DecodeState, rules: Rules) -> DecodeState:
    return draw(nnx.merge(static[0], params), state, rules)


def _step(static: tuple[Any, Shapes], params: Any, state: DecodeState, rules: Rules) -> DecodeState:
    graphdef, shapes = static
    return decode_step(nnx.merge(graphdef, params), state, rules, implementation=shapes.attention)


def _tiered_step(
    static: tuple[Any, TieredShapes], params: Any, state: DecodeState, rules: Rules
) -> DecodeState:
    graphdef, shapes = static
    return tiered_step(nnx.merge(graphdef, params), shapes, state, rules)
