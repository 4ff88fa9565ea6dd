"""How often and when segments were found: small side files, written when there is time.

They only decide what is evicted first, so no `find` waits for them and a lost one does no harm.
Several processes count in one file: each adds what it has counted to what is there, and does so
again if another one wrote meanwhile.
"""

import contextlib
import dataclasses
import json
import math
import threading
from collections.abc import Collection
from typing import Any

from kvjax.storage.blobs import Blobs
from kvjax.storage.errors import StoreError

_ATTEMPTS = 8  # at writing one file while others write it too


@dataclasses.dataclass(frozen=True)
class Use:
    """One segment's use."""

    hits: int = 0
    last_used: float = 0.0  # seconds since 1970

    def __add__(self, other: "Use") -> "Use":
        return Use(self.hits + other.hits, max(self.last_used, other.last_used))


@dataclasses.dataclass(frozen=True)
class _Stored:
    """What a side file holds."""

    use: Use = Use()
    generation: bytes | None = None  # of the file; None if there is none


@dataclasses.dataclass(frozen=True)
class _Running:
    """A read of a side file, or a write of what it will hold."""

    future: Any
    wrote: Use | None = None
    hits: int = 0  # of those counted here, the ones that are in it


class UsageLog:
    """Uses by segment key, known here and on disk. Threads may share it."""

    def __init__(self, blobs: Blobs, read_only: bool) -> None:
        self._blobs = blobs
        self._read_only = read_only
        self._stored: dict[str, _Stored] = {}
        self._more: dict[str, Use] = {}  # counted here, and not known to be written
        self._running: dict[str, _Running] = {}
        self._outdated: set[str] = set()  # another process has written
        self._lock = threading.RLock()
        self.lost = 0  # side files that could not be read or written

    def get(self, key: str) -> Use:
        """A segment's use."""
        with self._lock:
            return self._stored.get(key, _Stored()).use + self._more.get(key, Use())

    def load(self, keys: Collection[str]) -> None:
        """Takes in what other processes, or this one before, have written."""
        reads = {key: self._blobs.start_read(_name(key)) for key in keys}
        for key, future in reads.items():
            self._take(key, future)

    def bump(self, key: str, now: float) -> None:
        """Counts one more use; starts to write it down, unless the last write still runs."""
        with self._lock:
            self._more[key] = self._more.get(key, Use()) + Use(1, now)
            self._advance(key)

    def forget(self, key: str) -> None:
        """The segment is gone; waits until nothing is being written of it."""
        with self._lock:
            self._stored.pop(key, None)
            self._more.pop(key, None)
            self._outdated.discard(key)
            running = self._running.pop(key, None)
        if running is not None and running.wrote is not None:
            with contextlib.suppress(StoreError):
                self._blobs.ended_write_if(_name(key), running.future)

    def flush(self) -> None:
        """Waits until everything is written, or known to be lost."""
        with self._lock:
            keys = list(self._more.keys() | self._running.keys())
        for key in keys:
            lost = self.lost
            for _ in range(_ATTEMPTS):
                with self._lock:
                    self._advance(key)
                    running = self._running.get(key)
                if running is None:
                    break
                self._end(key, running)
                if self.lost > lost:
                    break

    def _advance(self, key: str) -> None:
        """Starts the next read or write of a side file, if one is due; waits for nothing."""
        running = self._running.get(key)
        if running is not None:
            if not running.future.done():
                return
            self._end(key, running)
        more = self._more.get(key)
        if self._read_only or more is None:
            return
        if key in self._outdated:
            self._running[key] = _Running(self._blobs.start_read(_name(key)))
            return
        stored = self._stored.get(key, _Stored())
        use = stored.use + more
        data = json.dumps(dataclasses.asdict(use)).encode("ascii")
        future = self._blobs.start_write_if(_name(key), data, stored.generation)
        self._running[key] = _Running(future, use, more.hits)

    def _end(self, key: str, running: _Running) -> None:
        """Takes what a read or write brought."""
        if running.wrote is None:
            self._take(key, running.future)
        else:
            try:
                generation = self._blobs.ended_write_if(_name(key), running.future)
            except StoreError:
                self.lost += 1
                generation = None
            self._wrote(key, running, running.wrote, generation)
        with self._lock:
            if self._running.get(key) is running:
                del self._running[key]

    def _wrote(self, key: str, running: _Running, use: Use, generation: bytes | None) -> None:
        with self._lock:
            if self._running.get(key) is not running:
                return  # another thread took it, or the segment is gone
            if generation is None:
                self._outdated.add(key)
                return
            self._stored[key] = _Stored(use, generation)
            more = self._more[key]
            if more.hits > running.hits:
                self._more[key] = Use(more.hits - running.hits, more.last_used)
            else:
                del self._more[key]

    def _take(self, key: str, future: Any) -> None:
        try:
            blob = self._blobs.ended_read(_name(key), future)
        except StoreError:
            self.lost += 1
            return
        use = Use()
        if blob.value is not None:
            try:
                use = _decoded(blob.value)
            except (ValueError, KeyError, TypeError, RecursionError):
                self.lost += 1
        with self._lock:
            self._outdated.discard(key)
            self._stored[key] = _Stored(use, blob.generation)


def _decoded(data: bytes) -> Use:
    fields = json.loads(data)
    hits, last_used = fields["hits"], fields["last_used"]
    if type(hits) is not int or hits < 0 or type(last_used) not in (int, float):
        raise ValueError(f"no counts: {fields}")
    if not (math.isfinite(last_used) and 0 <= last_used < 1e11):
        raise ValueError(f"last_used is {last_used}")
    return Use(hits, float(last_used))


def _name(key: str) -> str:
    return f"use/{key}.json"
