"""`generate` and `stream` where a step reads selected pages, and most pages live elsewhere."""

import contextlib
import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int32

from kvjax.config import CacheConfig
from kvjax.decode.calls import Progress
from kvjax.decode.generate_loop import Drawn, draw_rows
from kvjax.decode.meter import Meter
from kvjax.decode.opening import IN_PLACE
from kvjax.decode.results import TierStats
from kvjax.decode.step import DecodeState, Rules, draw, start
from kvjax.decode.tiered_layers import selecting
from kvjax.decode.tiered_packed import means_of, page_shape
from kvjax.decode.tiered_plan import tiered_plan
from kvjax.decode.tiered_prefill import prefill_row
from kvjax.decode.tiered_state import Learned, TieredShapes, empty_tiers
from kvjax.decode.tiered_step import tiered_step
from kvjax.decode.tiered_store import PromptStore
from kvjax.errors import KvjaxError
from kvjax.model import Model
from kvjax.policies import DistilledIndexer
from kvjax.storage.errors import ReadFailedError
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
        whose pages cannot be chosen from, or `device_bytes` have no room for a step.
    """

    def __init__(
        self, model: Model, ids: list[list[int]], *, new_tokens: int, cache: CacheConfig
    ) -> None:
        assert cache.select is not None
        self._model, self._ids = model, ids
        self.shapes, self._counts = tiered_plan(model, [len(row) for row in ids], new_tokens, cache)
        by = cache.select.by
        self._learned = by.weights if isinstance(by, DistilledIndexer) else ()
        self._pages: SequencePages | None = None
        self._store: PromptStore | None = None
        if cache.place is not None and cache.place.store is not None:
            most = sum(len(row) for row in ids) * selecting(self.shapes.spec).bytes_per_token
            means = partial(means_of, self.shapes) if cache.format is not None else None
            self._store = PromptStore(cache, most=most, layers=self.shapes.leaving, means=means)

    @contextlib.contextmanager
    def prefilled(
        self,
        rules: Rules,
        meter: Meter,
        progress: Progress,
        *,
        limits: Int32[Array, "L Hkv"] | None = None,
    ) -> Iterator[DecodeState]:
        """Prefill every prompt; the pages exist inside the `with`.

        Args:
          rules: for the rows' limits.
          meter: of the call.
          progress: called with "prefill" and how much of it is done.
          limits: int32 [L, Hkv], slots that each head of the layers that choose pages may use, the
            open page's included: at least K + 1, at most what `shapes` has. None is all.
        """
        shapes, model = self.shapes, self._model
        with contextlib.ExitStack() as during:
            handle = 0
            if shapes.fetches:
                self._pages = _elsewhere(shapes)
                handle = during.enter_context(opened(self._pages))
            begin = (rules.limits, self._learned)
            state = meter.program(_start, (model.config.hidden_size, shapes), *begin)(*begin)
            cache = dataclasses.replace(state.cache, handle=jnp.int32(handle))
            if limits is not None:
                cache = dataclasses.replace(cache, limits=limits)
            state = dataclasses.replace(state, cache=cache)
            for row, ids in enumerate(self._ids):
                progress("prefill", row / len(self._ids))
                if self._store is not None and self._pages is not None:
                    self._store.find(model, ids, row, self._pages, during)
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
                began = meter.seconds
                state = jax.block_until_ready(program(model.params, state, *given))
                took = meter.seconds - began
                self.check()
                if self._store is not None and self._pages is not None:
                    # What is not finite reaches the last token, though bytes of a format hide it.
                    finite = bool(jnp.isfinite(state.hidden[row]).all())
                    self._store.keep(
                        model, ids, row, self._pages, during, seconds=took, finite=finite
                    )
            progress("prefill", 1.0)
            yield state

    @property
    def fetch_seconds(self) -> float:
        """That finding and reading missing pages took the host so far."""
        return 0.0 if self._pages is None else self._pages.seconds

    def check(self) -> None:
        """Raise what went wrong while pages were written or read.

        Raises:
          KvjaxError: something did; what that row drew since is of no use.
        """
        for failure in self.failures().values():
            raise failure from failure.__cause__

    def failures(self) -> dict[int, KvjaxError]:
        """By row, what went wrong while its pages were written or read.

        The store is told, so that what is damaged is written anew by the next call.
        """
        found = {}
        for row, error in sorted(self._pages.failures.items()) if self._pages else ():
            said = f"prompt {row}: its pages could not be written or read again: {error}"
            if self._store is not None and isinstance(error, ReadFailedError):
                said = f"prompt {row}: {self._store.failed(row, error)}"
            found[row] = KvjaxError(said)
            found[row].__cause__ = error
        return found

    def keep_generated(self, row: int, drawn: list[int]) -> None:
        """Store what a row drew, where `Place.keep_generated` says so.

        Args:
          row: which; nothing of it failed.
          drawn: all its new tokens; the last has no keys yet.
        """
        if self._store is not None and self._pages is not None:
            tokens = [*self._ids[row], *drawn[:-1]]
            chosen = self._counts[row]
            self._store.keep_generated(self._model, row, tokens, self._pages, chosen)

    def stats(self, state: DecodeState) -> TierStats:
        """What moved, at the end.

        Args:
          state: the last.
        """
        shapes, cache = self.shapes, state.cache
        pools = jax.tree.leaves((cache.keys, cache.values, cache.sinks))
        of_tokens = None if cache.index_keys is None else cache.index_keys.index_pages
        index, tokens = (cache.index, of_tokens), np.asarray(cache.traffic.tokens)
        return TierStats(
            pages_chosen=max(self._counts),
            slots=max(map(max, shapes.slots)),
            least_slots=min(map(min, shapes.slots)),
            reads=int(np.asarray(cache.traffic.chosen).sum(dtype=np.int64)),
            misses=int(np.asarray(cache.traffic.missed).sum(dtype=np.int64)),
            bytes_moved=0 if self._pages is None else self._pages.bytes_moved,
            index_bytes=sum(x.nbytes for x in jax.tree.leaves(index)),
            device_bytes=sum(x.nbytes for x in pools),
            host_bytes=0 if self._pages is None else self._pages.bytes_held,
            store=None if self._store is None else self._store.reads(),
            tokens=None if of_tokens is None else int(tokens.sum(dtype=np.int64)),
            page_size=shapes.page_size,
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
    return drawn


def _elsewhere(shapes: TieredShapes) -> SequencePages:
    shape, dtype = page_shape(shapes)
    return SequencePages(
        rows=shapes.batch,
        layers=len(shapes.leaving),
        heads=shapes.spec.layers[shapes.leaving[0]].pool_dims[0],
        pages=shapes.pages,
        page_shape=shape,
        dtype=np.dtype(jnp.dtype(dtype)),
    )


def _start(
    static: tuple[int, TieredShapes], limits: Int32[Array, " B"], learned: Learned
) -> DecodeState:
    hidden_size, shapes = static
    return start(empty_tiers(shapes, learned), hidden_size, limits)


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
