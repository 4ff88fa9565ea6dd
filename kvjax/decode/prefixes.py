"""Prefixes that are prefilled once, kept in a page store, and read page by page afterwards."""

import contextlib
import dataclasses
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from kvjax.config import CacheConfig
from kvjax.decode import inputs
from kvjax.decode.budget import Budget
from kvjax.decode.calls import Progress
from kvjax.decode.choosing import Selection, StoredPrefix
from kvjax.decode.identity import identity
from kvjax.decode.load_or_recompute import CostModel, measure_reads
from kvjax.decode.memory import Memory, Reading
from kvjax.decode.meter import Meter
from kvjax.decode.opening import IN_PLACE, empty_state, prefill_program
from kvjax.decode.prefix_config import PrefixConfig
from kvjax.decode.reordering import TokenUses, find_reordered
from kvjax.decode.reprefill import reprefill
from kvjax.decode.results import PrefixStats
from kvjax.decode.shapes import Shapes, chunk_size, half_step, plan
from kvjax.decode.step import DecodeState, Prompts
from kvjax.errors import KvjaxError
from kvjax.model import Model, kv_spec
from kvjax.storage.errors import UnitError
from kvjax.storage.page_store import PageStore
from kvjax.storage.segment import Segment, SegmentInfo
from kvjax.storage.sessions import PageReads, opened

TAIL = "tail"
"""Name of the array that keeps the tokens after the last full page."""

PREFILL_S = "prefill_s"
"""Name of the array that keeps the seconds that prefilling took."""

OPEN_SEGMENTS = 8
"""Stored prefixes that stay open; the store does not evict them."""

LARGEST_SUFFIX = 2048
"""Tokens after the stored pages that one program prefills at once."""


class PrefilledPages(NamedTuple):
    """A prompt's full pages after plain prefill."""

    keys: Float[np.ndarray, "L N Hkv P D"]
    values: Float[np.ndarray, "L N Hkv P D"]
    seconds: float  # that prefilling took, compilation excluded


class PrefixCache:
    """Stored prefixes, and the pages of them that are in memory; one serves many calls.

        prefixes = PrefixCache("pages", config=PrefixConfig(budget="10%"))
        prefixes.add(model, document)
        result = kvjax.generate(model, document + question, prefixes=prefixes)

    Args:
      url: of the page store: a folder, or any URL that TensorStore has a key-value store for.
      config: how to choose, read and keep pages.
      max_bytes: most bytes of the store; the least recently used prefixes are evicted.
      read_only: whether the store may be written.
      tenant: prefixes of one tenant are never found by another.

    Raises:
      ValueError: the URL is no store, or an argument is wrong.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        config: PrefixConfig | None = None,
        max_bytes: int | None = None,
        read_only: bool = False,
        tenant: str = "",
    ) -> None:
        self.config = config or PrefixConfig()
        self.store = PageStore.open(url, max_bytes=max_bytes, read_only=read_only)
        self._tenant = tenant
        self._memory = Memory(self.config)
        self._sketches: dict[tuple[str, str], tuple[dict[str, jax.Array], ...]] = {}
        self._costs: dict[str, CostModel] = {}
        self._open: dict[str, Segment] = {}  # the least recently used first
        self.uses = TokenUses()

    def add(
        self,
        model: Model,
        prompt: inputs.PromptLike,
        *,
        cache: CacheConfig | None = None,
        label: str = "",
        prefill_chunk: int = 512,
        progress: Progress | None = None,
    ) -> SegmentInfo:
        """Prefill a prompt and store its pages; the tokens after its last full page are kept too.

        Args:
          model: what to run.
          prompt: a text or token ids, at least a page of them.
          cache: page size and dtype.
          label: for people; the model's name if it is empty.
          prefill_chunk: most tokens prefilled at once.
          progress: called with "prefill" and how much of it is done.

        Returns:
          What is stored.

        Raises:
          KvjaxError: the prompt is shorter than a page or longer than the model's context, or the
            model has layers whose pages cannot be chosen from.
          StoreError: the store cannot be written; nothing was published.
        """
        cache = cache or CacheConfig()
        check_layers(model)
        ids = inputs.token_ids(model, prompt)
        if len(ids) < cache.page_size:
            raise KvjaxError(
                f"prompt has {len(ids)} tokens: a stored prefix needs a page of {cache.page_size} "
                f"or more"
            )
        report = progress or (lambda phase, share: None)
        pages = prefilled_pages(model, ids, cache, prefill_chunk, report)
        return self.put(model, ids, pages, label=label)

    def put(
        self, model: Model, ids: list[int], pages: PrefilledPages, *, label: str = ""
    ) -> SegmentInfo:
        """Store pages that are prefilled already.

        Args:
          model: what prefilled them.
          ids: the prompt; its tokens after the last full page are kept too.
          pages: as `prefilled_pages` gives them.
          label: for people; the model's name if it is empty.

        Raises:
          StoreError: the store cannot be written; nothing was published.
        """
        layers, count, heads, size, _ = pages.keys.shape
        arrays = {
            TAIL: np.asarray(ids[count * size :], np.int32),
            PREFILL_S: np.asarray(pages.seconds, np.float32),
            **self._built(pages.keys),
        }
        return self.store.put(
            identity(model, str(pages.keys.dtype), self._tenant),
            ids[: count * size],
            pages.keys,
            pages.values,
            layout=self.config.layout(size, layers, heads),
            sketches=arrays,
            label=label or model.name,
        )

    def tokens(self, key: str) -> list[int]:
        """The tokens of a stored prefix, those after its last full page included.

        Args:
          key: of the segment, or enough of its first digits to tell it from the others.

        Raises:
          UnknownKeyError: no stored prefix has such a key, or several have.
          SegmentError: it cannot be used.
        """
        with self.store.open_segment(self.store.full_key(key)) as segment:
            return [*segment.tokens.tolist(), *segment.sketches()[TAIL].tolist()]

    def prefill(
        self,
        model: Model,
        ids: list[int],
        shapes: Shapes,
        *,
        limits: Int32[Array, " B"],
        meter: Meter,
    ) -> tuple[DecodeState, Shapes, PrefixStats] | None:
        """Prefill a prompt from what is stored of it, if something is and it is worth loading.

        Args:
          model: what to run.
          ids: the prompt.
          shapes: of programs that would run it without what is stored.
          limits: as in `Rules`, of one row.
          meter: of the call.

        Returns:
          The state after prefill, the shapes of programs that go on with it, and what was read; or
          None if the prompt is to be prefilled as if nothing were stored.

        Raises:
          KvjaxError: the stored prefix has no such sketch, or a read failed and `on_read_failure`
            is "fail".
        """
        if self.config.load_policy == "recompute":
            return None
        check_layers(model)
        began = meter.seconds
        name = identity(model, shapes.spec.dtype, self._tenant)
        find = find_reordered if self.config.reorder else PageStore.find
        match = find(self.store, name, ids[:-1], shapes.page_size)
        if match is None:
            return None
        segment = self._kept_open(match.segment)
        call = _Call(self, model, ids, segment, match.pages, shapes, int(limits[0]))
        if self.config.load_policy == "auto" and not self._worth_loading(segment, call):
            return None
        before = segment.bytes_read()
        with self._reading(segment, model) as reading:
            state, reads = call.run(reading, limits, meter)
            counts = reading.reader.finish_request()
        after = segment.bytes_read()
        if reads.failure is not None:
            self._open.pop(segment.info.key).close()
            if self.config.on_read_failure == "fail":
                raise KvjaxError(f"a stored prefix could not be read: {reads.failure}")
            return None
        stats = PrefixStats(
            key=segment.info.key,
            pages=match.pages,
            pages_chosen=call.count,
            page_size=shapes.page_size,
            bytes_read=after.payload - before.payload,
            # Chunks are read whole for tokens: what these occupy is what is attended to.
            bytes_used=call.chosen_bytes if self.config.by_tokens else reads.bytes_used,
            bytes_scored=reads.bytes_scored,
            index_bytes=after.index - before.index,
            sketch_bytes=call.sketch_bytes,
            bytes_wasted=counts.wasted_bytes,
            bytes_prefetched=counts.prefetched * counts.unit_bytes,
            device_hits=counts.device_hits,
            host_hits=counts.host_hits,
            units=counts.needed,
            wait_seconds=counts.wait_s,
            read_seconds=counts.read_s,
            seconds=meter.seconds - began,
        )
        return state, call.shapes, stats

    def reorder(self) -> list[SegmentInfo]:
        """Pack the tokens that earlier requests chose, as IMPRESS does in the background.

        What was chosen is counted while `PrefixConfig.reorder` is on, by this object. Of each
        prefix that was chosen from, a second segment is written with the tokens of every layer in
        the order of their uses; later requests read it where they share the whole of it.

        Returns:
          What was written.

        Raises:
          SegmentError: a prefix cannot be opened.
          UnitError: it cannot be read.
          StoreError: the store cannot be written.
        """
        written = self.uses.reorder(self.store)
        for info in written:
            if info.key in self._open:
                self._open.pop(info.key).close()
        return written

    def clear_memory(self) -> None:
        """Forget the pages that are in memory; what pages are chosen by stays there."""
        self._memory = Memory(self.config)

    def sketches_of(self, segment: Segment) -> tuple[dict[str, jax.Array], ...]:
        """The configured sketch of every layer, padded to a size that programs are made for.

        Raises:
          KvjaxError: the prefix was stored without it.
          SegmentError: it is damaged.
        """
        layers, pages = segment.info.shape[:2]
        room = half_step(pages)
        if self.config.sketch() is None:
            return ({"pages": jnp.zeros((room,), jnp.int32)},) * layers  # only for its size
        name = self.config.sketch_name()
        key = segment.info.key, name
        if key not in self._sketches:
            arrays = segment.sketches()
            parts = {n.removeprefix(f"{name}."): a for n, a in arrays.items() if n.startswith(name)}
            if not parts:
                there = sorted({n.rsplit(".", 1)[0] for n in arrays} - {TAIL, PREFILL_S})
                raise KvjaxError(
                    f"the stored prefix {segment.info.key[:12]} has no {name} sketch, only "
                    f"{', '.join(there) or 'none'}: choose by one of these, or store it again"
                )
            self._sketches[key] = tuple(
                {part: _padded(array[layer], room) for part, array in parts.items()}
                for layer in range(layers)
            )
        return self._sketches[key]

    def _built(self, keys: np.ndarray) -> dict[str, np.ndarray]:
        """The configured sketch of every layer, stacked, under names of its own."""
        sketch = self.config.sketch()
        if sketch is None:
            return {}
        build = jax.jit(sketch.build)
        layers = [jax.device_get(build(jnp.asarray(layer))) for layer in keys]
        name = self.config.sketch_name()
        return {f"{name}.{part}": np.stack([a[part] for a in layers]) for part in layers[0]}

    def _kept_open(self, found: Segment) -> Segment:
        """The same segment as opened before, if it was: what it knows of its shards is read."""
        kept = self._open.pop(found.info.key, None)
        if kept is None:
            kept = found
        else:
            found.close()
        self._open[kept.info.key] = kept
        while len(self._open) > OPEN_SEGMENTS:
            self._open.pop(next(iter(self._open))).close()
        return kept

    def _reading(
        self, segment: Segment, model: Model
    ) -> contextlib.AbstractContextManager[Reading]:
        return self._memory.reading(segment, model)

    def _worth_loading(self, segment: Segment, call: "_Call") -> bool:
        if segment.info.key not in self._costs:
            seconds = float(segment.sketches()[PREFILL_S])
            tokens_per_s = segment.info.tokens / max(seconds, 1e-6)
            try:
                rates = measure_reads(segment, self.config.timeout_s)
            except (UnitError, TimeoutError):  # as when the pages chosen cannot be read
                return self.config.on_read_failure == "fail"  # and their read says why
            self._costs[segment.info.key] = CostModel(*rates, tokens_per_s)
        tokens = call.prefix_tokens
        return self._costs[segment.info.key].loads(call.chosen_bytes, tokens=tokens)


class _Call:
    """One prompt against one stored prefix: shapes, then the program."""

    def __init__(
        self,
        prefixes: PrefixCache,
        model: Model,
        ids: list[int],
        segment: Segment,
        pages: int,
        plain: Shapes,
        new_tokens: int,
    ) -> None:
        config, size, spec = prefixes.config, plain.page_size, plain.spec
        self.model, self.spec, self.config = model, spec, config
        self.segment, self.pages, self.uses = segment, pages, prefixes.uses
        before = segment.bytes_read().sketches
        self.sketches = prefixes.sketches_of(segment)
        self.sketch_bytes = segment.bytes_read().sketches - before
        self.prefix_tokens = pages * size
        self.suffix = ids[self.prefix_tokens :]
        choice = config.choice()
        self.count = Budget(config.budget).pages(
            pages,
            page_size=size,
            page_bytes=spec.bytes_per_page(size),
            least=min(choice.first + choice.last, pages),
        )
        self.selection = config.selection()
        self.chosen_bytes = self.count * spec.bytes_per_page(size)
        # Rules for tokens fill their pages to the last; others may leave room, for fewer programs.
        most = half_step(segment.info.shape[1])
        fitting = (model.config.max_context - new_tokens - len(self.suffix)) // size
        self.room = self.count
        if not config.by_tokens:
            self.room = min(half_step(self.count), most, fitting)
        shapes = plan(
            model.config,
            spec,
            [self.room * size + len(self.suffix)],
            new_tokens=new_tokens,
            prefill_chunk=LARGEST_SUFFIX,
            cache=CacheConfig(page_size=size, attention=plain.attention),
        )
        chunk = chunk_size(len(self.suffix), LARGEST_SUFFIX)
        self.shapes = dataclasses.replace(shapes, chunk=chunk, chunks=1, room=plain.room)

    def run(
        self, reading: Reading, limits: Int32[Array, " B"], meter: Meter
    ) -> tuple[DecodeState, PageReads]:
        """Re-prefill; whether it succeeded is in the reads."""
        info = self.segment.info
        layers, _, heads, _, _ = info.shape
        reads = PageReads(
            reading.reader,
            unit_shape=self.segment.unit_shape,
            dtype=self.segment.grid.numpy_dtype,
            layers=layers,
            heads=heads,
            pages=self.pages,
            period=self.config.period,
            near_rows=reading.near.rows,
            key_stride=self.config.period if self.config.who == "period" else 1,
            speculate=self.config.prefetch,
        )
        state = empty_state(self.model, self.shapes, limits, meter)
        suffix = inputs.flat_prompts([self.suffix], self.shapes)
        static = (self.model.graphdef, self.shapes, self.room, self.selection)
        with contextlib.ExitStack() as during:
            handle = during.enter_context(opened(reads))
            if self.config.reorder:
                during.enter_context(self.uses.counting(handle, self.segment))
            prefix = StoredPrefix(
                self.sketches,
                jnp.int32(self.pages),
                jnp.int32(self.count),
                jnp.int32(handle),
                reading.near,
            )
            program = meter.program(
                _reprefill, static, self.model.params, state, prefix, suffix, **IN_PLACE
            )
            state = jax.block_until_ready(program(self.model.params, state, prefix, suffix))
        return state, reads


def _reprefill(
    static: tuple[Any, Shapes, int, Selection],
    params: Any,
    state: DecodeState,
    prefix: StoredPrefix,
    suffix: Prompts,
) -> DecodeState:
    graphdef, shapes, room, selection = static
    decoder = nnx.merge(graphdef, params)
    return reprefill(
        decoder,
        state,
        prefix,
        suffix,
        room=room,
        selection=selection,
        implementation=shapes.attention,
    )[0]


def check_layers(model: Model) -> None:
    """Refuse a model whose layers do not all see the whole prefix, or differ in shape.

    Raises:
      KvjaxError: they do not.
    """
    shapes = {(x.num_kv_heads, x.head_dim, x.window) for x in model.config.layers}
    if len(shapes) > 1 or any(window is not None for _, _, window in shapes):
        raise KvjaxError(
            f"{model.name} has sliding-window layers or layers of different shapes: its prefixes "
            f"cannot be stored and chosen from; run it without prefixes"
        )


def prefilled_pages(
    model: Model, ids: list[int], cache: CacheConfig, prefill_chunk: int, progress: Progress
) -> PrefilledPages:
    """Prefill a prompt and take its full pages out of the pool.

    Args:
      model: what to run.
      ids: the prompt.
      cache: page size and dtype.
      prefill_chunk: most tokens prefilled at once.
      progress: called with "prefill" and how much of it is done.
    """
    spec = kv_spec(model.config, cache.dtype or model.dtype)
    shapes = plan(
        model.config, spec, [len(ids)], new_tokens=0, prefill_chunk=prefill_chunk, cache=cache
    )
    meter = Meter()
    limits = jnp.ones((shapes.batch,), jnp.int32)
    state = empty_state(model, shapes, limits, meter)
    stored = prefill_program(model, ids, shapes, state, meter)(state, progress).cache
    seconds = meter.seconds
    table = np.asarray(stored.block_tables)[0, : len(ids) // cache.page_size]
    keys, values = (
        np.stack([np.asarray(pool)[table] for pool in pools])
        for pools in (stored.k_pages, stored.v_pages)
    )
    return PrefilledPages(keys, values, seconds)


def _padded(array: np.ndarray, pages: int) -> jax.Array:
    """A layer's sketch [Hkv, N, ...] with room for more pages."""
    widths = [(0, 0), (0, pages - array.shape[1])] + [(0, 0)] * (array.ndim - 2)
    return jnp.pad(jnp.asarray(array), widths)
