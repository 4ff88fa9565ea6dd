"""How often and when segments were found: small side files, written when there is time.

They only decide what is evicted first, so nothing waits for them and a lost one does no harm.
"""

import dataclasses
import json
from typing import Any

from kvjax.storage.blobs import STATUS_ERRORS, Blobs
from kvjax.storage.errors import StoreError


@dataclasses.dataclass(frozen=True)
class Use:
    """One segment's use."""

    hits: int = 0
    last_used: float = 0.0  # seconds since 1970


class UsageLog:
    """Uses by segment key, known here and on disk."""

    def __init__(self, blobs: Blobs, read_only: bool) -> None:
        self._blobs = blobs
        self._read_only = read_only
        self._uses: dict[str, Use] = {}
        self._writing: dict[str, Any] = {}
        self._behind: set[str] = set()
        self.lost = 0  # side files that could not be read or written

    def get(self, key: str) -> Use:
        """A segment's use."""
        return self._uses.get(key, Use())

    def load(self, key: str) -> None:
        """Takes in what another process, or this one before, has written."""
        try:
            data = self._blobs.read(_name(key)).value
            if data is None:
                return
            stored = json.loads(data)
            other = Use(int(stored["hits"]), float(stored["last_used"]))
        except (StoreError, ValueError, KeyError, TypeError):
            self.lost += 1
            return
        here = self.get(key)
        self._uses[key] = Use(max(here.hits, other.hits), max(here.last_used, other.last_used))

    def bump(self, key: str, now: float) -> None:
        """Counts one more use; starts to write it down, unless the last write still runs."""
        here = self.get(key)
        self._uses[key] = Use(here.hits + 1, max(here.last_used, now))
        self._behind.add(key)
        self._start(key)

    def forget(self, key: str) -> None:
        """The segment is gone."""
        self._uses.pop(key, None)
        self._behind.discard(key)
        self._finish(key)

    def flush(self) -> None:
        """Waits until everything is written, or known to be lost."""
        for key in list(self._writing):
            self._finish(key)
        for key in list(self._behind):
            self._start(key)
            self._finish(key)

    def _start(self, key: str) -> None:
        running = self._writing.get(key)
        if self._read_only or (running is not None and not running.done()):
            return
        self._finish(key)
        self._behind.discard(key)
        data = json.dumps(dataclasses.asdict(self._uses[key])).encode("ascii")
        self._writing[key] = self._blobs.start_write(_name(key), data)

    def _finish(self, key: str) -> None:
        running = self._writing.pop(key, None)
        if running is None:
            return
        try:
            running.result()
        except STATUS_ERRORS:
            self.lost += 1


def _name(key: str) -> str:
    return f"use/{key}.json"
