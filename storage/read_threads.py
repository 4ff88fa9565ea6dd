"""Threads that start reads: demand first, speculation within a window.

They only start them. Nobody waits in these threads, so a read that never returns holds up no other.
"""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvjax.storage.flights import Batch, Read, ReadFuture


class ReadThreads:
    """Starts batches of reads in threads of its own.

    Args:
      read: starts reading units and gives their futures. It is called from several threads.
      lock: guards this object, flights and batches. Where a method says "locked", it is held.
      threads: threads for any read, and as many speculative batches under way at once; one more
        thread starts nothing but demanded reads, so that a speculative one cannot hold them up.
      patience_s: seconds after which a batch under way no longer counts.
      finished: called, locked, when a batch is no longer under way.

    Raises:
      ValueError: `threads` is below 1.
    """

    def __init__(
        self,
        read: Read,
        lock: threading.Lock,
        *,
        threads: int,
        patience_s: float,
        finished: Callable[[Batch], None],
    ) -> None:
        if threads < 1:
            raise ValueError(f"threads is {threads}: at least 1 is needed to start reads")
        self.closed = False
        self._read = read
        self._lock = lock
        self._window = threads
        self._patience_s = patience_s
        self._finished = finished
        self._begun = threading.Condition(lock)  # reads were started
        # Batches were queued, for the threads that read anything and the one for demand.
        self._queued = threading.Condition(lock), threading.Condition(lock)
        self._demand: deque[Batch] = deque()
        self._speculation: deque[Batch] = deque()
        self._under_way: set[Batch] = set()
        self._busy_since = 0.0
        self._started = 0  # units
        self._batches = 0
        self._busy_s = 0.0
        self._threads = [
            threading.Thread(
                target=self._work, args=(place < threads,), name=f"kvjax-read-{place}", daemon=True
            )
            for place in range(threads + 1)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, batch: Batch) -> None:
        """Queues a batch; locked."""
        (self._speculation if batch.speculative else self._demand).append(batch)
        self._queued[0].notify()
        if not batch.speculative:
            self._queued[1].notify()

    def wait_for_begin(self, begun: Callable[[], bool], deadline: float) -> None:
        """Waits, locked, until `begun()` or the deadline, in seconds of `time.monotonic`."""
        while not (begun() or self.closed):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._begun.wait(left)

    def expire(self) -> None:
        """Gives up, locked, on batches that are under way for too long."""
        oldest = time.monotonic() - self._patience_s
        for batch in [b for b in self._under_way if b.started is not None and b.started < oldest]:
            self._finish(batch)

    def take_counts(self, *, reset: bool) -> dict[str, float]:
        """Units and batches started, and seconds with any under way; locked."""
        if self._under_way:
            now = time.monotonic()
            self._busy_s += now - self._busy_since
            self._busy_since = now
        counts = {"issued": self._started, "batches": self._batches, "read_s": self._busy_s}
        if reset:
            self._started = self._batches = 0
            self._busy_s = 0.0
        return counts

    def close(self, timeout_s: float) -> bool:
        """Ends the threads. Reads under way are left alone, queued ones are not started.

        Returns:
          Whether all threads ended; one that is stuck in `read` is left behind as a daemon.
        """
        with self._lock:
            self.closed = True
            self._demand.clear()
            self._speculation.clear()
            for condition in (self._begun, *self._queued):
                condition.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, speculates: bool) -> None:
        while (batch := self._next_batch(speculates)) is not None:
            self._begin(batch)

    def _next_batch(self, speculates: bool) -> Batch | None:
        with self._lock:
            while not self.closed:
                batch = None
                if self._demand:
                    batch = self._demand.popleft()
                elif speculates and self._speculation:
                    self.expire()
                    if sum(other.speculative for other in self._under_way) < self._window:
                        batch = self._speculation.popleft()
                if batch is None:
                    waiting = bool(speculates and self._speculation)
                    self._queued[not speculates].wait(self._patience_s if waiting else None)
                elif self._start(batch):
                    return batch
        return None

    def _start(self, batch: Batch) -> bool:
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
        self._started += len(places)
        self._batches += 1
        return True

    def _begin(self, batch: Batch) -> None:
        """Starts the reads of a batch and hands their futures to its flights."""
        futures: Sequence[ReadFuture] = ()
        error: BaseException | None = None
        try:
            futures = self._read(batch.units)
            if len(futures) != len(batch.flights):
                wanted = len(batch.flights)
                raise ValueError(f"read gave {len(futures)} futures for {wanted} units")
            ended = functools.partial(self._ended, batch)
            for future in futures:
                future.add_done_callback(ended)
        except BaseException as raised:  # noqa: BLE001 - handed to whoever wants the units
            error = raised
        with self._lock:
            for place, flight in enumerate(batch.flights):
                if error is not None:
                    flight.error = error
                elif not flight.retired:
                    flight.future = futures[place]
            if error is not None:
                self._finish(batch)
            self._begun.notify_all()

    def _ended(self, batch: Batch, _: object) -> None:
        """One of the batch's reads ended. No lock but for the last: there are many."""
        if next(batch.ended) == len(batch.flights):
            with self._lock:
                self._finish(batch)

    def _finish(self, batch: Batch) -> None:
        """The batch no longer counts as under way."""
        if batch.finished:
            return
        batch.finished = True
        self._under_way.discard(batch)
        if not self._under_way:
            self._busy_s += time.monotonic() - self._busy_since
        self._finished(batch)
        if batch.speculative:
            self._queued[0].notify()
