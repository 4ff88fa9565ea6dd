"""Reads of units on their way: demand first, each unit once, speculation within bounds.

Threads only start reads; nobody waits in them, so a read that never returns holds up no other. Who
wants a unit waits for its future.
"""

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from kvjax.storage.flights import Batch, Flight, Read, ReadFuture
from kvjax.storage.read_threads import ReadThreads
from kvjax.storage.units import UnitId

_SPECULATIVE_BATCH_BYTES = 1 << 18
"""What a demand may find in its way, times the threads: short against a read's own time."""

_OUTCOMES = ("prefetched", "demanded", "shared", "wasted", "abandoned", "failed")


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
        if max_in_flight_bytes < 0:
            raise ValueError(
                f"max_in_flight_bytes is {max_in_flight_bytes}; 0 means no speculation"
            )
        self._unit_bytes = unit_bytes
        self._max_in_flight_bytes = max_in_flight_bytes
        self._lock = threading.Lock()  # guards everything below, flights and batches too
        self._flights: dict[UnitId, Flight] = {}
        self._held = 0  # bytes of speculation
        self._counts = dict.fromkeys((*_OUTCOMES, "dropped", "retried"), 0)
        self._threads = ReadThreads(
            read, self._lock, threads=threads, patience_s=patience_s, finished=self._finished
        )

    def take_counts(self, *, reset: bool) -> dict[str, float]:
        """Units issued, and what became of them, since the last reset."""
        with self._lock:
            counts = {**self._counts, **self._threads.take_counts(reset=reset)}
            if reset:
                self._counts = dict.fromkeys(self._counts, 0)
        return counts

    @property
    def closed(self) -> bool:
        """Whether no more reads are started."""
        return self._threads.closed

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
        with self._lock:
            self._threads.expire()
            return self._join(ids, units, demand)

    def retry(self, lost: Sequence[Flight], units: np.ndarray) -> list[Flight]:
        """Demands units anew whose flights failed or are late, and releases those."""
        with self._lock:
            for flight in lost:
                if self._flights.get(flight.unit) is flight:
                    del self._flights[flight.unit]
                current = self._flights.get(flight.unit)
                if current is not None and current.speculative:
                    del self._flights[flight.unit]
                self._end(flight, "failed")
            self._counts["retried"] += len(lost)
            fresh = self._join([flight.unit for flight in lost], units, demand=True)
            self._release(lost, guess=False)
        return [flight for flight in fresh if flight is not None]

    def wait(self, flights: Sequence[Flight], deadline: float, trust_s: float) -> list[Any]:
        """Waits for units.

        Args:
          flights: what `join` gave.
          deadline: until when, in seconds of `time.monotonic`.
          trust_s: seconds from its start for which a speculative read is waited for.

        Returns:
          For each flight what its read brought, or the exception it raised; a `TimeoutError` where
          it is late.
        """
        brought = []
        for flight in flights:
            future = flight.future
            if future is None and (future := self._begin_of(flight, deadline)) is None:
                late = TimeoutError("the read was not started in time")
                brought.append(late if flight.error is None else flight.error)
                continue
            until = deadline
            if flight.speculative and flight.batch is not None and flight.batch.started is not None:
                until = min(deadline, flight.batch.started + trust_s)
            try:
                brought.append(future.result(max(0.0, until - time.monotonic())))
            except TimeoutError as error:
                late = TimeoutError("the read did not return in time")
                brought.append(error if str(error) else late)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - for the caller
                flight.error = error  # nobody else needs to wait for it
                brought.append(error)
        return brought

    def settle(self, flights: Sequence[Flight]) -> None:
        """Counts and releases flights whose units a request took."""
        ahead = demanded = shared = 0
        with self._lock:
            for flight in flights:
                if flight.outcome is not None:
                    shared += 1
                elif flight.speculative:
                    ahead += 1
                else:
                    demanded += 1
                flight.outcome = flight.outcome or "used"
            self._counts["prefetched"] += ahead
            self._counts["demanded"] += demanded
            self._counts["shared"] += shared
            self._release(flights, guess=False)

    def release(
        self, flights: Sequence[Flight], *, demand: bool
    ) -> list[tuple[UnitId, ReadFuture]]:
        """Gives flights back unused. Queued reads that nobody else asked for are not started.

        Args:
          flights: what `join` gave.
          demand: as it was given to `join`.

        Returns:
          The reads that were started and that nobody will use any more.
        """
        with self._lock:
            return self._release(flights, guess=not demand)

    def close(self, timeout_s: float) -> bool:
        """Ends the threads. Reads under way are left alone, queued ones are not started.

        Returns:
          Whether all threads ended; one that is stuck in `read` is left behind as a daemon.
        """
        return self._threads.close(timeout_s)

    def _begin_of(self, flight: Flight, deadline: float) -> ReadFuture | None:
        """Waits until a flight's read is started; None if it is not in time, or cannot be."""
        with self._lock:
            self._threads.wait_for_begin(
                lambda: flight.future is not None or flight.error is not None, deadline
            )
            return flight.future

    def _join(self, ids: Sequence[UnitId], units: np.ndarray, demand: bool) -> list[Flight | None]:
        if self._threads.closed:
            raise ValueError("the prefetcher is closed: make a new one")
        flights: list[Flight | None] = []
        queued: list[int] = []
        known = self._flights.get
        for place, unit in enumerate(ids):
            flight = known(unit)
            if flight is not None and not flight.broken:
                flight.tickets += 1
                flight.guesses += not demand
                if demand and flight.speculative and not flight.started:
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
        for first in range(0, len(queued), max(1, size)):
            places = queued[first : first + size]
            members = [flight for place in places if (flight := flights[place]) is not None]
            batch = Batch(members, units[places], speculative=not demand)
            for flight in members:
                flight.batch = batch
            self._threads.submit(batch)
        return flights

    def _release(
        self, flights: Sequence[Flight], *, guess: bool
    ) -> list[tuple[UnitId, ReadFuture]]:
        unused = []
        for flight in flights:
            flight.tickets -= 1
            flight.guesses -= guess
            # What was taken is kept for nobody who only guessed that it might be.
            if not flight.tickets or (flight.outcome and flight.tickets == flight.guesses):
                future = self._retire(flight)
                if future is not None:
                    unused.append((flight.unit, future))
        return unused

    def _retire(self, flight: Flight) -> ReadFuture | None:
        """Nobody will collect a flight; gives its read, if that was for nothing."""
        if flight.retired:
            return None
        flight.retired = True
        if self._flights.get(flight.unit) is flight:
            del self._flights[flight.unit]
        if not flight.started:
            flight.batch = None
            self._held -= self._unit_bytes if flight.speculative else 0
            return None
        unused = None
        if flight.outcome is None:
            broken = flight.broken
            self._end(flight, "failed" if broken else "unused")
            unused = None if broken else flight.future
        flight.future = None
        if flight.speculative and flight.batch is not None and flight.batch.finished:
            self._held -= self._unit_bytes
        return unused

    def _end(self, flight: Flight, outcome: Literal["used", "failed", "unused"]) -> None:
        """Counts what became of a started read, once."""
        if flight.outcome is not None or not flight.started:
            return
        flight.outcome = outcome
        if outcome == "failed":
            self._counts["failed"] += 1
        elif flight.speculative:
            self._counts["prefetched" if outcome == "used" else "wasted"] += 1
        else:
            self._counts["demanded" if outcome == "used" else "abandoned"] += 1

    def _finished(self, batch: Batch) -> None:
        if batch.speculative:
            self._held -= self._unit_bytes * sum(flight.retired for flight in batch.flights)
