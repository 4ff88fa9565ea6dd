"""Reads that are late, fail, or never return: bounded waits, and never a wrong result."""

import concurrent.futures
import threading
import time

import numpy as np
import pytest
import tensorstore as ts

from kvjax.storage.errors import ReadFailedError
from kvjax.storage.prefetch import Prefetcher
from kvjax.storage.tiers import Tiers
from tests.storage.fake_reader import DTYPE, SHAPE, UNIT_BYTES, contents, pages
from tests.storage.test_prefetch import BATCH, check_sums, read_by, until


def collect(prefetcher, units):
    return prefetcher.collect(prefetcher.issue(units, demand=True))


def test_a_read_that_does_not_return_is_waited_for_no_longer_than_the_timeout(make, reader):
    prefetcher = make(host_units=4, timeout_s=0.3)
    collect(prefetcher, pages(1))
    reader.held = {2}
    ticket = prefetcher.issue(pages(1, 2, 3), demand=True)
    out = np.full((3, *SHAPE), -1, DTYPE)
    begun = time.monotonic()
    with pytest.raises(ReadFailedError, match="timeout") as caught:
        prefetcher.collect_into(ticket, out)
    assert 0.25 < time.monotonic() - begun < 3
    assert caught.value.reason == "timeout"
    assert caught.value.units.tolist() == pages(2).tolist()
    with pytest.raises(ValueError, match="unknown, collected"):
        prefetcher.collect(ticket)

    late = out.copy()
    before = prefetcher.finish_request(), prefetcher._tiers.counts()
    check_sums(before[0], reader)
    assert before[0].host_hits == 0  # of this ticket: nothing was handed out
    reader.let_go()
    np.testing.assert_array_equal(out, late)
    assert prefetcher._tiers.counts() == before[1]
    assert prefetcher.finish_request().issued == 0
    np.testing.assert_array_equal(collect(prefetcher, pages(1, 2, 3)), contents(pages(1, 2, 3)))


def test_a_read_that_is_not_even_started_is_waited_for_no_longer(make, reader):
    leave = threading.Event()

    def stuck(units):
        leave.wait(20)
        return reader(units)

    prefetcher = make(read=stuck, threads=1, timeout_s=0.3)
    tickets = [prefetcher.issue(pages(page), demand=True) for page in range(4)]
    for ticket in tickets:
        begun = time.monotonic()
        with pytest.raises(ReadFailedError, match="timeout"):
            prefetcher.collect(ticket)
        assert time.monotonic() - begun < 3
    begun = time.monotonic()
    assert not prefetcher.close()  # a thread is stuck in `read`
    assert time.monotonic() - begun < 3
    leave.set()


def test_a_demand_that_fails_is_retried_once(make, reader):
    prefetcher = make()
    reader.faults = {2: [OSError("once")], 3: [OSError("once")]}
    np.testing.assert_array_equal(collect(prefetcher, pages(1, 2, 3)), contents(pages(1, 2, 3)))
    assert [read_by(reader, call) for call in range(2)] == [[1, 2, 3], [2, 3]]
    counts = prefetcher.finish_request()
    assert (counts.demanded, counts.failed, counts.retried) == (3, 2, 2)
    check_sums(counts, reader)


def test_a_read_that_fails_twice_is_an_error_of_that_ticket_only(make, reader):
    prefetcher = make(host_units=9)
    collect(prefetcher, pages(9))
    reader.faults[2] = [OSError("bad sector"), OSError("bad sector again")]
    bad = prefetcher.issue(pages(9, 1, 2, 3), demand=True)
    good = prefetcher.issue(pages(4, 5), demand=True)
    with pytest.raises(ReadFailedError, match="bad sector again") as caught:
        prefetcher.collect(bad)
    assert caught.value.reason == "error"
    assert caught.value.units.tolist() == pages(2).tolist()
    assert isinstance(caught.value.__cause__, OSError)
    np.testing.assert_array_equal(prefetcher.collect(good), contents(pages(4, 5)))
    units = pages(9, 1, 2, 3)
    np.testing.assert_array_equal(collect(prefetcher, units), contents(units))
    counts = prefetcher.finish_request()
    assert (counts.failed, counts.abandoned) == (2, 2)
    check_sums(counts, reader)
    assert prefetcher._tiers._pins == {}


@pytest.mark.parametrize(
    "brought",
    [np.zeros((1, 1, 2, 4, 7), DTYPE), np.zeros(SHAPE, np.float64), np.zeros((), DTYPE), 3.0],
)
def test_what_a_read_brings_is_checked(make, reader, brought):
    """An array of another shape would be broadcast, one of another dtype cast."""
    prefetcher = make()
    for times in (1, 2):
        reader.faults[2] = [brought] * times
        if times == 1:
            np.testing.assert_array_equal(collect(prefetcher, pages(2)), contents(pages(2)))
        else:
            with pytest.raises(ReadFailedError, match="error"):
                collect(prefetcher, pages(2))
    check_sums(prefetcher.finish_request(), reader)


@pytest.mark.parametrize("fault", [OSError("gone"), ValueError("no"), KeyboardInterrupt()])
def test_a_reader_that_raises_fails_that_read_and_no_thread(make, reader, fault):
    prefetcher = make(threads=1)
    threads = threading.active_count()
    reader.raises = [fault]
    np.testing.assert_array_equal(collect(prefetcher, pages(1)), contents(pages(1)))
    reader.raises = [fault, fault]
    with pytest.raises(ReadFailedError):
        collect(prefetcher, pages(2))
    for page in range(10):
        reader.raises = [fault]
        prefetcher.issue(pages(page), demand=False)
        until(lambda: not reader.raises)
    np.testing.assert_array_equal(collect(prefetcher, pages(2)), contents(pages(2)))
    assert threading.active_count() == threads
    check_sums(prefetcher.finish_request(), reader)


def test_a_reader_that_gives_too_few_futures(make, reader):
    prefetcher = make(read=lambda units: reader(units)[1:])
    with pytest.raises(ReadFailedError, match="2 futures for 3 units"):
        collect(prefetcher, pages(1, 2, 3))


def test_a_reader_whose_futures_cannot_be_watched(make, reader):
    """Neither is that the end of a thread."""

    class Bare:
        def done(self):
            return True

        def result(self, timeout=None):
            return 0

    prefetcher = make(read=lambda units: [Bare() for _ in units])
    for _ in range(10):
        with pytest.raises(ReadFailedError, match="add_done_callback"):
            collect(prefetcher, pages(1))


def test_parts_of_a_guess_do_not_wait_for_one_that_is_stuck(make, reader):
    leave = threading.Event()

    def stuck(units):
        futures = reader(units)
        if units[0, 3] == 0:
            leave.wait(20)
        return futures

    prefetcher = make(read=stuck, threads=2)
    prefetcher.issue(pages(*range(2 * BATCH)), demand=False)
    assert sorted(call[0, 3] for call in reader.wait_for_calls(2)) == [0, BATCH]
    leave.set()


FAULTS = {
    "raises": [OSError("bad")],
    "never returns": ["hold"],
    "brings another shape": [np.zeros((2, 2), DTYPE)],
    "is cancelled": [concurrent.futures.CancelledError()],
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("joined", ["under way", "after", "as its own ticket"])
@pytest.mark.parametrize("fails_again", [False, True])
def test_a_fault_in_speculation_changes_no_result(make, reader, fault, joined, fails_again):
    """Nor does it use up the one retry of a demand."""
    prefetcher = make(host_units=2, timeout_s=0.8)
    reader.faults = {2: [*FAULTS[fault]], 3: [*FAULTS[fault]]}
    if fails_again:
        reader.faults[2].append(OSError("the demand fails as well"))
    guess = prefetcher.issue(pages(1, 2, 3), demand=False)
    reader.wait_for_calls(1)
    if joined == "after":
        time.sleep(0.02)
    units = pages(3, 1, 2, 5)
    if joined == "as its own ticket":
        np.testing.assert_array_equal(prefetcher.collect(guess), contents(pages(1, 2, 3)))
    np.testing.assert_array_equal(collect(prefetcher, units), contents(units))
    check_sums(prefetcher.finish_request(), reader)
    reader.let_go()
    until(lambda: prefetcher._queue._held == 0)
    if joined != "as its own ticket":
        assert reader.read_units[:, 3].tolist().count(1) == 1


def test_failed_speculation_is_forgotten_and_counted(make, reader):
    prefetcher = make()
    reader.faults[2] = [OSError("bad")]
    guess = prefetcher.issue(pages(1, 2), demand=False)
    until(lambda: prefetcher._queue.take_counts(reset=False)["read_s"] > 0)
    prefetcher.cancel(guess)
    counts = prefetcher.finish_request()
    assert (counts.failed, counts.wasted, counts.retried) == (1, 1, 0)
    check_sums(counts, reader)


def test_speculation_that_never_returns_does_not_end_speculation(make, reader):
    """What is under way for longer than the timeout no longer counts."""
    prefetcher = make(threads=1, max_in_flight_bytes=4 * UNIT_BYTES, timeout_s=0.2)
    reader.held = {1, 2}
    prefetcher.issue(pages(1, 2), demand=False)
    reader.wait_for_calls(1)
    prefetcher.finish_request()
    time.sleep(0.3)
    guess = prefetcher.issue(pages(3, 4, 5, 6), demand=False)
    reader.wait_for_calls(2)
    assert prefetcher.counts().dropped == 0
    np.testing.assert_array_equal(prefetcher.collect(guess), contents(pages(3, 4, 5, 6)))
    reader.let_go()
    assert prefetcher._queue._held == 0


def test_a_read_that_is_late_reaches_no_unit_of_others(make, reader):
    """It comes back when its ticket is gone and its unit was read anew, evicted, read again."""
    prefetcher = make(host_units=1, timeout_s=0.2)
    reader.faults[2] = ["hold"]
    with pytest.raises(ReadFailedError):
        collect(prefetcher, pages(2))
    for page in (2, 3, 2, 4):
        np.testing.assert_array_equal(collect(prefetcher, pages(page)), contents(pages(page)))
    before = prefetcher._tiers.counts()
    ((_, late),) = reader.open
    late.set_result(np.full(SHAPE, -1, DTYPE))
    reader.open = []
    assert prefetcher._tiers.counts() == before
    for page in (4, 2):
        np.testing.assert_array_equal(collect(prefetcher, pages(page)), contents(pages(page)))


def test_close_ends_threads_and_tickets(make, reader):
    before = threading.active_count()
    for _ in range(20):
        reader.held = {1}
        prefetcher = make(threads=2)
        prefetcher.issue(pages(1), demand=False)
        demanded = prefetcher.issue(pages(1, 2), demand=True)
        begun = time.monotonic()
        assert prefetcher.close()
        assert prefetcher.close()
        assert time.monotonic() - begun < 5
        with pytest.raises(ValueError, match="unknown"):
            prefetcher.collect(demanded)
        with pytest.raises(ValueError, match="closed"):
            prefetcher.issue(pages(2), demand=True)
        reader.let_go()
    assert threading.active_count() == before


def test_closing_ends_the_wait_of_another_thread(make, reader):
    leave = threading.Event()

    def stuck(units):
        leave.wait(20)
        return reader(units)

    prefetcher = make(read=stuck, threads=1, timeout_s=5.0)
    for page in range(2):
        prefetcher.issue(pages(page), demand=True)
    ticket = prefetcher.issue(pages(9), demand=True)  # behind what is stuck
    closer = threading.Timer(0.2, prefetcher.close)
    closer.start()
    begun = time.monotonic()
    with pytest.raises(ReadFailedError, match="closed") as caught:
        prefetcher.collect(ticket)
    assert time.monotonic() - begun < 3
    assert caught.value.reason == "closed"
    leave.set()
    closer.join()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threads": 0}, "threads is 0"),
        ({"max_in_flight_bytes": -1}, "max_in_flight_bytes is -1"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"timeout_s": float("inf")}, "timeout_s is inf"),
        ({"timeout_s": float("nan")}, "timeout_s is nan"),
    ],
)
def test_settings_out_of_range_are_refused(make, settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_futures_of_tensorstore():
    """Promises kept, broken and cancelled, in place of a store."""
    waiting = []

    def read(units):
        promises = [ts.Promise.new() for _ in units]
        waiting.extend((unit, *pair) for unit, pair in zip(units, promises, strict=True))
        return [future for _, future in promises]

    def end():
        until(lambda: len(waiting) == 3)
        for unit, promise, future in waiting[:3]:
            if unit[3] == 1:
                promise.set_exception(OSError("broken"))
            elif unit[3] == 2:
                future.cancel()
            else:
                promise.set_result(contents(unit)[0])
        until(lambda: len(waiting) == 5)
        for unit, promise, _ in waiting[3:]:
            promise.set_result(contents(unit)[0])

    ender = threading.Thread(target=end)
    ender.start()
    tiers = Tiers(0, SHAPE, DTYPE)
    with Prefetcher(read, tiers, timeout_s=10.0) as prefetcher:
        np.testing.assert_array_equal(collect(prefetcher, pages(1, 2, 3)), contents(pages(1, 2, 3)))
        check_sums(prefetcher.finish_request())
    ender.join()
