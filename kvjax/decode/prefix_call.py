"""One prompt against one stored prefix: what to read, in which shapes, and the program."""

import contextlib
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int32

from kvjax.config import CacheConfig
from kvjax.decode import inputs
from kvjax.decode.choosing import Selection, StoredPrefix, window_pages
from kvjax.decode.latent_rows import LatentRows
from kvjax.decode.memory import Reading
from kvjax.decode.meter import Meter
from kvjax.decode.open_prefixes import OpenPrefix
from kvjax.decode.opening import IN_PLACE, empty_state
from kvjax.decode.prefix_config import PrefixConfig
from kvjax.decode.reordering import TokenUses
from kvjax.decode.reprefill import reprefill
from kvjax.decode.shapes import Shapes, chunk_size, half_step, plan
from kvjax.decode.step import DecodeState, Prompts
from kvjax.decode.stored_form import StoredForm
from kvjax.model import Model, keeps_latents
from kvjax.policies.budget import Budget
from kvjax.spec import pages_for
from kvjax.storage.handles import opened
from kvjax.storage.sessions import PageReads

LARGEST_SUFFIX = 2048
"""Tokens after the stored pages that one program prefills at once."""


class PrefixCall:
    """A plan for one prompt against one stored prefix.

    Args:
      model: what to run.
      ids: the prompt.
      prefix: what is stored.
      pages: of it that the prompt shares.
      plain: shapes of programs that would run the prompt whole.
      cache: the caller's, whose pool it must fit.
      config: how to choose.
      new_tokens: most tokens to draw.

    Attributes:
      fits: whether one program can run it; if not, nothing else may be asked of it.
      count: pages that every layer and KV head attends to, if it has no window.
      chosen_bytes: keys and values of these.
      expected_bytes: to be read, as far as that is known before: with keys read to choose by.
      shapes: of the programs.
    """

    def __init__(
        self,
        model: Model,
        ids: list[int],
        prefix: OpenPrefix,
        pages: int,
        *,
        plain: Shapes,
        cache: CacheConfig,
        config: PrefixConfig,
        new_tokens: int,
    ) -> None:
        size, spec, grid = plain.page_size, plain.spec, prefix.segment.grid
        self.pages, self.prefix_tokens = pages, pages * size
        self._model, self._prefix, self._config = model, prefix, config
        self._suffix = ids[self.prefix_tokens :]
        self._form: StoredForm | LatentRows | None = None
        self._always = config.choice().first, config.choice().last
        if plain.format is not None:
            self._form = StoredForm(plain.format, spec, size, grid.layout.split_kv)
            self._always = self._form.always
        elif keeps_latents(model.config):
            self._form = LatentRows(spec, size)
        layers = model.config.layers
        page_bytes = grid.unit_bytes * math.prod(grid.units[:3])
        windows = [window_pages(x.window, size) for x in layers if x.window is not None]
        exact = [(0, 0)] * len(layers)
        if self._form is not None:
            exact = [self._form.exact_pages(index) for index in range(len(layers))]
        # Before what a window reaches stand the layer's exact first tokens.
        reach = [
            window_pages(x.window, size) + first
            for x, (first, _) in zip(layers, exact, strict=True)
            if x.window is not None
        ]
        room = config.least_pages(self._always)
        least = min(max([pages if config.by == "all" else room, *reach]), pages)
        self.count = Budget(config.budget).pages(
            pages, page_size=size, page_bytes=page_bytes, least=least
        )
        full = [index for index, layer in enumerate(layers) if layer.window is None]
        attended = len(full) * self.count + sum(min(window, self.count) for window in windows)
        self.chosen_bytes = attended * page_bytes // len(layers)
        keys = pages * page_bytes * config.key_layers(full) // (2 * len(layers))
        unread = sum(min(sum(both), self.count) for both in exact) * page_bytes // len(layers)
        self.expected_bytes = max(self.chosen_bytes - unread, 0) + keys
        # Rules for tokens fill their pages to the last; others may leave room, for fewer programs.
        fitting = (model.config.max_context - new_tokens - len(self._suffix)) // size
        if cache.num_pages is not None:
            after = pages_for(len(self._suffix) + max(new_tokens - 1, 0), size)
            fitting = min(fitting, cache.num_pages - after)
        most = half_step(prefix.segment.info.shape[1])
        self._room = self.count
        if not config.by_tokens:
            self._room = max(min(half_step(self.count), most, fitting), room)
        self.fits = len(self._suffix) <= LARGEST_SUFFIX and self._room <= fitting
        if not self.fits:
            return
        shapes = plan(
            model.config,
            spec,
            [self._room * size + len(self._suffix)],
            new_tokens=new_tokens,
            prefill_chunk=LARGEST_SUFFIX,
            cache=dataclasses.replace(cache, page_size=size),
        )
        chunk = chunk_size(len(self._suffix), LARGEST_SUFFIX)
        self.shapes = dataclasses.replace(shapes, chunk=chunk, chunks=1, room=plain.room)

    def run(
        self, reading: Reading, uses: TokenUses, limits: Int32[Array, " B"], meter: Meter
    ) -> tuple[DecodeState, PageReads]:
        """Re-prefill; whether it succeeded is in the reads.

        Args:
          reading: how to read.
          uses: counts chosen tokens, if the configuration asks for it.
          limits: as in `Rules`, of one row.
          meter: of the call.

        Raises:
          SegmentError: what to choose by is damaged.
        """
        segment, config = self._prefix.segment, self._config
        layers, _, heads, _, _ = segment.info.shape
        reads = PageReads(
            reading.reader,
            unit_shape=segment.unit_shape,
            dtype=segment.grid.numpy_dtype,
            layers=layers,
            heads=heads,
            pages=self.pages,
            period=config.period,
            near_rows=reading.near.rows,
            key_stride=config.period if config.who == "period" else 1,
            windows=[layer.window for layer in self._model.config.layers],
            speculate=config.prefetch,
        )
        sketches = self._prefix.sketches(config.least_pages(self._always))
        exact = self._prefix.exact(self._form) if isinstance(self._form, StoredForm) else ()
        state = empty_state(self._model, self.shapes, limits, meter)
        suffix = inputs.flat_prompts([self._suffix], self.shapes)
        selection = config.selection(self._always)
        static = (self._model.graphdef, self.shapes, self._room, selection, self._form)
        with contextlib.ExitStack() as during:
            handle = during.enter_context(opened(reads))
            if config.reorder:
                during.enter_context(uses.counting(handle, segment))
            prefix = StoredPrefix(
                sketches,
                jnp.int32(self.pages),
                jnp.int32(self.count),
                jnp.int32(handle),
                reading.near,
                exact,
            )
            program = meter.program(
                _reprefill, static, self._model.params, state, prefix, suffix, **IN_PLACE
            )
            state = jax.block_until_ready(program(self._model.params, state, prefix, suffix))
        return state, reads


def _reprefill(
    static: tuple[Any, Shapes, int, Selection, StoredForm | LatentRows | None],
    params: Any,
    state: DecodeState,
    prefix: StoredPrefix,
    suffix: Prompts,
) -> DecodeState:
    graphdef, shapes, room, selection, form = static
    return reprefill(
        nnx.merge(graphdef, params),
        state,
        prefix,
        suffix,
        room=room,
        selection=selection,
        form=form,
        implementation=shapes.attention,
    )
