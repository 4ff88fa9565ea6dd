"""Prefixes that are prefilled once, kept in a page store, and read page by page afterwards."""

import contextlib
import os
import threading
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Int32

from kvjax.config import CacheConfig
from kvjax.decode import inputs
from kvjax.decode.calls import Progress, cache_spec, kept_as
from kvjax.decode.identity import fingerprint, identity, numbers_of
from kvjax.decode.kept_numbers import dtype_of, format_words, kept_in, was_prefilled_exactly
from kvjax.decode.memory import Memory, Reading
from kvjax.decode.meter import Meter
from kvjax.decode.open_prefixes import (
    PREFILL_S,
    TAIL,
    OpenPrefix,
    OpenPrefixes,
    built_sketches,
    joined_sketches,
)
from kvjax.decode.prefilled_pages import PrefilledPages, check_layers, prefilled_pages
from kvjax.decode.prefix_call import PrefixCall
from kvjax.decode.prefix_config import PrefixConfig, check_codec, check_format, check_latents
from kvjax.decode.reordering import TokenUses, find_reordered
from kvjax.decode.results import PrefixStats
from kvjax.decode.shapes import Shapes
from kvjax.decode.step import DecodeState
from kvjax.errors import KvjaxError
from kvjax.model import Model
from kvjax.storage.errors import (
    ReadFailedError,
    Reason,
    SegmentError,
    StoreError,
    StoreFullError,
    UnitError,
)
from kvjax.storage.keys import Identity
from kvjax.storage.layout import Layout
from kvjax.storage.page_store import Match, PageStore
from kvjax.storage.segment import Segment, SegmentInfo


class Loaded(NamedTuple):
    """A prompt prefilled from what is stored of it."""

    state: DecodeState
    shapes: Shapes  # of programs that go on with it
    stats: PrefixStats


class NotLoaded(NamedTuple):
    """A prompt that is to be prefilled as if nothing were stored, and why."""

    reason: str


class PrefixCache:
    """Stored prefixes, and the pages of them that are in memory; one serves many calls.

    Threads may share it; their calls wait for each other while they read what is stored.

        prefixes = PrefixCache("pages", config=PrefixConfig(budget="10%"))
        prefixes.add(model, document)
        result = kvjax.generate(model, document + question, prefixes=prefixes)

    Args:
      url: of the page store: a folder, or any URL that TensorStore has a key-value store for.
      config: how to choose, read and keep pages.
      max_bytes: most bytes of the store; the least recently used prefixes are evicted.
      read_only: whether the store may be written.
      tenant: prefixes of one tenant are never found by another.

    Attributes:
      config: as given.
      store: the page store.

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
        self.config = inputs.given_or_default("config", config, PrefixConfig)
        self.store = PageStore.open(
            url, max_bytes=max_bytes, read_only=read_only, timeout_s=self.config.timeout_s
        )
        self._tenant = tenant
        self._lock = threading.RLock()
        self._memory = Memory(self.config)
        self._open = OpenPrefixes(self.config)
        self._uses = TokenUses()

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

        Each prompt has a key of its own, and pages of its own on disk. Where a prompt grows,
        `remove_shorter` removes what it grew from.

        Args:
          model: what to run.
          prompt: a text or token ids, at least a page of them.
          cache: page size, dtype and format; pages of a format are stored as its codes.
          label: for people; the model's name if it is empty.
          prefill_chunk: most tokens prefilled at once.
          progress: called with "prefill" and how much of it is done.

        Returns:
          What is stored.

        Raises:
          KvjaxError: the prompt is shorter than a page or longer than the model's context, the
            model has layers whose pages cannot be chosen from, the codec cannot encode the cache's
            dtype, or a format is given and tokens are chosen, or the model's pages do not fit it,
            or the model keeps latents and keys are to be read apart.
          StoreError: the store cannot be written; nothing was published.
        """
        cache = cache or CacheConfig()
        check_layers(model)
        check_format(self.config, cache)
        check_latents(self.config, model)
        check_codec(self.config.codec, cache_spec(model, cache).dtype)
        ids = inputs.token_ids(model, prompt)
        if len(ids) < cache.page_size:
            raise KvjaxError(
                f"prompt has {len(ids)} tokens: a stored prefix needs a page of {cache.page_size} "
                f"or more"
            )
        there = self.stored(model, ids, cache)
        if there is not None:
            return there
        report = progress or (lambda phase, share: None)
        split = self._layout(model, cache).split_kv
        pages = prefilled_pages(model, ids, cache, prefill_chunk, report, split=split)
        numbers = self._numbers(model, cache)
        return self.put(model, ids, pages, label=label, arrays=pages.exact, numbers=numbers)

    def _layout(self, model: Model, cache: CacheConfig) -> Layout:
        layers = cache_spec(model, cache).layers
        heads, _, _ = layers[0].pool_dims
        return self.config.layout(cache.page_size, len(layers), heads)

    def _numbers(self, model: Model, cache: CacheConfig) -> str:
        return kept_in(cache_spec(model, cache).dtype, cache.page_format)

    def longest(self, model: Model, ids: list[int], cache: CacheConfig) -> Match | None:
        """The stored prompt over tiers that shares the most full pages with a prompt, open.

        Args:
          model: what prefilled it.
          ids: the prompt.
          cache: page size, dtype and format.
        """
        name = identity(model, kept_as(model, cache), self._tenant)
        return self.store.find(name, ids, layout=self._layout(model, cache))

    def stored(self, model: Model, ids: list[int], cache: CacheConfig) -> SegmentInfo | None:
        """What is stored of a prompt already, if it is all of it and with what to choose by.

        Args:
          model: what prefilled it.
          ids: the prompt.
          cache: page size, dtype and format.
        """
        name = identity(model, self._numbers(model, cache), self._tenant)
        layout, sketch = self._layout(model, cache), self.config.sketch_name()
        match = self.store.find(name, ids, layout=layout, sketch=sketch, exact=True)
        if match is None:
            return None
        match.segment.close()
        return match.segment.info

    def put(
        self,
        model: Model,
        ids: list[int],
        pages: PrefilledPages,
        *,
        label: str = "",
        arrays: Mapping[str, np.ndarray] | None = None,
        after: Match | None = None,
        numbers: str | None = None,
    ) -> SegmentInfo:
        """Store pages that are prefilled already.

        Args:
          model: what prefilled them.
          ids: the prompt; its tokens after the last full page are kept too.
          pages: as `prefilled_pages` gives them.
          label: for people; the model's name if it is empty.
          arrays: small arrays that are kept too, by name.
          after: an open stored prefix whose first pages are the prompt's: they are not written
            again, and `pages` are those that follow.
          numbers: what pages are kept in, as `kept_in` says; None is their dtype.

        Raises:
          StoreError: the store cannot be written; nothing was published.
        """
        layers, _, heads, size, _ = pages.keys.shape
        sketches = built_sketches(self.config, pages.chosen_by)
        if after is not None:
            sketches = joined_sketches(after.segment, after.pages, sketches)
        seconds = np.asarray(pages.seconds, np.float32)
        kept = {PREFILL_S: seconds, **sketches, **(arrays or {})}
        name = identity(model, numbers or str(pages.keys.dtype), self._tenant)
        layout = self.config.layout(size, layers, heads)
        with self._lock:
            while True:
                try:
                    return self.store.put(
                        name,
                        ids,
                        pages.keys,
                        pages.values,
                        layout=layout,
                        sketches=kept,
                        label=label or model.name,
                        after=after,
                        codec=self.config.codec,
                    )
                except StoreFullError:
                    if not self._open.close_one():  # what is open is not evicted
                        raise

    def remove_shorter(self, key: str) -> list[SegmentInfo]:
        """Remove the stored prefixes that a longer one begins with, as where a prompt grew.

            prefixes.remove_shorter(prefixes.add(model, prompt).key)

        Prompts that begin with one of them read the longer one instead. Their keys are gone.

        Args:
          key: of the longer one, or enough of its first digits to tell it from the others.

        Returns:
          What was removed: of the same model, tenant, layout and dtype, and nothing that is chosen
          by what the longer one lacks, or that ends in other tokens.

        Raises:
          UnknownKeyError: no stored prefix has such a key, or several have.
          StoreError: the store cannot be listed, or something cannot be removed.
        """
        with self._lock:
            removed = self.store.remove_shorter(self.store.full_key(key))
            for info in removed:
                self._open.drop(info.key)
            return removed

    def info(self, key: str) -> SegmentInfo:
        """What is known of a stored prefix.

        Args:
          key: of the segment, or enough of its first digits to tell it from the others.

        Raises:
          UnknownKeyError: no stored prefix has such a key, or several have.
          SegmentError: it cannot be used.
        """
        with self.store.open_segment(self.store.full_key(key)) as segment:
            return segment.info

    def tokens(self, model: Model, key: str, *, cache: CacheConfig | None = None) -> list[int]:
        """The tokens of a stored prefix, those after its last full page included.

        Args:
          model: that it was stored for.
          cache: of a call that its pages are to serve; None if they are to serve none.
          key: of the segment, or enough of its first digits to tell it from the others.

        Raises:
          UnknownKeyError: no stored prefix has such a key, or several have.
          SegmentError: it cannot be used.
          KvjaxError: it was stored for another model or another tenant, or its pages cannot serve
            such a call.
        """
        with self.store.open_segment(self.store.full_key(key)) as segment:
            of = segment.info.identity
            if of.tenant != self._tenant or of.weights != fingerprint(model):
                raise KvjaxError(
                    f"prefix {key!r} ({segment.info.label}) was stored for another "
                    f"{'tenant' if of.tenant != self._tenant else 'model'}: "
                    f"store the document for this one"
                )
            if cache is not None:
                _check_serves(segment.info, model, cache)
            tail = segment.sketches(TAIL).get(TAIL, segment.tokens[:0])
            return [*segment.tokens.tolist(), *tail.tolist()]

    def prefill(
        self,
        model: Model,
        ids: list[int],
        shapes: Shapes,
        *,
        cache: CacheConfig,
        limits: Int32[Array, " B"],
        meter: Meter,
    ) -> Loaded | NotLoaded:
        """Prefill a prompt from what is stored of it, if something is and it is worth loading.

        Args:
          model: what to run.
          ids: the prompt.
          shapes: of programs that would run it without what is stored.
          cache: the caller's.
          limits: as in `Rules`, of one row.
          meter: of the call.

        Raises:
          KvjaxError: the model has layers whose pages cannot be chosen from, the stored prefix has
            no such sketch, or a read failed and `on_read_failure` is "fail".
        """
        check_layers(model)
        if self.config.load_policy == "recompute":
            return NotLoaded("load_policy is 'recompute'")
        began = meter.seconds
        name = identity(model, self._numbers(model, cache), self._tenant)
        whole = shapes.format is not None
        with self._lock:
            try:
                match = self._matched(name, ids[:-1], shapes.page_size, whole)
            except (SegmentError, StoreError) as error:
                return self._failed(error, None)
            if match is None:
                return NotLoaded(
                    "nothing is stored in this format that the prompt begins with the whole of"
                    if whole
                    else "nothing of the prompt is stored"
                )
            try:
                prefix = self._open.keep(match.segment)
                call = PrefixCall(
                    model,
                    ids,
                    prefix,
                    match.pages,
                    plain=shapes,
                    cache=cache,
                    config=self.config,
                    new_tokens=int(limits[0]),
                )
                return self._loaded(call, prefix, model, limits, meter, began)
            except (SegmentError, StoreError, UnitError, ReadFailedError, TimeoutError) as error:
                return self._failed(error, match.segment.info)

    def _matched(self, name: Identity, ids: list[int], page_size: int, whole: bool) -> Match | None:
        if self.config.reorder:
            return find_reordered(self.store, name, ids, page_size)
        sketch = self.config.sketch_name()
        match = self.store.find(name, ids, page_size, sketch=sketch, whole=whole)
        if match is None and sketch is not None:
            other = self.store.find(name, ids, page_size, whole=whole)
            if other is not None:
                other.segment.close()
                raise KvjaxError(
                    f"the stored prefix {other.segment.info.key[:12]} has no {sketch} sketch: "
                    f"choose by what it was stored with, or add it again with these settings"
                )
        # In a format, keys that are stored with their values cannot be read without them.
        apart = match is None or match.segment.grid.layout.split_kv
        if whole and self.config.by == "keys" and not apart:
            assert match is not None
            match.segment.close()
            raise KvjaxError(
                f"by is 'keys' and cache.format is given: the stored prefix "
                f"{match.segment.info.key[:12]} has keys and values together; choose by what it "
                f"was stored with, or remove it and add it again with by='keys'"
            )
        return match

    def report(self, info: SegmentInfo, error: BaseException, *, remove: bool = False) -> Reason:
        """Take note of a fault that a reader of a stored prefix met, in the store too.

        What is damaged is not found any more, and written anew when it is put again.

        Args:
          info: of the prefix.
          error: what reading it raised.
          remove: whether what is damaged is removed.

        Returns:
          The fault, as the store counts it.
        """
        self._open.drop(info.key)
        fault: BaseException | None = error
        while fault is not None and not isinstance(fault, UnitError | SegmentError):
            fault = fault.__cause__
        late = isinstance(error, TimeoutError) or getattr(error, "reason", "") == "timeout"
        reason: Reason = "timeout" if late else "io" if fault is None else fault.reason
        page = fault.unit[3] if isinstance(fault, UnitError) else None
        self.store.report(info.key, reason, info.created, page=page, remove=remove)
        return reason

    def _failed(self, error: BaseException, info: SegmentInfo | None) -> NotLoaded:
        """Take note of a fault, then raise it, or say that there was one."""
        if info is not None:
            self.report(info, error)
        if self.config.on_read_failure == "fail":
            raise KvjaxError(f"a stored prefix could not be read: {error}") from error
        return NotLoaded(f"it could not be read: {error}")

    def _loaded(
        self,
        call: PrefixCall,
        prefix: OpenPrefix,
        model: Model,
        limits: Int32[Array, " B"],
        meter: Meter,
        began: float,
    ) -> Loaded | NotLoaded:
        if not call.fits:
            return NotLoaded("what follows it is too long for one program, or the pool too small")
        segment = prefix.segment
        start = segment.bytes_read()
        if self.config.load_policy == "auto":
            cost = prefix.cost()
            if not cost.loads(call.expected_bytes, tokens=call.prefix_tokens):
                return NotLoaded("prefilling is estimated to be faster than reading")
        before = segment.bytes_read()
        with self._reading(segment, model) as reading:
            state, reads = call.run(reading, self._uses, limits, meter)
            counts = reading.reader.finish_request()
        if reads.failure is not None:
            return self._failed(reads.failure, segment.info)
        after = segment.bytes_read()
        payload = after.payload - before.payload
        whole = (after.units - before.units) * segment.unit_bytes
        stats = PrefixStats(
            key=segment.info.key,
            pages=call.pages,
            pages_chosen=call.count,
            page_size=segment.info.layout.page_size,
            bytes_read=payload,
            # Chunks are read whole for tokens: what these occupy is what is attended to.
            bytes_used=call.chosen_bytes if self.config.by_tokens else reads.bytes_used,
            bytes_scored=reads.bytes_scored,
            index_bytes=after.index - before.index,
            sketch_bytes=after.sketches - start.sketches,
            calibration_bytes=before.payload + before.index - start.payload - start.index,
            bytes_wasted=round(counts.wasted_bytes * min(payload / whole, 1)) if whole else 0,
            bytes_prefetched=counts.prefetched * counts.unit_bytes,
            device_hits=counts.device_hits,
            host_hits=counts.host_hits,
            units=counts.needed,
            wait_seconds=counts.wait_s,
            read_seconds=counts.read_s,
            seconds=meter.seconds - began,
        )
        return Loaded(state, call.shapes, stats)

    def reorder(self) -> list[SegmentInfo]:
        """Pack the tokens that earlier requests chose, as IMPRESS does in the background.

        What was chosen is counted while `PrefixConfig.reorder` is on, by this object, and added to
        what a former reordering was made by. Of each prefix that was chosen from since, a second
        segment is written with the tokens of every layer in the order of their uses; later requests
        read it where they share the whole of it.

        Returns:
          What was written.

        Raises:
          SegmentError: a prefix cannot be opened.
          UnitError: it cannot be read.
          StoreError: the store cannot be written.
        """
        with self._lock:
            written = self._uses.reorder(self.store)
            for info in written:
                self._open.drop(info.key)
            return written

    def clear_memory(self) -> None:
        """Forget the pages that are in memory; what pages are chosen by stays there."""
        with self._lock:
            self._memory = Memory(self.config)

    def _reading(
        self, segment: Segment, model: Model
    ) -> contextlib.AbstractContextManager[Reading]:
        return self._memory.reading(segment, model)


def _check_serves(info: SegmentInfo, model: Model, cache: CacheConfig) -> None:
    """Refuse a stored prefix whose pages are not those of a call."""
    key = info.key[:12]
    if info.layout.page_size != cache.page_size:
        raise KvjaxError(
            f"page_size is {cache.page_size}: prefix {key} was stored in pages of "
            f"{info.layout.page_size} tokens; ask with these, or store it again"
        )
    kept = numbers_of(info.identity)
    dtype, of_format = dtype_of(kept), format_words(kept)
    if was_prefilled_exactly(kept):
        raise KvjaxError(
            f"prefix {key} was stored over tiers: its prompt was prefilled exactly and then kept "
            f"in {of_format}, which serves calls with cache.select and cache.place; to read it as "
            f"a prefix, add the document with this cache.format"
        )
    if cache.dtype not in (None, dtype):
        raise KvjaxError(
            f"dtype is {cache.dtype!r}: prefix {key} was stored in {dtype}; ask with this, or "
            f"store it again"
        )
    asked = kept_in(dtype, cache.page_format)
    if kept != asked:
        raise KvjaxError(
            f"the call has {format_words(asked)}: prefix {key} was stored in {of_format}; ask with "
            f"this, or store it again"
        )
    if identity(model, kept, info.identity.tenant).numerics != info.identity.numerics:
        raise KvjaxError(
            f"prefix {key} was stored by a model that computes otherwise, as in another dtype; "
            f"load the model as it was then, or store it again"
        )
