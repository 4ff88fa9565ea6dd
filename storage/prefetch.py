"""Units by ticket: ask early, collect when needed; the same result whatever was read ahead.

`issue` asks for units and returns at once. Demanded units are about to be used; speculative ones
are a guess, and a guess may be dropped, fail, or never return without changing what `collect`
gives. Every unit read is accounted for. A guess that was wrong stays in host memory while that has
room, for the next request.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from kvjax.storage.errors import ReadFailedError
from kvjax.storage.flights import Flight, Read
from kvjax.storage.read_counts import ReadCounts
from kvjax.storage.read_queue import ReadQueue
from kvjax.storage.tiers import Tiers
from kvjax.storage.units import UnitId, pack_units

_SHARE_FOR_SPECULATION = 0.25
"""The part of the timeout after which a demand no longer trusts a speculative read it joined."""


@dataclasses.dataclass
class _Ticket:
    ids: list[UnitId]
    units: np.ndarray  # int32 [n, 4]
    demand: bool
    hits: list[int]  # places whose unit is pinned in a tier
    rows: list[int]  # their rows in the arena
    misses: list[int]  # places of `flights`
    flights: list[Flight]


class Prefetcher:
    """Reads units of one segment through the tiers; used by one request at a time.

    Several prefetchers may share tiers. Any thread may call any method.

    Args:
      read: starts reading units, int32 [n, 4], and gives one future for each; it may be called
        from several threads. `Segment.read` is one.
      tiers: where units are kept; their shape and dtype are what a read must bring.
      segment: the segment's key, under which the tiers keep its units.
      near: rows of memory that programs read, in which units are for as long as this prefetcher
        is used; device memory's come first, as in the tiers.
      threads: threads that start reads, and speculative batches under way at once.
      max_in_flight_bytes: bound on speculation queued, under way, or read and neither collected
        nor cancelled.
      timeout_s: the longest that `collect` waits, in seconds.

    Raises:
      ValueError: an argument is out of range.
    """

    def __init__(
        self,
        read: Read,
        tiers: Tiers,
        *,
        segment: str = "",
        near: Mapping[UnitId, int] | None = None,
        threads: int = 4,
        max_in_flight_bytes: int = 64 << 20,
        timeout_s: float = 30.0,
    ) -> None:
        if not 0 < timeout_s < float("inf"):
            raise ValueError(f"timeout_s is {timeout_s}; give a number of seconds above 0")
        self._tiers = tiers
        self._segment = tiers.segment(segment)
        self._timeout_s = timeout_s
        self._near = near or {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._tickets: dict[int, _Ticket] = {}
        self._counts = ReadCounts(tiers.unit_bytes)
        self._queue = ReadQueue(
            read,
            tiers.unit_bytes,
            threads=threads,
            max_in_flight_bytes=max_in_flight_bytes,
            patience_s=timeout_s,
        )

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def issue(self, units: np.ndarray, *, demand: bool) -> int:
        """Asks for units and returns at once.

        Args:
          units: integers [n, 4]: layer group, head group, kind and page of each; n may be 0.
          demand: True if they will be collected. False is a guess: it waits behind every demand, is
            dropped if too much is under way, and need not be collected, only cancelled in the end
            (`finish_request` does). A demand for the same units joins its reads.

        Returns:
          A ticket for `collect` or `cancel`, from 1 on.

        Raises:
          ValueError: `units` is not such an array, or the prefetcher is closed.
        """
        packed = pack_units(self._segment, units)
        ids: list[UnitId] = packed.tolist()
        rows = np.array(units, np.int32)  # a copy: the caller's array may change
        if demand:
            ticket = self._demand(ids, rows)
        else:
            here = self._tiers.lookup(ids)
            places = [place for place, kept in enumerate(here) if not kept]
            flights = self._queue.join([ids[i] for i in places], rows[places], demand=False)
            ticket = _Ticket(ids, rows, False, [], [], [], [x for x in flights if x is not None])
        with self._lock:
            number = next(self._numbers)
            self._tickets[number] = ticket
        return number

    def collect(self, ticket: int) -> np.ndarray:
        """The units of a ticket: see `collect_into`.

        Returns:
          [n, *unit_shape] in the order asked, an array of the caller's own.
        """
        with self._lock:
            asked = self._tickets.get(ticket)
        size = 0 if asked is None else len(asked.ids)
        out = np.empty((size, *self._tiers.unit_shape), self._tiers.dtype)
        self.collect_into(ticket, out)
        return out

    def collect_into(self, ticket: int, out: np.ndarray) -> None:
        """Waits for the units of a ticket and copies them; the ticket is then spent, in any case.

        A speculative ticket becomes a demand. A demanded read that fails is retried once. Reads
        that come back after this returned or raised change nothing.

        Args:
          ticket: what `issue` gave.
          out: [n, *unit_shape] of the units' dtype, contiguous; filled in the order asked.

        Raises:
          ReadFailedError: units could not be read, or not within `timeout_s`; `out` is then
            undefined.
          ValueError: the ticket is unknown or spent, or `out` is of another shape, dtype or layout.
        """
        asked = self._take(ticket, out)
        try:
            if not asked.demand:
                guessed, asked = asked, self._demand(asked.ids, asked.units)
                self._queue.release(guessed.flights, demand=False)
            started = time.monotonic()
            self._await(asked, started + self._timeout_s, out)
            waited = time.monotonic() - started if asked.flights else 0.0
            places = np.array(asked.hits, np.int64)
            self._tiers.copy(np.array(asked.rows, np.int64), out, places)
        except BaseException:
            self._let_go(asked)
            raise
        self._tiers.unpin([asked.ids[place] for place in asked.hits], used=True)
        try:
            self._tiers.admit([asked.ids[place] for place in asked.misses], out, asked.misses)
        finally:  # in this order, so that another demand finds each unit in a tier or under way
            self._queue.settle(asked.flights)
        with self._lock:
            self._counts = dataclasses.replace(
                self._counts,
                needed=self._counts.needed + len(asked.ids),
                host_hits=self._counts.host_hits + len(asked.hits),
                wait_s=self._counts.wait_s + waited,
            )

    def cancel(self, ticket: int) -> None:
        """Gives a ticket up: what is queued for it alone is not read. Spent ones are let pass."""
        with self._lock:
            asked = self._tickets.pop(ticket, None)
        if asked is not None:
            self._let_go(asked)

    def touch(
        self, units: np.ndarray, mass: np.ndarray, important: np.ndarray | None = None
    ) -> None:
        """Tells the placement policy what attention units received: see `Tiers.touch`.

        Args:
          units: integers [n, 4].
          mass: float [n], at least 0.
          important: float [n], 0 to 1; all 1 if None.

        Raises:
          ValueError: an array is not such.
        """
        self._tiers.touch(pack_units(self._segment, units).tolist(), mass, important)

    def rows_near(self, units: np.ndarray) -> np.ndarray:
        """Where units are in memory that programs read.

        Args:
          units: integers [n, 4].

        Returns:
          int32 [n], the row of each, -1 where it is not there.
        """
        ids = pack_units(self._segment, units).tolist()
        return np.array([self._near.get(unit, -1) for unit in ids], np.int32)

    def took_near(self, units: np.ndarray) -> None:
        """Counts units as used that were not issued because `rows_near` has them.

        Args:
          units: integers [n, 4].
        """
        ids = pack_units(self._segment, units).tolist()
        self._tiers.used(ids)
        on_device = sum(self._near[unit] < self._tiers.device_units for unit in ids)
        with self._lock:
            self._counts = dataclasses.replace(
                self._counts,
                needed=self._counts.needed + len(ids),
                device_hits=self._counts.device_hits + on_device,
                host_hits=self._counts.host_hits + len(ids) - on_device,
            )

    def counts(self) -> ReadCounts:
        """What was counted since the last `finish_request`."""
        return self._take_counts(reset=False)

    def finish_request(self) -> ReadCounts:
        """Ends a request: cancels the tickets left, and gives its counts and starts new ones."""
        with self._lock:
            left = list(self._tickets.values())
            self._tickets.clear()
        for asked in left:
            self._let_go(asked)
        return self._take_counts(reset=True)

    def close(self) -> bool:
        """Ends the threads within `timeout_s`; the prefetcher then takes no more tickets.

        Returns:
          Whether all ended. A thread that is stuck in `read` is left behind, as a daemon.
        """
        ended = self._queue.close(self._timeout_s)
        self.finish_request()
        return ended

    def _demand(self, ids: list[UnitId], units: np.ndarray) -> _Ticket:
        rows = self._tiers.pin(ids)
        hits = [place for place, row in enumerate(rows) if row >= 0]
        misses = [place for place, row in enumerate(rows) if row < 0]
        try:
            flights = self._queue.join([ids[i] for i in misses], units[misses], demand=True)
        except BaseException:
            self._tiers.unpin([ids[place] for place in hits])
            raise
        wanted = [flight for flight in flights if flight is not None]
        return _Ticket(ids, units, True, hits, [rows[place] for place in hits], misses, wanted)

    def _take(self, ticket: int, out: np.ndarray) -> _Ticket:
        with self._lock:
            asked = self._tickets.get(ticket)
            if asked is None:
                raise ValueError(f"ticket {ticket} is unknown, collected or cancelled")
            shape, dtype = (len(asked.ids), *self._tiers.unit_shape), self._tiers.dtype
            fits = out.shape == shape and out.dtype == dtype
            if not (fits and out.flags.c_contiguous and out.flags.writeable):
                raise ValueError(
                    f"out is {out.dtype}{list(out.shape)}, strides {list(out.strides)}; ticket "
                    f"{ticket} needs {dtype}{list(shape)}, contiguous and writeable"
                )
            return self._tickets.pop(ticket)

    def _await(self, asked: _Ticket, deadline: float, out: np.ndarray) -> None:
        """Fills the places of `out` that no tier had."""
        pending: Sequence[int] = range(len(asked.flights))
        retried: set[int] = set()
        trust_s = self._timeout_s * _SHARE_FOR_SPECULATION
        while pending:
            lost, errors = [], []
            flights = [asked.flights[index] for index in pending]
            for index, brought in zip(
                pending, self._queue.wait(flights, deadline, trust_s), strict=True
            ):
                if self._fits(brought):
                    out[asked.misses[index]] = brought
                    continue
                if not isinstance(brought, BaseException):
                    wanted = f"{self._tiers.dtype}{list(self._tiers.unit_shape)}"
                    found = np.asarray(brought)
                    brought = ValueError(f"read: {found.dtype}{list(found.shape)}, not {wanted}")
                lost.append(index)
                errors.append(brought)
            ended = self._queue.closed or time.monotonic() >= deadline
            hopeless = [i for i, index in enumerate(lost) if ended or index in retried]
            if hopeless:
                error = errors[hopeless[0]]
                missing = asked.units[[asked.misses[lost[i]] for i in hopeless]]
                late = "closed" if self._queue.closed else "timeout"
                reason = late if isinstance(error, TimeoutError) else "error"
                raise ReadFailedError(reason, missing, str(error) or repr(error)) from error
            if lost:
                retried.update(index for index in lost if not asked.flights[index].speculative)
                rows = asked.units[[asked.misses[index] for index in lost]]
                fresh = self._queue.retry([asked.flights[index] for index in lost], rows)
                for index, flight in zip(lost, fresh, strict=True):
                    asked.flights[index] = flight
            pending = lost

    def _let_go(self, asked: _Ticket) -> None:
        self._tiers.unpin([asked.ids[place] for place in asked.hits])
        for unit, future in self._queue.release(asked.flights, demand=asked.demand):
            if future.done():  # what is still under way may come back to nobody
                with contextlib.suppress(Exception, asyncio.CancelledError):  # nobody needed it
                    if self._fits(unused := future.result(0)):
                        self._tiers.keep(unit, unused)

    def _fits(self, brought: Any) -> bool:
        """Whether a read brought a unit."""
        fits = isinstance(brought, np.ndarray) and brought.shape == self._tiers.unit_shape
        return bool(fits and brought.dtype == self._tiers.dtype)

    def _take_counts(self, *, reset: bool) -> ReadCounts:
        read = self._queue.take_counts(reset=reset)
        with self._lock:
            counts = self._counts
            if reset:
                self._counts = ReadCounts(self._tiers.unit_bytes)
        seconds = read.pop("read_s")
        whole = {name: int(number) for name, number in read.items()}
        return dataclasses.replace(counts, **whole, read_s=seconds)
