"""Reads of units on their way: demand first, each unit once, speculation within bounds.

Threads only start reads; nobody waits in them, so a read that never returns holds up no other. Who
wants a unit waits for its future.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from kvjax.storage.units import UnitId

_SPECULATIVE_BATCH_BYTES = 1 << 18
"""What a demand may find in its way, times the threads: short against a read's own time."""


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

    __slots__ = ("batch", "error", "future", "outcome", "speculative", "tickets", "unit")

    def __init__(self, unit: UnitId, speculative: bool) -> None:
        self.unit = unit
        self.speculative = speculative  # the read was started before anyone needed the unit
        self.tickets = 1
        self.batch: _Batch | None = None
        self.future: ReadFuture | None = None
        self.error: BaseException | None = None  # the read could not be started
        self.outcome: Literal["used", "failed", "unused"] | None = None


class _Batch:
    """Units that are read together."""

    __slots__ = ("ended", "finished", "flights", "speculative", "started", "units")

    def __init__(self, flights: list[Flight], units: np.ndarray, speculative: bool) -> None:
        self.flights = flights
        self.units = units
        self.speculative = speculative
        self.started: float | None = None
        self.finished = False
        self.ended = itertools.count(1)


class ReadQueue:
    """Starts reads in threads of its own; shares those under way.

    Args:
      read: starts reading units and gives their futures. It is called from several threads.
      unit_bytes: bytes of a unit.
      threads: threads for any read, and as many speculative batches under way at once; one more
        thread starts nothing but demanded reads, so that a speculative one cannot hold them up.
      max_in_flight_bytes: bytes of speculation queued, under way, or read and not yet released.
      patience_s: seconds after which a read under way no longer counts against these bounds.

    Raises:
      ValueError: an argument is out of range.
    """

    def __init__(
        self,
        read: Read,
        unit_bytes: int,
        *,
        threads: int,
        max_in_flight_bytes: int,
        patience_s: float,
    ) -> None:
        if threads < 1:
            raise ValueError(f"threads is {threads}: at least 1 is needed to start reads")
        if max_in_flight_bytes < 0:
            raise ValueError(
                f"max_in_flight_bytes is {max_in_flight_bytes}; 0 means no speculation"
            )
        self._read = read
        self._unit_bytes = unit_bytes
        self._window = threads
        self._max_in_flight_bytes = max_in_flight_bytes
        self._patience_s = patience_s
        self._changed = threading.Condition()  # guards everything below, flights and batches too
        self._flights: dict[UnitId, Flight] = {}
        self._demand: deque[_Batch] = deque()
        self._speculation: deque[_Batch] = deque()
        self._under_way: set[_Batch] = set()
        self._held = 0  # bytes of speculation
        self._closed = False
        self._busy_since = 0.0
        self._counts = self._no_counts()
        self._threads = [
            threading.Thread(
                target=self._work, args=(place < threads,), name=f"kvjax-read-{place}", daemon=True
            )
            for place in range(threads + 1)
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _no_counts() -> dict[str, float]:
        names = ("issued", "batches", "prefetched", "demanded", "shared", "wasted", "abandoned")
        return dict.fromkeys((*names, "failed", "dropped", "retried", "read_s"), 0)

    def take_counts(self, *, reset: bool) -> dict[str, float]:
        """Units issued, and what became of them, since the last reset."""
        with self._changed:
            if self._under_way:
                now = time.monotonic()
                self._counts["read_s"] += now - self._busy_since
                self._busy_since = now
            counts = dict(self._counts)
            if reset:
                self._counts = self._no_counts()
        return counts

    @property
    def closed(self) -> bool:
        """Whether no more reads are started."""
        return self._closed

    @property
    def held_bytes(self) -> int:
        """Bytes of speculation that count against `max_in_flight_bytes`."""
        with self._changed:
            return self._held

    def join(
        self, ids: Sequence[UnitId], units: np.ndarray, *, demand: bool
    ) -> list[Flight | None]:
        """Asks for units: joins reads under way, queues the others. Never blocks.

        Demand takes a unit out of the queue of speculation into its own batch.

        Args:
          ids: n units.
          units: int32 [n, 4], the same units as `read` wants them.
          demand: whether they are needed; speculation beyond the bound is dropped.

        Returns:
          For each unit its flight, to be released once; None where speculation was dropped.

        Raises:
          ValueError: the queue is closed.
        """
        with self._changed:
            self._expire()
            return self._join(ids, units, demand)

    def retry(self, lost: Sequence[Flight], units: np.ndarray) -> list[Flight]:
        """Demands units anew whose flights failed or are late, and releases those."""
        with self._changed:
            for flight in lost:
                if self._flights.get(flight.unit) is flight:
                    del self._flights[flight.unit]
                current = self._flights.get(flight.unit)
                if current is not None and current.speculative:
                    del self._flights[flight.unit]
                self._end(flight, "failed")
            self._counts["retried"] += len(lost)
            fresh = self._join([flight.unit for flight in lost], units, demand=True)
            self._release(lost)
        return [flight for flight in fresh if flight is not None]

    def wait(self, flight: Flight, deadline: float) -> Any:
        """Waits for a unit.

        Args:
          flight: one that `join` gave.
          deadline: until when, in seconds of `time.monotonic`.

        Returns:
          What the read brought, or the exception it raised; a `TimeoutError` when it is late.
        """
        future = flight.future
        if future is None:
            with self._changed:
                while flight.future is None and flight.error is None and not self._closed:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return TimeoutError("the read was not started in time")
                    self._changed.wait(left)
                if flight.error is not None:
                    return flight.error
                if flight.future is None:
                    return TimeoutError("closed before the read was started")
                future = flight.future
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            return error if str(error) else TimeoutError("the read did not return in time")
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - given to the caller
            flight.error = error  # so that nobody else waits for it
            return error

    def under_way_since(self, flight: Flight) -> float | None:
        """When a flight's read was started, in seconds of `time.monotonic`."""
        return None if flight.batch is None else flight.batch.started

    def settle(self, flights: Sequence[Flight]) -> tuple[int, int, int]:
        """Releases flights whose units a request took.

        Returns:
          How many had been read ahead, how many on demand, and how many served another ticket
          before.
        """
        with self._changed:
            before = [self._counts[name] for name in ("prefetched", "demanded", "shared")]
            for flight in flights:
                if flight.outcome is None:
                    self._end(flight, "used")
                else:
                    self._counts["shared"] += 1
            self._release(flights)
            after = [self._counts[name] for name in ("prefetched", "demanded", "shared")]
        first, second, third = (int(b - a) for a, b in zip(before, after, strict=True))
        return first, second, third

    def release(self, flights: Sequence[Flight]) -> None:
        """Gives flights back unused. Queued reads that nobody else asked for are not started."""
        with self._changed:
            self._release(flights)

    def close(self, timeout_s: float) -> bool:
        """Ends the threads. Reads under way are left alone, queued ones are not started.

        Returns:
          Whether all threads ended; one that is stuck in `read` is left behind as a daemon.
        """
        with self._changed:
            self._closed = True
            self._demand.clear()
            self._speculation.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _join(self, ids: Sequence[UnitId], units: np.ndarray, demand: bool) -> list[Flight | None]:
        if self._closed:
            raise ValueError("the prefetcher is closed: make a new one")
        flights: list[Flight | None] = []
        queued: list[int] = []
        for place, unit in enumerate(ids):
            flight = self._flights.get(unit)
            if flight is not None and not _broken(flight):
                flight.tickets += 1
                if demand and flight.speculative and not _started(flight):
                    flight.speculative = False
                    self._held -= self._unit_bytes
                    queued.append(place)
            elif not demand and self._held + self._unit_bytes > self._max_in_flight_bytes:
                self._counts["dropped"] += 1
                flight = None
            else:
                flight = self._flights[unit] = Flight(unit, speculative=not demand)
                self._held += 0 if demand else self._unit_bytes
                queued.append(place)
            flights.append(flight)
        size = len(queued) if demand else max(1, _SPECULATIVE_BATCH_BYTES // self._unit_bytes)
        queue = self._demand if demand else self._speculation
        for first in range(0, len(queued), max(1, size)):
            places = queued[first : first + size]
            members = [flight for place in places if (flight := flights[place]) is not None]
            batch = _Batch(members, units[places], speculative=not demand)
            for flight in members:
                flight.batch = batch
            queue.append(batch)
        if queued:
            self._changed.notify_all()
        return flights

    def _release(self, flights: Sequence[Flight]) -> None:
        for flight in flights:
            flight.tickets -= 1
            if flight.tickets:
                continue
            if self._flights.get(flight.unit) is flight:
                del self._flights[flight.unit]
            if not _started(flight):
                flight.batch = None
                self._held -= self._unit_bytes if flight.speculative else 0
                continue
            self._end(flight, "failed" if _broken(flight) else "unused")
            flight.future = None
            if flight.speculative and flight.batch is not None and flight.batch.finished:
                self._held -= self._unit_bytes

    def _end(self, flight: Flight, outcome: Literal["used", "failed", "unused"]) -> None:
        """Counts what became of a started read, once."""
        if flight.outcome is not None or not _started(flight):
            return
        flight.outcome = outcome
        if outcome == "failed":
            self._counts["failed"] += 1
        elif flight.speculative:
            self._counts["prefetched" if outcome == "used" else "wasted"] += 1
        else:
            self._counts["demanded" if outcome == "used" else "abandoned"] += 1

    def _work(self, speculates: bool) -> None:
        while (batch := self._next_batch(speculates)) is not None:
            self._begin(batch)

    def _begin(self, batch: _Batch) -> None:
        """Starts the reads of a batch and hands their futures to its flights."""
        futures: Sequence[ReadFuture] = ()
        error: BaseException | None = None
        try:
            futures = self._read(batch.units)
            if len(futures) != len(batch.flights):
                wanted = len(batch.flights)
                error = ValueError(f"read gave {len(futures)} futures for {wanted} units")
        except BaseException as raised:  # noqa: BLE001 - handed to whoever wants the units
            error = raised
        with self._changed:
            for place, flight in enumerate(batch.flights):
                if error is not None:
                    flight.error = error
                elif flight.tickets:
                    flight.future = futures[place]
            if error is not None:
                self._finish(batch)
            self._changed.notify_all()
        if error is None:
            ended = functools.partial(self._ended, batch)
            for future in futures:
                future.add_done_callback(ended)

    def _next_batch(self, speculates: bool) -> _Batch | None:
        with self._changed:
            while not self._closed:
                batch = None
                if self._demand:
                    batch = self._demand.popleft()
                elif speculates and self._speculation:
                    self._expire()
                    if sum(other.speculative for other in self._under_way) < self._window:
                        batch = self._speculation.popleft()
                if batch is None:
                    waiting = bool(speculates and self._speculation)
                    self._changed.wait(self._patience_s if waiting else None)
                elif self._start(batch):
                    return batch
        return None

    def _start(self, batch: _Batch) -> bool:
        """Marks a batch as under way, without the units that were released or taken by demand."""
        places = [i for i, flight in enumerate(batch.flights) if flight.batch is batch]
        if not places:
            return False
        if len(places) < len(batch.flights):
            batch.units = batch.units[places]
            batch.flights = [batch.flights[place] for place in places]
        batch.started = time.monotonic()
        if not self._under_way:
            self._busy_since = batch.started
        self._under_way.add(batch)
        self._counts["issued"] += len(places)
        self._counts["batches"] += 1
        return True

    def _ended(self, batch: _Batch, _: object) -> None:
        """One of the batch's reads ended. No lock but for the last: there are many."""
        if next(batch.ended) == len(batch.flights):
            with self._changed:
                self._finish(batch)

    def _finish(self, batch: _Batch) -> None:
        """The batch no longer counts as under way."""
        if batch.finished:
            return
        batch.finished = True
        self._under_way.discard(batch)
        if not self._under_way:
            self._counts["read_s"] += time.monotonic() - self._busy_since
        if batch.speculative:
            unwanted = sum(not flight.tickets for flight in batch.flights)
            self._held -= unwanted * self._unit_bytes
            if self._speculation:
                self._changed.notify_all()

    def _expire(self) -> None:
        oldest = time.monotonic() - self._patience_s
        for batch in [b for b in self._under_way if b.started is not None and b.started < oldest]:
            self._finish(batch)


def _started(flight: Flight) -> bool:
    return flight.batch is not None and flight.batch.started is not None


def _broken(flight: Flight) -> bool:
    """Whether a flight is known to bring nothing."""
    if flight.error is not None:
        return True
    # A future that cannot tell without being waited for counts as good until it is.
    exception = getattr(flight.future, "exception", None)
    if exception is None or flight.future is None or not flight.future.done():
        return False
    with contextlib.suppress(asyncio.CancelledError, concurrent.futures.CancelledError):
        return exception() is not None
    return True
