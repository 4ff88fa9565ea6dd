"""Prompts of a tiered call in a page store: written once, then read page by page."""

import contextlib

import numpy as np

from kvjax.decode.prefilled_pages import PrefilledPages
from kvjax.decode.prefix_config import PrefixConfig
from kvjax.decode.prefixes import PrefixCache
from kvjax.decode.results import TierReads
from kvjax.errors import KvjaxError
from kvjax.model import Model
from kvjax.policies import Place
from kvjax.storage.placement import AttentionFrequency
from kvjax.storage.prefetch import Prefetcher
from kvjax.storage.segment import Segment
from kvjax.storage.sequence_pages import SequencePages
from kvjax.storage.tiers import Tiers


class PromptStore:
    """The store of one call, with host memory that its rows share.

    Args:
      place: with a store.
      open_until: closes what is opened.

    Raises:
      ValueError: the URL is no store.
    """

    def __init__(self, place: Place, open_until: contextlib.ExitStack) -> None:
        assert place.store is not None
        self._place, self._open_until = place, open_until
        self._prefixes = PrefixCache(place.store, config=PrefixConfig(who="head"))
        self._tiers: Tiers | None = None
        self._readers: list[Prefetcher] = []
        self._segments: list[Segment] = []

    def keep(self, model: Model, ids: list[int], row: int, pages: SequencePages, size: int) -> None:
        """Write a row's full pages to the store, and have them read from there.

        Args:
          model: what prefilled them.
          ids: the prompt.
          row: which.
          pages: holds them.
          size: tokens a page.

        Raises:
          KvjaxError: a key or a value is not finite.
          StoreError: the store cannot be written.
        """
        count = len(ids) // size
        if not count:
            return
        keys, values = pages.prompt(row, count)
        if not (np.isfinite(keys).all() and np.isfinite(values).all()):
            raise KvjaxError(
                f"keys or values of {model.name} are not finite in {keys.dtype} and cannot be "
                f"stored: try CacheConfig(dtype='float32'), and load the model with "
                f"dtype='float32'"
            )
        info = self._prefixes.put(model, ids, PrefilledPages(keys, values, 0.0))
        segment = self._open_until.enter_context(self._prefixes.store.open_segment(info.key))
        if self._tiers is None:
            most = self._place.host_bytes
            self._tiers = Tiers(
                sum(x.nbytes for x in (keys, values)) if most is None else most,
                segment.unit_shape,
                segment.grid.numpy_dtype,
                policy=AttentionFrequency(),
            )
        reader = Prefetcher(
            segment.read,
            self._tiers,
            segment=f"{info.key}.{info.created}",
            timeout_s=self._place.timeout_s,
        )
        self._readers.append(self._open_until.enter_context(reader))
        self._segments.append(segment)
        pages.read_from(row, reader, count)

    def reads(self) -> TierReads:
        """What was read so far."""
        counts = [reader.counts() for reader in self._readers]
        return TierReads(
            bytes_read=sum(segment.bytes_read().payload for segment in self._segments),
            host_hits=sum(c.host_hits for c in counts),
            units=sum(c.needed for c in counts),
            wait_seconds=sum(c.wait_s for c in counts),
            host_bytes=0
            if self._tiers is None
            else self._tiers.host_units * self._tiers.unit_bytes,
        )
