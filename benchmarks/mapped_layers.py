"""The baseline that maps whole layers from a file, as FlexGen keeps tensors on disk."""

import contextlib
import dataclasses
import itertools
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvjax.decode import PrefixCache
from kvjax.decode.memory import Reading
from kvjax.decode.near_memory import Near
from kvjax.decode.prefixes import Loaded, NotLoaded
from kvjax.model import Model
from kvjax.storage.prefetch import ReadCounts
from kvjax.storage.segment import Segment


class MappedReader:
    """Units of one stored prefix from a flat file in memory-mapped form; page faults read them."""

    def __init__(self, path: pathlib.Path, segment: Segment) -> None:
        layers, heads, kinds, pages = segment.grid.units
        self._shape = (layers, heads, kinds, pages, *segment.unit_shape)
        if not path.exists():
            units = np.array(list(np.ndindex(layers, heads, kinds, pages)), np.int32)
            whole = np.stack([read.result() for read in segment.read(units)])
            with open(path, "wb") as file:
                file.write(whole.view(np.uint8).data)
                os.fsync(file.fileno())  # only what is on the disk can be dropped from memory
        self._map = np.memmap(path, np.uint8, "r").view(segment.grid.numpy_dtype)
        self._map = self._map.reshape(self._shape)
        self._tickets: dict[int, np.ndarray] = {}
        self._numbers = itertools.count(1)
        self._counts = ReadCounts(segment.unit_bytes)

    def __enter__(self) -> "MappedReader":
        return self

    def __exit__(self, *_: object) -> None:
        del self._map

    def issue(self, units: np.ndarray, *, demand: bool) -> int:
        """Notes what is wanted; nothing is read before it is touched."""
        ticket = next(self._numbers)
        if demand:
            self._tickets[ticket] = units
        return ticket

    def touch(self, units: np.ndarray, mass: np.ndarray, important: np.ndarray) -> None:
        """The operating system ranks what it keeps."""

    def collect(self, ticket: int) -> np.ndarray:
        """Copies units out of the mapping."""
        units = self._tickets.pop(ticket)
        needed = self._counts.needed + len(units)
        self._counts = dataclasses.replace(self._counts, needed=needed)
        return np.asarray(self._map[tuple(units.T)])

    def finish_request(self) -> ReadCounts:
        """What was asked for."""
        return self._counts


class MappedPrefixes(PrefixCache):
    """Stored prefixes that are read through a mapped file beside the store."""

    @contextlib.contextmanager
    def _reading(self, segment: Segment, model: Model) -> Iterator[Reading]:
        path = pathlib.Path(self.store.url.removeprefix("file://")) / f"{segment.info.key}.flat"
        with MappedReader(path, segment) as reader:
            yield Reading(reader, Near(None, None))

    def prefill(self, *arguments: Any, **options: Any) -> Loaded | NotLoaded:
        """As the base class; every unit that was touched counts as read."""
        found = super().prefill(*arguments, **options)
        if isinstance(found, NotLoaded):
            return found
        stats = dataclasses.replace(found.stats, bytes_read=found.stats.bytes_used)
        return found._replace(stats=stats)
