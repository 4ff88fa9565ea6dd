"""A store of numbers that a test controls: when a read returns, what it brings, how it fails."""

import concurrent.futures
import threading

import numpy as np

SHAPE = (1, 1, 2, 4, 8)
DTYPE = np.dtype(np.float32)
UNIT_BYTES = 256


def contents(units):
    """What the store holds: every unit is filled with a number made of its name."""
    units = np.asarray(units, np.int64).reshape(-1, 4)
    numbers = units @ np.array([100_000, 10_000, 5_000, 1]) + 1
    return np.broadcast_to(numbers.reshape(-1, *[1] * len(SHAPE)), (len(units), *SHAPE)).astype(
        DTYPE
    )


def rows(*names):
    """Units by (layer, head, page), kind 0."""
    return np.array([(layer, head, 0, page) for layer, head, page in names], np.int32).reshape(
        -1, 4
    )


def pages(*numbers, layer=0):
    return rows(*((layer, 0, number) for number in numbers))


class FakeReader:
    """Reads at once, unless units are held back or told to fail.

    `calls` has the units of each read as they came; nothing else is changed by reading.
    """

    def __init__(self):
        self.calls = []
        self.lock = threading.Condition()
        self.held = set()  # pages whose reads stay open until `let_go`
        self.hold_all = False
        self.faults = {}  # page -> what its next reads do: raise, bring an array, or "hold" back
        self.raises = []  # what the next calls of read raise, None for nothing
        self.open = []  # (unit, future) of reads held back

    def __call__(self, units):
        with self.lock:
            self.calls.append(np.array(units))
            fault = self.raises.pop(0) if self.raises else None
            futures = [self._start(unit) for unit in units] if fault is None else []
            self.lock.notify_all()
        if fault is not None:
            raise fault
        return futures

    def _start(self, unit):
        future = concurrent.futures.Future()
        page = int(unit[3])
        fault = self.faults[page].pop(0) if self.faults.get(page) else None
        if isinstance(fault, BaseException):
            future.set_exception(fault)
        elif isinstance(fault, str) or self.hold_all or page in self.held:
            self.open.append((unit.copy(), future))
        elif fault is not None:
            future.set_result(fault)
        else:
            future.set_result(contents(unit)[0])
        return future

    def let_go(self, order=None):
        """Ends the reads held back, in the order they began or a permutation of it."""
        with self.lock:
            self.hold_all = False
            self.held.clear()
            waiting, self.open = self.open, []
        for place in range(len(waiting)) if order is None else order:
            unit, future = waiting[place]
            future.set_result(contents(unit)[0])

    def wait_for_calls(self, number, timeout=10.0):
        """Waits until `read` was called that often; gives the calls."""
        with self.lock:
            assert self.lock.wait_for(lambda: len(self.calls) >= number, timeout), self.calls
            return list(self.calls)

    @property
    def read_units(self):
        """All units read, [n, 4], in the order they were asked for."""
        with self.lock:
            return np.concatenate(self.calls) if self.calls else np.zeros((0, 4), np.int32)

    @property
    def read_bytes(self):
        return len(self.read_units) * UNIT_BYTES
