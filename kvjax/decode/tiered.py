"""`generate` and `stream` where a step reads selected pages, and most pages live elsewhere."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int32

from kvjax.cache import check_pools
from kvjax.config import CacheConfig
from kvjax.decode.calls import Progress, cache_spec
from kvjax.decode.generate_loop import Drawn, draw_rows
from kvjax.decode.meter import Meter
from kvjax.decode.opening import IN_PLACE
from kvjax.decode.results import TierStats
from kvjax.decode.shapes import check_attention, half_step, power_of_two
from kvjax.decode.step import DecodeState, Rules, draw, start
from kvjax.decode.tiered_prefill import prefill_row
from kvjax.decode.tiered_state import TieredShapes, empty_tiers
from kvjax.decode.tiered_step import tiered_step
from kvjax.decode.tiered_store import PromptStore
from kvjax.errors import KvjaxError
from kvjax.model import Model
from kvjax.policies import Window
from kvjax.policies.budget import Budget
from kvjax.spec import KVSpec, pages_for
from kvjax.storage.handles import opened
from kvjax.storage.sequence_pages import SequencePages


class TieredCall:
    """One batch of prompts, decoded over tiers: shapes, programs and the pages that are elsewhere.

    Args:
      model: what to run.
      ids: the prompts.
      new_tokens: most tokens to draw for each.
      cache: with `select`.

    Attributes:
      shapes: of the programs.

    Raises:
      KvjaxError: a prompt and its new tokens do not fit the model's context, the model has layers
        whose pages cannot be chosen from, or the budget has no room for what is always in.
    """

    def __init__(
        self, model: Model, ids: list[list[int]], *, new_tokens: int, cache: CacheConfig
    ) -> None:
        assert cache.select is not None
        self._model, self._ids = model, ids
        self._place = cache.place
        self.shapes, self._counts = _plan(model, [len(row) for row in ids], new_tokens, cache)
        self._pages: SequencePages | None = None
        self._store: PromptStore | None = None

    @contextlib.contextmanager
    def prefilled(self, rules: Rules, meter: Meter, progress: Progress) -> Iterator[DecodeState]:
        """Prefill every prompt; the pages exist inside the `with`.

        Args:
          rules: for the rows' limits.
          meter: of the call.
          progress: called with "prefill" and how much of it is done.
        """
        shapes, model = self.shapes, self._model
        with contextlib.ExitStack() as during:
            handle = 0
            if shapes.fetches:
                self._pages = _elsewhere(shapes)
                handle = during.enter_context(opened(self._pages))
                if self._place is not None and self._place.store is not None:
                    self._store = PromptStore(self._place, during)
            made = meter.program(_start, (model.config.hidden_size, shapes), rules.limits)
            state = made(rules.limits)
            cache = dataclasses.replace(state.cache, handle=jnp.int32(handle))
            state = dataclasses.replace(state, cache=cache)
            for row, ids in enumerate(self._ids):
                progress("prefill", row / len(self._ids))
                tokens = np.zeros(shapes.tokens, np.int32)
                tokens[: len(ids)] = ids
                given = (
                    jnp.asarray(tokens),
                    jnp.int32(len(ids)),
                    jnp.int32(self._counts[row]),
                    jnp.int32(row),
                )
                program = meter.program(
                    _prefill, (model.graphdef, shapes), model.params, state, *given, **IN_PLACE
                )
                state = jax.block_until_ready(program(model.params, state, *given))
                self.check()
                if self._store is not None and self._pages is not None:
                    self._store.keep(model, ids, row, self._pages, shapes.page_size)
            progress("prefill", 1.0)
            yield state

    def check(self) -> None:
        """Raise what went wrong while pages were written or read.

        Raises:
          KvjaxError: something did; what was drawn since is of no use.
        """
        failure = None if self._pages is None else self._pages.failure
        if failure is not None:
            raise KvjaxError(f"pages of a sequence could not be kept: {failure}") from failure

    def stats(self, state: DecodeState) -> TierStats:
        """What moved, at the end.

        Args:
          state: the last.
        """
        shapes, cache = self.shapes, state.cache
        pools = (*cache.keys, *cache.values)
        return TierStats(
            pages_chosen=shapes.room,
            slots=shapes.slots,
            reads=int(cache.traffic.chosen),
            misses=int(cache.traffic.missed),
            bytes_moved=0 if self._pages is None else self._pages.bytes_moved,
            index_bytes=sum(x.nbytes for x in jax.tree.leaves(cache.index)),
            device_bytes=sum(x.nbytes for x in pools),
            host_bytes=0 if self._pages is None else self._pages.bytes_held,
            store=None if self._store is None else self._store.reads(),
        )


def loop(call: TieredCall, model: Model, state: DecodeState, rules: Rules, meter: Meter) -> Drawn:
    """Decode to the end in one program.

    Args:
      call: what was prefilled.
      model: what runs.
      state: after prefill.
      rules: how to draw and when to end.
      meter: of the call.
    """
    static = (model.graphdef, call.shapes)
    program = meter.program(_decode, static, model.params, state, rules, donate=(1,))
    drawn: Drawn = jax.block_until_ready(program(model.params, state, rules))
    call.check()
    return drawn


def _plan(
    model: Model, lengths: Sequence[int], new_tokens: int, cache: CacheConfig
) -> tuple[TieredShapes, list[int]]:
    """Shapes, and the pages that each row chooses in a step."""
    select, place = cache.select, cache.place
    assert select is not None
    for row, length in enumerate(lengths):
        if length + new_tokens > model.config.max_context:
            raise KvjaxError(
                f"prompt {row} has {length} tokens and max_new_tokens is {new_tokens}: the "
                f"model's context is {model.config.max_context} tokens; shorten the prompt or ask "
                f"for less"
            )
    check_layers(model)
    size, spec = cache.page_size, cache_spec(model, cache)
    check_attention(spec, cache)
    page_bytes = spec.bytes_per_page(size)
    choice = select.choice()
    least = choice.first + choice.last
    tokens = half_step(pages_for(max(lengths), size)) * size
    longest = max(pages_for(n + max(new_tokens - 1, 0), size) for n in lengths)
    pages = max(half_step(longest), tokens // size, least)
    budget = Budget(select.budget)
    counts = [
        budget.pages(
            max(pages_for(n + new_tokens, size), least),
            page_size=size,
            page_bytes=page_bytes,
            least=least,
        )
        for n in lengths
    ]
    room = min(max(half_step(max(counts)), least), pages)
    batch = power_of_two(len(lengths))
    window = cache.window or Window()
    slots = pages if place is None else min(window.slots(room) + 1, pages)
    if place is not None and place.device_bytes is not None:
        slots = min(slots, _affordable(place.device_bytes, room, pages, batch, spec, size))
    check_pools(spec, batch * slots, size)
    return (
        TieredShapes(
            spec=spec,
            batch=batch,
            tokens=tokens,
            pages=pages,
            page_size=size,
            room=room,
            slots=slots,
            output=4 ** (-(-(max(new_tokens, 16) - 1).bit_length() // 2)),
            fetches=place is not None,
            stored=place is not None and place.store is not None,
            keeps=window.times > 0,
            evict=window.evict,
            observe=1 if place is None else place.observe,
            index=select.index(),
            choice=choice,
            attention=cache.attention,
        ),
        counts,
    )


def _affordable(
    device_bytes: int, room: int, pages: int, batch: int, spec: KVSpec, page_size: int
) -> int:
    """Slots that device memory has room for.

    Raises:
      KvjaxError: they are fewer than a step reads.
    """
    a_slot = batch * spec.bytes_per_page(page_size)
    slots, least = device_bytes // a_slot, min(room + 1, pages)
    if slots < least:
        raise KvjaxError(
            f"device_bytes is {device_bytes}: the {room} pages of a step and the page that is "
            f"being filled need {least * a_slot} bytes for {batch} rows; raise it to that, or "
            f"lower the budget"
        )
    return slots


def check_layers(model: Model) -> None:
    """Refuse a model whose layers do not all see the whole context, or differ in shape.

    Raises:
      KvjaxError: they do not.
    """
    shapes = {(x.num_kv_heads, x.head_dim, x.window) for x in model.config.layers}
    if len(shapes) > 1 or any(window is not None for _, _, window in shapes):
        raise KvjaxError(
            f"{model.name} has sliding-window layers or layers of different shapes: pages cannot "
            f"be selected in them; leave out select"
        )


def _elsewhere(shapes: TieredShapes) -> SequencePages:
    layer = shapes.spec.layers[0]
    return SequencePages(
        rows=shapes.batch,
        layers=len(shapes.spec.layers),
        heads=layer.kv_heads,
        pages=shapes.pages,
        page_shape=(shapes.page_size, layer.head_dim),
        dtype=np.dtype(jnp.dtype(shapes.spec.dtype)),
    )


def _start(static: tuple[int, TieredShapes], limits: Int32[Array, " B"]) -> DecodeState:
    hidden_size, shapes = static
    return start(empty_tiers(shapes), hidden_size, limits)


def _prefill(
    static: tuple[Any, TieredShapes],
    params: Any,
    state: DecodeState,
    tokens: Array,
    length: Array,
    count: Array,
    row: Array,
) -> DecodeState:
    graphdef, shapes = static
    decoder = nnx.merge(graphdef, params)
    cache, hidden = prefill_row(decoder, shapes, state.cache, tokens, length, count, row)
    newest = state.hidden.at[row].set(hidden.astype(state.hidden.dtype))
    return dataclasses.replace(state, cache=cache, hidden=newest)


def _decode(
    static: tuple[Any, TieredShapes], params: Any, state: DecodeState, rules: Rules
) -> Drawn:
    graphdef, shapes = static
    decoder = nnx.merge(graphdef, params)
    state = draw(decoder, state, rules)

    def step(state: DecodeState) -> DecodeState:
        return tiered_step(decoder, shapes, state, rules)

    return draw_rows(state, step, limits=rules.limits, room=shapes.output)
