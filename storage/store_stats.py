"""Counts of a page store."""

import dataclasses
from collections.abc import Mapping

from kvjax.storage.errors import Reason


@dataclasses.dataclass(frozen=True)
class StoreStats:
    """Counts of one store: what is there, and what this object saw."""

    segments: int
    bytes: int  # of published segments
    sketch_bytes: int  # of which sketches
    max_bytes: int | None
    hits: int  # of all segments, over all processes
    oldest: float | None  # seconds since the oldest segment was written
    idle: float | None  # seconds since the least recently used one was used
    misses: Mapping[Reason, int]  # of this object
    evicted: int  # segments, by this object
    lost_uses: int  # side files with hit counts that could not be read or written
