"""Units that are on their way from a store."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvjax.storage.blobs import STATUS_ERRORS
from kvjax.storage.errors import IN_WORDS, Reason, UnitError, fault

_Units = tuple[np.ndarray, frozenset[int]]
"""Units [n, *unit_shape], and the rows of those whose bytes belong to another place."""


class UnitRead:
    """One unit that is being read."""

    def __init__(self, group: "UnitGroup", row: int) -> None:
        self._group = group
        self._row = row

    def done(self) -> bool:
        """Whether `result` returns or raises at once.

        A unit whose batch failed is read again when `result` first asks for it.
        """
        return self._group.done(self._row)

    def result(self, timeout: float | None = None) -> np.ndarray:
        """The unit [layers, heads, keys and values, tokens, head_dim].

        Args:
          timeout: seconds to wait in all, a second read included; None waits for ever.

        Returns:
          A view into the array of all units of the same call, of the segment's dtype. It is
          nobody else's: TensorStore does not use it any more.

        Raises:
          TimeoutError: it is not there yet.
          UnitError: it cannot be read, its checksum is not that of its bytes, or they are those of
            another unit.
        """
        return self._group.result(self._row, timeout)

    def late(self, waited_s: float) -> UnitError:
        """The error for a unit that was not there in time.

        Args:
          waited_s: seconds.
        """
        return self._group.late(self._row, waited_s)

    def add_done_callback(self, callback: Callable[["UnitRead"], object]) -> None:
        """Calls back once, in any thread, when the batch it was started in has ended."""
        self._group.add_done_callback(lambda: callback(self))


def units_in_time(reads: Sequence[UnitRead], timeout_s: float) -> Iterator[np.ndarray]:
    """The units of one read, one after the other.

    Args:
      reads: as `Segment.read` gives them.
      timeout_s: the longest wait for all of them, in seconds.

    Raises:
      UnitError: one cannot be read; with reason "timeout", it is not there in time.
    """
    deadline = time.monotonic() + timeout_s
    for read in reads:
        try:
            yield read.result(timeout=max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            raise read.late(timeout_s) from error


class UnitGroup:
    """The units of one read. Where it fails, each unit is asked for again on its own, once."""

    def __init__(
        self,
        where: np.ndarray,
        *,
        start: Callable[[np.ndarray], Any],
        checked: Callable[[np.ndarray, np.ndarray], _Units],
        error: Callable[[int, Reason, str], UnitError],
    ) -> None:
        """Starts to read.

        Args:
          where: int64 [n], places of the units.
          start: starts to read the units at places [m] and never blocks; gives TensorStore's future
            of them as they are stored.
          checked: takes what that brought and the places; gives the units [m, *unit_shape], and
            those whose bytes belong to another place.
          error: what to raise for the unit at a place.
        """
        self._where = where
        self._start = start
        self._checked = checked
        self._error = error
        self._future = start(where)
        self._units: _Units | None = None
        self._failed = False
        self._again: dict[int, Any] = {}
        self._lock = threading.Lock()

    def done(self, row: int) -> bool:
        """Whether unit number `row` is there, or known not to come."""
        if not self._future.done():
            return False
        if self._failed or self._future.exception() is not None:
            return row in self._again and bool(self._again[row].done())
        return True

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Calls back once, in any thread, when the read has ended."""
        self._future.add_done_callback(lambda _: callback())

    def result(self, row: int, timeout: float | None) -> np.ndarray:
        """Unit number `row`, as `UnitRead.result`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        units = self._units
        if units is None and not self._failed:
            units = self._wait(timeout)
        if units is not None:
            return self._unit(units, row, self._where)
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        return self._result_alone(row, left)

    def late(self, row: int, waited_s: float) -> UnitError:
        """The error for unit number `row`, as `UnitRead.late`."""
        return self._error(int(self._where[row]), "timeout", f"no answer in {waited_s:g} s")

    def _wait(self, timeout: float | None) -> _Units | None:
        """What the read brought, None if it failed."""
        try:
            stored = self._future.result(timeout=timeout)
        except TimeoutError:
            raise
        except STATUS_ERRORS:
            self._failed = True
            return None
        self._units = self._checked(stored, self._where)
        return self._units

    def _result_alone(self, row: int, timeout: float | None) -> np.ndarray:
        where = self._where[row : row + 1]
        with self._lock:  # held for no wait: who is in a hurry does not stand behind who is not
            if row not in self._again:
                self._again[row] = self._start(where)
        try:
            stored = self._again[row].result(timeout=timeout)
        except TimeoutError:
            raise
        except STATUS_ERRORS as error:
            why = fault(error, "reading it")
            said = IN_WORDS.get(why.reason, os.strerror(why.errno or errno.EIO))
            raise self._error(int(where[0]), why.reason, said) from error
        return self._unit(self._checked(stored, where), 0, where)

    def _unit(self, units: _Units, row: int, where: np.ndarray) -> np.ndarray:
        data, misplaced = units
        if row in misplaced:
            detail = "its place holds a unit of another place, or of another segment"
            raise self._error(int(where[row]), "foreign", detail)
        unit: np.ndarray = data[row]
        return unit
