"""Reads under way, unit by unit and batch by batch, and what a read must give."""

import asyncio
import concurrent.futures
import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from kvjax.storage.units import UnitId


@runtime_checkable
class ReadFuture(Protocol):
    """What a read gives for each unit, as futures of TensorStore and `concurrent.futures` are."""

    def done(self) -> bool:
        """Whether the read has ended."""

    def result(self, timeout: float | None = None) -> Any:
        """The unit, or the error raised; TimeoutError if it is not there in time."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> Any:
        """Calls back when the read has ended, in any thread."""


Read = Callable[[np.ndarray], Sequence[ReadFuture]]
"""Starts reading units, int32 [n, 4]; gives one future a unit."""


class Flight:
    """One unit that is being read or was, shared by all tickets that ask for it meanwhile."""

    __slots__ = (
        "batch",
        "error",
        "future",
        "guesses",
        "outcome",
        "retired",
        "speculative",
        "tickets",
        "unit",
    )

    def __init__(self, unit: UnitId, speculative: bool) -> None:
        self.unit = unit
        self.speculative = speculative  # the read was started before anyone needed the unit
        self.tickets = 1
        self.guesses = int(speculative)  # of these
        self.retired = False  # nobody will collect it any more
        self.batch: Batch | None = None
        self.future: ReadFuture | None = None
        self.error: BaseException | None = None  # the read could not be started
        self.outcome: Literal["used", "failed", "unused"] | None = None

    @property
    def started(self) -> bool:
        """Whether the read was started: it can no longer be called off."""
        return self.batch is not None and self.batch.started is not None

    @property
    def broken(self) -> bool:
        """Whether the read is known to bring nothing."""
        if self.error is not None:
            return True
        # A future that cannot tell without being waited for counts as good until it is.
        exception = getattr(self.future, "exception", None)
        if exception is None or self.future is None or not self.future.done():
            return False
        with contextlib.suppress(asyncio.CancelledError, concurrent.futures.CancelledError):
            return exception() is not None
        return True


class Batch:
    """Units that are read together."""

    __slots__ = ("ended", "finished", "flights", "speculative", "started", "units")

    def __init__(self, flights: list[Flight], units: np.ndarray, speculative: bool) -> None:
        self.flights = flights
        self.units = units
        self.speculative = speculative
        self.started: float | None = None
        self.finished = False
        self.ended = itertools.count(1)
