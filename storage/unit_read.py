"""Units that are on their way from a store."""

import threading
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
        """Whether `result` returns or raises at once."""
        return self._group.done()

    def result(self, timeout: float | None = None) -> np.ndarray:
        """The unit [layers, heads, keys and values, tokens, head_dim].

        Args:
          timeout: seconds to wait; None waits for ever.

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
        again: Callable[[int, float | None], np.ndarray],
    ) -> None:
        """A read that has started.

        Args:
          future: TensorStore's future of all units [n, element].
          shape: [n, *unit_shape].
          again: reads unit i on its own, waiting so many seconds; raises UnitError, TimeoutError.
        """
        self._future = future
        self._shape = shape
        self._read_again = again
        self._data: np.ndarray | None = None
        self._failed = False
        self._again: dict[int, np.ndarray | UnitError] = {}
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Whether the read has ended."""
        return bool(self._future.done())

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Calls back once, in any thread, when the read has ended."""
        self._future.add_done_callback(lambda _: callback())

    def result(self, row: int, timeout: float | None) -> np.ndarray:
        """Unit number `row`, as `UnitRead.result`."""
        if self._data is None and not self._failed:
            self._wait(timeout)
        if self._data is not None:
            unit: np.ndarray = self._data[row]
            return unit
        with self._lock:
            if row not in self._again:
                try:
                    self._again[row] = self._read_again(row, timeout)
                except UnitError as error:
                    self._again[row] = error
        outcome = self._again[row]
        if isinstance(outcome, UnitError):
            raise outcome
        return outcome

    def _wait(self, timeout: float | None) -> None:
        try:
            data = self._future.result(timeout=timeout)
        except TimeoutError:
            raise
        except STATUS_ERRORS:
            self._failed = True
            return
        self._data = data.reshape(self._shape)
