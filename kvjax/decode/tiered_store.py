"""Prompts of a tiered call in a page store: written once, then read page by page."""

import contextlib
from collections.abc import Callable

import numpy as np

from kvjax.config import CacheConfig
from kvjax.decode.calls import cache_spec, kept_as
from kvjax.decode.kept_answers import KeptAnswers
from kvjax.decode.prefilled_pages import PrefilledPages, kept_elsewhere
from kvjax.decode.prefix_config import By, PrefixConfig
from kvjax.decode.prefixes import PrefixCache
from kvjax.decode.results import TierReads
from kvjax.errors import KvjaxError
from kvjax.model import Model
from kvjax.storage.errors import DAMAGED, ReadFailedError
from kvjax.storage.layout import Layout
from kvjax.storage.page_order import PAGE_PLACES, near_together
from kvjax.storage.page_store import Match
from kvjax.storage.placement import AttentionFrequency
from kvjax.storage.prefetch import Prefetcher
from kvjax.storage.segment import Segment
from kvjax.storage.sequence_pages import SequencePages
from kvjax.storage.tiers import Tiers

SHARED = 0.75
"""The least share of a prompt's pages that a stored one must have to serve it."""


class PromptStore:
    """The store of one call, with host memory that its rows share.

    Args:
      cache: with a place that has a store.
      most: bytes of all prompts' pages that steps read, for which host memory has room if the place
        names no limit.
      layers: the model's whose pages are kept, in order.
      means: mean keys [L, N, Hkv, 1, D] of pages that are bytes, if there is a format.

    Raises:
      ValueError: the URL is no store.
    """

    def __init__(
        self,
        cache: CacheConfig,
        *,
        most: int,
        layers: tuple[int, ...],
        means: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
    ) -> None:
        place = cache.place
        assert place is not None and place.store is not None  # noqa: PT018  the caller looked
        self._cache, self._timeout_s, self._order = cache, place.timeout_s, place.order
        self._layers, self._means = layers, means
        self._host_bytes = most if place.host_bytes is None else place.host_bytes
        # Nothing chooses among pages of a format but the call that keeps them.
        by: By = "low-bit" if cache.format is None else "all"
        config = PrefixConfig(by=by, who="head", timeout_s=place.timeout_s, codec=place.codec)
        self._prefixes = PrefixCache(place.store, config=config)
        self._tiers: Tiers | None = None
        self._readers: list[Prefetcher] = []
        self._segments: dict[int, Segment] = {}
        self._matches: dict[int, Match] = {}
        self._damaged: set[str] = set()  # folders of the store
        self._kept = KeptAnswers(self._prefixes) if place.keep_generated else None

    def find(
        self,
        model: Model,
        ids: list[int],
        row: int,
        pages: SequencePages,
        during: contextlib.ExitStack,
    ) -> None:
        """Have a row's pages read from the store if they are there, before they are prefilled.

        A stored prompt that shares most of them will do; the others then stay in host memory.

        Args:
          model: what is to prefill them.
          ids: the prompt.
          row: which.
          pages: will hold the others.
          during: closes what is opened.

        Raises:
          StoreError: the store cannot be listed.
        """
        count = len(ids) // self._cache.page_size
        match = self._prefixes.longest(model, ids, self._cache) if count else None
        if match is not None and match.pages >= SHARED * count:
            self._read(match, row, pages, during)
        elif match is not None:
            match.segment.close()

    def keep(
        self,
        model: Model,
        ids: list[int],
        row: int,
        pages: SequencePages,
        during: contextlib.ExitStack,
        *,
        seconds: float,
        finite: bool,
    ) -> None:
        """Write a row's full pages to the store if they were not found, and have them read there.

        Args:
          model: what prefilled them.
          ids: the prompt.
          row: which.
          pages: holds them.
          during: closes what is opened.
          seconds: that prefilling took.
          finite: whether what prefilling computed is finite.

        Raises:
          KvjaxError: that or a key or a value is not finite.
          StoreError: the store cannot be written.
        """
        count = len(ids) // self._cache.page_size
        if count and row not in self._matches:
            prefilled = kept_elsewhere(model, *pages.in_memory(row, count), seconds)
            prefilled = prefilled._replace(bytes_finite=finite)
            match = Match(self._written(model, ids, prefilled), count)
            self._read(match, row, pages, during)

    def _read(
        self, match: Match, row: int, pages: SequencePages, during: contextlib.ExitStack
    ) -> None:
        """Have a row's first pages read from an open segment, which `during` closes."""
        segment = during.enter_context(match.segment)
        self._matches[row] = match
        if self._tiers is None:
            self._tiers = Tiers(
                self._host_bytes,
                segment.unit_shape,
                segment.grid.numpy_dtype,
                policy=AttentionFrequency(),
            )
        reader = Prefetcher(
            segment.read,
            self._tiers,
            segment=f"{segment.info.key}.{segment.info.created}",
            timeout_s=self._timeout_s,
        )
        self._readers.append(during.enter_context(reader))
        self._segments[row] = segment
        pages.read_from(row, reader, match.pages)

    def keep_generated(
        self, model: Model, row: int, tokens: list[int], pages: SequencePages, chosen: int
    ) -> None:
        """Store the full pages that a row has beyond its stored ones, if generated pages are kept.

        Where these are known to be damaged, nothing is stored that would share them.

        Args:
          model: what ran.
          row: which.
          tokens: those whose keys and values exist.
          pages: holds them.
          chosen: pages that each step attended to at most.
        """
        size, match = self._cache.page_size, self._matches.get(row)
        lost = match is not None and not self._damaged.isdisjoint(match.segment.folders)
        if self._kept is not None and lost:
            self._kept.failure = "the prompt's stored pages are damaged"
        elif self._kept is not None:
            self._kept.keep(model, tokens, pages, row, match, chosen=chosen, page_size=size)

    def _written(self, model: Model, ids: list[int], pages: PrefilledPages) -> Segment:
        """A new segment of a prompt's pages, open."""
        if not pages.finite:
            dtype = cache_spec(model, self._cache).dtype
            raise KvjaxError(
                f"keys or values of {model.name} are not finite in {dtype} and cannot "
                f"be stored: try CacheConfig(dtype='float32'), and load the model with "
                f"dtype='float32'"
            )
        arrays = {}
        if self._order == "cluster":
            keys = pages.keys if self._means is None else self._means(pages.keys, pages.values)
            arrays[PAGE_PLACES] = near_together(keys, Layout(self._cache.page_size))
        numbers = kept_as(model, self._cache)
        info = self._prefixes.put(model, ids, pages, arrays=arrays, numbers=numbers)
        return self._prefixes.store.open_segment(info.key)

    def failed(self, row: int, error: ReadFailedError) -> str:
        """Tell the store that reading failed; what is damaged is removed, and written anew.

        Args:
          row: whose pages were read.
          error: what that raised.

        Returns:
          Which page it was, and what to do.
        """
        segment, store = self._segments[row], self._prefixes.store
        reason = self._prefixes.report(segment.info, error, remove=True)
        if reason in DAMAGED:
            todo = "call again, which writes damaged pages anew"
            self._damaged |= segment.folders
        elif reason == "timeout":
            todo = "allow a longer Place.timeout_s, or leave out the store"
        else:
            todo = "call again, or leave out the store"
        layer, head, _, page = error.units[0].tolist()
        return (
            f"page {page} of layer {self._layers[layer]}, KV head {head} could not be read from "
            f"{store.url} ({reason}): {todo}. {error}"
        )

    def reads(self) -> TierReads:
        """What was read so far."""
        counts = [reader.counts() for reader in self._readers]
        read = [segment.bytes_read() for segment in self._segments.values()]
        return TierReads(
            bytes_read=sum(r.payload for r in read),
            index_bytes=sum(r.index for r in read),
            units_read=sum(r.units for r in read),
            requests=sum(r.requests for r in read),
            host_hits=sum(c.host_hits for c in counts),
            units=sum(c.needed for c in counts),
            wait_seconds=sum(c.wait_s for c in counts),
            pages_kept=0 if self._kept is None else self._kept.pages,
            not_kept=None if self._kept is None else self._kept.failure,
            host_bytes=0
            if self._tiers is None
            else self._tiers.host_units * self._tiers.unit_bytes,
        )
