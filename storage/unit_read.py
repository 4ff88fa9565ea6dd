"""Units that are on their way from a store."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvjax.storage.blobs import STATUS_ERRORS
from kvjax.storage.errors import UnitError


class UnitRead:
    """One unit that is being read."""

    def __init__(self, group: "UnitGroup", row: int) -> None:
        self._group = group
        self._row = row

    def done(self) -> bool:
        """Whether the batch it was started in has ended.

        `result` then returns or raises at once, unless that batch failed: it then reads the unit
        on its own.
        """
        return self._group.done()

    def result(self, timeout: float | None = None) -> np.ndarray:
        """The unit [layers, heads, keys and values, tokens, head_dim].

        Args:
          timeout: seconds to wait in all, a second read included; None waits for ever.

        Returns:
          A view into the array of all units of the same call, of the segment's dtype. It is
          nobody else's: TensorStore does not use it any more.

        Raises:
          TimeoutError: it is not there yet.
          UnitError: it cannot be read, or its checksum is not that of its bytes.
        """
        return self._group.result(self._row, timeout)

    def add_done_callback(self, callback: Callable[["UnitRead"], object]) -> None:
        """Calls back once, in any thread, when the batch it was started in has ended."""
        self._group.add_done_callback(lambda: callback(self))


class UnitGroup:
    """The units of one read. Where it fails, each unit is asked for again on its own, once."""

    def __init__(
        self,
        future: Any,
        shape: tuple[int, ...],
        again: Callable[[int], Any],
        error: Callable[[int, BaseException], UnitError],
    ) -> None:
        """A read that has started.

        Args:
          future: TensorStore's future of all units [n, element].
          shape: [n, *unit_shape].
          again: starts to read unit i on its own; gives a future of [1, element] and never blocks.
          error: what to raise for unit i, from what that future raised.
        """
        self._future = future
        self._shape = shape
        self._read_again = again
        self._error = error
        self._data: np.ndarray | None = None
        self._failed = False
        self._again: dict[int, Any] = {}
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Whether the read has ended."""
        return bool(self._future.done())

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Calls back once, in any thread, when the read has ended."""
        self._future.add_done_callback(lambda _: callback())

    def result(self, row: int, timeout: float | None) -> np.ndarray:
        """Unit number `row`, as `UnitRead.result`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._data is None and not self._failed:
            self._wait(timeout)
        if self._data is not None:
            unit: np.ndarray = self._data[row]
            return unit
        with self._lock:  # held for no wait: who is in a hurry does not stand behind who is not
            if row not in self._again:
                self._again[row] = self._read_again(row)
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            alone: np.ndarray = self._again[row].result(timeout=left)
        except TimeoutError:
            raise
        except STATUS_ERRORS as error:
            raise self._error(row, error) from error
        return alone.reshape(self._shape[1:])

    def _wait(self, timeout: float | None) -> None:
        try:
            data = self._future.result(timeout=timeout)
        except TimeoutError:
            raise
        except STATUS_ERRORS:
            self._failed = True
            return
        self._data = data.reshape(self._shape)
