"""Tickets: order, sharing, bounds, and an account of every byte."""

import gc
import random
import threading
import time
import weakref

import jax
import numpy as np
import pytest

from kvjax.storage.flights import Batch, Flight
from kvjax.storage.placement import AttentionFrequency, ImpressScore, Lfu, Lru
from kvjax.storage.read_counts import ReadCounts
from tests.storage.fake_reader import DTYPE, SHAPE, UNIT_BYTES, contents, pages, rows

BATCH = (1 << 18) // UNIT_BYTES  # units that speculation reads at once


def check_sums(counts, reader=None):
    """What `ReadCounts` promises when nothing is under way, to the byte."""
    taken = counts.prefetched + counts.demanded + counts.shared
    assert counts.needed == counts.device_hits + counts.host_hits + taken
    used = counts.prefetched + counts.demanded
    assert counts.issued == used + counts.wasted + counts.abandoned + counts.failed
    assert counts.misses == taken
    if reader is not None:
        assert counts.read_bytes == reader.read_bytes
        assert counts.batches == len(reader.calls)


def read_by(reader, number):
    """The pages of one call of the reader."""
    return reader.calls[number][:, 3].tolist()


def until(condition, timeout_s=10.0):
    """Waits for what a thread is about to do."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


def wait_for_begin(prefetcher, number):
    """Waits until so many reads that nobody has collected are started."""
    flights = prefetcher._queue._flights
    until(lambda: [flight.future is not None for flight in [*flights.values()]] == [True] * number)


def test_collects_in_the_order_asked(make):
    prefetcher = make()
    units = rows((2, 1, 7), (0, 0, 3), (2, 0, 7), (0, 0, 3))
    result = prefetcher.collect(prefetcher.issue(units, demand=True))
    np.testing.assert_array_equal(result, contents(units))
    assert result.dtype == DTYPE


def test_reads_that_end_in_any_order_land_where_they_were_asked_for(make, reader):
    prefetcher = make(host_units=8)
    prefetcher.collect(prefetcher.issue(pages(4, 9), demand=True))  # some are hits
    reader.hold_all = True
    units = pages(8, 4, 0, 5, 9, 2)
    ticket = prefetcher.issue(units, demand=True)
    until(lambda: len(reader.open) == 4)
    reader.let_go(order=[2, 0, 3, 1])
    np.testing.assert_array_equal(prefetcher.collect(ticket), contents(units))


def test_a_second_request_is_served_by_the_host(make, reader):
    prefetcher = make(host_units=8)
    for expected_hits in (0, 3):
        ticket = prefetcher.issue(pages(4, 2, 9), demand=True)
        np.testing.assert_array_equal(prefetcher.collect(ticket), contents(pages(4, 2, 9)))
        counts = prefetcher.finish_request()
        assert (counts.needed, counts.host_hits) == (3, expected_hits)
        check_sums(counts)
    assert reader.read_bytes == 3 * UNIT_BYTES


def test_demand_overtakes_queued_speculation(make, reader):
    prefetcher = make(threads=1)
    reader.hold_all = True
    prefetcher.issue(pages(0), demand=False)
    reader.wait_for_calls(1)  # the one batch that may be under way
    for first in (10, 20, 30):
        prefetcher.issue(pages(first, first + 1), demand=False)
    wanted = prefetcher.issue(pages(40, 41), demand=True)
    reader.wait_for_calls(2)
    assert read_by(reader, 1) == [40, 41]
    reader.let_go()
    np.testing.assert_array_equal(prefetcher.collect(wanted), contents(pages(40, 41)))
    reader.wait_for_calls(5)
    assert [read_by(reader, call) for call in (2, 3, 4)] == [[10, 11], [20, 21], [30, 31]]
    check_sums(prefetcher.finish_request(), reader)


def test_a_thread_that_may_do_either_starts_demand_first(make, reader):
    leave = {page: threading.Event() for page in (0, 1)}

    def stuck(units):
        futures = reader(units)
        if int(units[0, 3]) in leave:
            leave[int(units[0, 3])].wait(20)
        return futures

    prefetcher = make(read=stuck, threads=1)
    prefetcher.issue(pages(0), demand=False)
    reader.wait_for_calls(1)
    prefetcher.issue(pages(1), demand=True)  # for the thread that is left
    reader.wait_for_calls(2)
    prefetcher.issue(pages(10), demand=False)
    prefetcher.issue(pages(11), demand=True)
    leave[0].set()
    reader.wait_for_calls(4)
    assert [read_by(reader, call) for call in (2, 3)] == [[11], [10]]
    leave[1].set()


def test_a_large_guess_is_read_in_parts_that_demand_gets_between(make, reader):
    prefetcher = make(threads=1)
    reader.hold_all = True
    prefetcher.issue(pages(*range(2 * BATCH + 3)), demand=False)
    reader.wait_for_calls(1)
    ticket = prefetcher.issue(pages(9999), demand=True)
    reader.wait_for_calls(2)
    reader.let_go()
    prefetcher.collect(ticket)
    reader.wait_for_calls(4)
    assert [len(call) for call in reader.calls] == [BATCH, 1, BATCH, 3]


def test_a_unit_under_way_is_read_once_however_many_ask(make, reader):
    prefetcher = make()
    reader.hold_all = True
    tickets = [prefetcher.issue(pages(1, 2), demand=False)]
    reader.wait_for_calls(1)
    tickets += [prefetcher.issue(pages(2, 1), demand=demand) for demand in (True, False, True)]
    reader.let_go()
    for ticket in tickets:
        prefetcher.collect(ticket)
    assert len(reader.read_units) == 2
    counts = prefetcher.finish_request()
    assert (counts.needed, counts.prefetched, counts.shared, counts.demanded) == (8, 2, 6, 0)
    check_sums(counts, reader)


def test_a_demand_takes_over_what_is_queued_as_a_guess(make, reader):
    prefetcher = make(threads=1)
    reader.hold_all = True
    prefetcher.issue(pages(0), demand=False)
    reader.wait_for_calls(1)
    guess = prefetcher.issue(pages(5, 6, 7), demand=False)
    wanted = prefetcher.issue(pages(8, 6), demand=True)
    reader.wait_for_calls(2)
    assert read_by(reader, 1) == [8, 6]
    reader.let_go()
    np.testing.assert_array_equal(prefetcher.collect(guess), contents(pages(5, 6, 7)))
    np.testing.assert_array_equal(prefetcher.collect(wanted), contents(pages(8, 6)))
    counts = prefetcher.finish_request()
    assert sorted(reader.read_units[:, 3].tolist()) == [0, 5, 6, 7, 8]
    check_sums(counts, reader)


def test_issue_never_blocks_and_speculation_is_bounded(make, reader):
    entered, leave = threading.Event(), threading.Event()

    def stuck(units):
        if units[0, 3] < 1000:
            entered.set()
            leave.wait(20)
        return reader(units)

    prefetcher = make(read=stuck, threads=2, max_in_flight_bytes=10 * UNIT_BYTES)
    try:
        begun = time.monotonic()
        tickets = [prefetcher.issue(pages(*range(k, k + 6)), demand=False) for k in (0, 10, 20)]
        entered.wait(10)
        wanted = prefetcher.issue(pages(*range(1000, 1100)), demand=True)
        np.testing.assert_array_equal(  # though every thread that may speculate is stuck
            prefetcher.collect(wanted), contents(pages(*range(1000, 1100)))
        )
        assert time.monotonic() - begun < 5
        assert prefetcher.counts().dropped == 3 * 6 - 10
    finally:
        leave.set()
    for ticket, first in zip(tickets, (0, 10, 20), strict=True):  # dropped ones are read when asked
        expected = contents(pages(*range(first, first + 6)))
        np.testing.assert_array_equal(prefetcher.collect(ticket), expected)
    counts = prefetcher.finish_request()
    assert counts.dropped == 8
    check_sums(counts, reader)


def test_room_for_speculation_comes_back(make, reader):
    prefetcher = make(max_in_flight_bytes=4 * UNIT_BYTES, threads=1)
    for how in ("collected", "cancelled", "cancelled under way", "in a queue", "taken over"):
        reader.hold_all = how in ("cancelled under way", "in a queue")
        ticket = prefetcher.issue(pages(1, 2, 3, 4), demand=False)
        assert prefetcher.counts().dropped == 0, how
        if how == "collected":
            prefetcher.collect(ticket)
        elif how == "taken over":
            prefetcher.collect(prefetcher.issue(pages(1, 2, 3, 4), demand=True))
        elif how == "cancelled under way":
            until(lambda: len(reader.open) == 4)
            prefetcher.cancel(ticket)
            prefetcher.issue(pages(7), demand=False)  # those four are still being read
            assert prefetcher.finish_request().dropped == 1
        reader.let_go()
        until(lambda: not reader.open)
        prefetcher.finish_request()


def test_a_guess_keeps_nothing_that_was_collected(make, reader):
    """Or a long request would come to the bound, though all of its guesses were right."""
    prefetcher = make(max_in_flight_bytes=8 * UNIT_BYTES)
    guesses = []
    for first in range(0, 400, 8):
        units = pages(*range(first, first + 8))
        guesses.append((prefetcher.issue(units, demand=False), units))
        np.testing.assert_array_equal(
            prefetcher.collect(prefetcher.issue(units, demand=True)), contents(units)
        )
        until(lambda: prefetcher._queue._held == 0)
    assert prefetcher.counts().dropped == 0
    assert len(reader.read_units) == 400
    for ticket, units in guesses:  # they can still be collected, and are read anew
        np.testing.assert_array_equal(prefetcher.collect(ticket), contents(units))
    check_sums(prefetcher.finish_request(), reader)


def test_what_was_read_is_let_go_once_it_was_collected(make, reader):
    prefetcher = make()
    reader.faults[1] = [contents(pages(1))[0].copy()]
    brought = weakref.ref(reader.faults[1][0])
    for _ in range(2):
        prefetcher.issue(pages(1), demand=False)
    prefetcher.collect(prefetcher.issue(pages(1), demand=True))
    until(lambda: prefetcher._queue._held == 0)
    gc.collect()
    assert brought() is None  # though the guesses were never cancelled


def test_no_speculation_at_all(make, reader):
    prefetcher = make(max_in_flight_bytes=0)
    guess = prefetcher.issue(pages(1, 2), demand=False)
    assert prefetcher.counts().dropped == 2
    np.testing.assert_array_equal(prefetcher.collect(guess), contents(pages(1, 2)))
    assert reader.read_units[:, 3].tolist() == [1, 2]


def test_guesses_of_what_is_here_are_not_read(make, reader):
    prefetcher = make(host_units=2)
    prefetcher.collect(prefetcher.issue(pages(1, 2), demand=True))
    guess = prefetcher.issue(pages(1, 2), demand=False)
    np.testing.assert_array_equal(prefetcher.collect(guess), contents(pages(1, 2)))
    assert len(reader.read_units) == 2


def test_hits_stay_until_they_are_collected(make, reader):
    """Between issue and collect others fill the tier; what was a hit remains one."""
    prefetcher = make(host_units=2)
    prefetcher.collect(prefetcher.issue(pages(1, 2), demand=True))
    ticket = prefetcher.issue(pages(2, 1), demand=True)
    for page in range(10, 20):
        prefetcher.collect(prefetcher.issue(pages(page), demand=True))
    np.testing.assert_array_equal(prefetcher.collect(ticket), contents(pages(2, 1)))
    assert prefetcher.finish_request().host_hits == 2
    prefetcher.collect(prefetcher.issue(pages(30, 31), demand=True))  # no pin is left
    prefetcher.collect(prefetcher.issue(pages(30, 31), demand=True))
    assert prefetcher.finish_request().host_hits == 2


@pytest.mark.parametrize("host_units", [0, 2, 100])
def test_results_belong_to_the_caller(make, reader, host_units):
    """JAX may use an aligned array in place; no later read or eviction may reach it."""
    prefetcher = make(host_units=host_units)
    guess = prefetcher.issue(pages(1, 2), demand=False)
    taken = [prefetcher.collect(prefetcher.issue(pages(1, 2), demand=True)) for _ in range(2)]
    taken.append(prefetcher.collect(guess))
    on_device = jax.device_put(taken[0])
    taken[1][:] = -1  # nor does a caller reach what others get
    prefetcher.collect(prefetcher.issue(pages(*range(10, 40)), demand=True))
    for result in (taken[0], on_device, taken[2]):
        np.testing.assert_array_equal(result, contents(pages(1, 2)))
    again = prefetcher.collect(prefetcher.issue(pages(1, 2), demand=True))
    np.testing.assert_array_equal(again, contents(pages(1, 2)))
    assert all(result.base is None and result.flags.owndata for result in [*taken, again])


def test_fills_an_array_of_the_callers(make):
    prefetcher = make(host_units=4)
    out = np.full((5, *SHAPE), -1, DTYPE)
    prefetcher.collect_into(prefetcher.issue(pages(3, 1), demand=True), out[1:3])
    np.testing.assert_array_equal(out[1:3], contents(pages(3, 1)))
    assert (out[[0, 3, 4]] == -1).all()


@pytest.mark.parametrize(
    "out",
    [
        np.zeros((3, *SHAPE), DTYPE),
        np.zeros((2, *SHAPE), np.float64),
        np.zeros((4, *SHAPE), DTYPE)[::2],
        np.broadcast_to(np.zeros((1, *SHAPE), DTYPE), (2, *SHAPE)),
    ],
)
def test_an_array_that_does_not_fit_leaves_the_ticket_good(make, out):
    prefetcher = make()
    ticket = prefetcher.issue(pages(3, 1), demand=True)
    with pytest.raises(ValueError, match="out is float"):
        prefetcher.collect_into(ticket, out)
    np.testing.assert_array_equal(prefetcher.collect(ticket), contents(pages(3, 1)))


def test_asking_for_nothing_is_no_hit_and_no_read(make, reader):
    prefetcher = make(host_units=2)
    for demand in (True, False):
        result = prefetcher.collect(prefetcher.issue(pages(), demand=demand))
        assert result.shape == (0, *SHAPE)
    assert prefetcher.finish_request() == ReadCounts(UNIT_BYTES)
    assert reader.calls == []


@pytest.mark.parametrize("room", [0, 1 << 20])  # bytes: guesses are dropped, or joined
def test_what_a_caller_does_with_its_array_of_units_changes_nothing(make, reader, room):
    prefetcher = make(threads=1, max_in_flight_bytes=room)
    reader.hold_all = True
    prefetcher.issue(pages(0), demand=True)
    reader.wait_for_calls(1)
    asked = [pages(1, 2), pages(2, 3)]
    tickets = [
        prefetcher.issue(units, demand=demand)
        for units, demand in zip(asked, (False, True), strict=True)
    ]
    for units in asked:
        units[:] = 9
    reader.let_go()
    for ticket, expected in zip(tickets, ((1, 2), (2, 3)), strict=True):
        np.testing.assert_array_equal(prefetcher.collect(ticket), contents(pages(*expected)))


def test_a_cancelled_ticket_reads_nothing_more(make, reader):
    prefetcher = make(threads=1)
    reader.hold_all = True
    under_way = prefetcher.issue(pages(0, 1), demand=False)
    reader.wait_for_calls(1)
    queued, joined = (prefetcher.issue(pages(*p), demand=False) for p in ((5, 6), (6, 7)))
    prefetcher.cancel(queued)
    prefetcher.cancel(under_way)
    prefetcher.cancel(under_way)  # spent
    reader.let_go()
    np.testing.assert_array_equal(prefetcher.collect(joined), contents(pages(6, 7)))
    assert 5 not in reader.read_units[:, 3]
    with pytest.raises(ValueError, match=f"ticket {queued} is unknown, collected or cancelled"):
        prefetcher.collect(queued)
    counts = prefetcher.finish_request()
    assert counts.wasted == 2
    check_sums(counts, reader)


@pytest.mark.parametrize("demand", [True, False])
def test_a_request_that_ends_leaves_nothing(make, reader, demand):
    tickets = 5
    prefetcher = make(host_units=3)
    prefetcher.collect(prefetcher.issue(pages(0, 1, 2), demand=True))
    prefetcher.finish_request()
    for first in range(tickets):
        prefetcher.issue(pages(first, first + 10), demand=demand)
    reader.wait_for_calls(1 + tickets)
    counts = prefetcher.finish_request()
    assert (counts.needed, counts.issued) == (0, 2 * tickets - 3)
    assert (counts.wasted, counts.abandoned) == ((0, 7) if demand else (7, 0))
    check_sums(counts)
    with pytest.raises(ValueError, match="unknown"):
        prefetcher.collect(tickets)
    prefetcher.collect(prefetcher.issue(pages(*range(50, 60)), demand=True))
    assert not any(prefetcher._tiers.lookup(range(3)))  # nothing stayed pinned


def test_counts_of_one_request_to_the_byte(make, reader):
    prefetcher = make(host_units=100, threads=1)
    prefetcher.collect(prefetcher.issue(pages(0, 1, 2), demand=True))
    prefetcher.finish_request()
    before = reader.read_bytes
    prefetcher.issue(pages(1, 10, 11, 12), demand=False)  # 1 is here
    reader.wait_for_calls(2)
    ticket = prefetcher.issue(pages(0, 1, 10, 11, 20, 21, 22), demand=True)
    assert prefetcher.counts().needed == 0  # a hit counts when it is handed out
    prefetcher.collect(ticket)
    counts = prefetcher.finish_request()
    assert (counts.host_hits, counts.prefetched, counts.demanded, counts.wasted) == (2, 2, 3, 1)
    assert counts.needed_bytes == 7 * UNIT_BYTES
    assert counts.wasted_bytes == UNIT_BYTES
    assert counts.read_bytes == reader.read_bytes - before
    check_sums(counts)
    assert counts.wait_s >= 0
    assert prefetcher.finish_request().needed == 0


def test_a_wrong_guess_stays_where_host_memory_has_room(make, reader):
    """It is waste of the request that read it, and a host hit of the one that finds it."""
    prefetcher = make(host_units=5)
    prefetcher.collect(prefetcher.issue(pages(0), demand=True))
    reader.held = {9}
    prefetcher.issue(pages(1, 2, 9), demand=False)
    guess = prefetcher.issue(pages(3), demand=False)
    wait_for_begin(prefetcher, 4)
    prefetcher.cancel(guess)
    counts = prefetcher.finish_request()
    assert counts.wasted == 4
    check_sums(counts, reader)
    reader.let_go()
    tiers = prefetcher._tiers
    assert tiers.counts().host_units == 4  # what came back later reached nothing
    np.testing.assert_array_equal(
        prefetcher.collect(prefetcher.issue(pages(2, 0, 4), demand=True)), contents(pages(2, 0, 4))
    )
    counts = prefetcher.finish_request()
    assert (counts.host_hits, counts.demanded, counts.wasted) == (2, 1, 0)
    check_sums(counts)

    prefetcher.issue(pages(5, 6), demand=False)  # all is full: nothing gives way
    wait_for_begin(prefetcher, 2)
    assert prefetcher.finish_request().wasted == 2
    assert [tiers.where(unit) for unit in range(7)] == ["host"] * 5 + [None] * 2
    prefetcher.collect(prefetcher.issue(pages(7), demand=True))  # nobody has used 1 and 3
    prefetcher.collect(prefetcher.issue(pages(8), demand=True))
    kept = [unit for unit in range(9) if tiers.where(unit)]
    assert kept == [0, 2, 4, 7, 8]
    assert tiers.counts().refused == 0


@pytest.mark.parametrize(
    "brought", [OSError("bad"), np.zeros((2, 2), DTYPE), np.zeros(SHAPE, np.int32), "hold"]
)
def test_a_guess_that_brought_no_unit_is_not_kept(make, reader, brought):
    prefetcher = make(host_units=5)
    reader.faults[1] = [brought]
    prefetcher.issue(pages(1, 2), demand=False)
    wait_for_begin(prefetcher, 2)
    check_sums(prefetcher.finish_request(), reader)
    assert [prefetcher._tiers.where(unit) for unit in (1, 2)] == [None, "host"]
    np.testing.assert_array_equal(
        prefetcher.collect(prefetcher.issue(pages(1, 2), demand=True)), contents(pages(1, 2))
    )


def test_time_is_that_of_reads_under_way(make, reader):
    prefetcher = make()
    reader.hold_all = True
    prefetcher.issue(pages(1), demand=False)
    ticket = prefetcher.issue(pages(2), demand=True)
    reader.wait_for_calls(2)
    time.sleep(0.1)
    threading.Timer(0.2, reader.let_go).start()
    prefetcher.collect(ticket)
    counts = prefetcher.finish_request()
    assert 0.1 < counts.wait_s < counts.read_s < 5  # two reads at once are not twice the time
    time.sleep(0.05)
    assert prefetcher.finish_request().read_s == 0


def test_two_segments_share_tiers_and_no_units(make, reader):
    first = make(host_units=10, segment="one")
    second = make(tiers=first._tiers, segment="two")
    for prefetcher in (first, second, first):
        prefetcher.collect(prefetcher.issue(pages(1, 2), demand=True))
    assert len(reader.read_units) == 4
    assert first.counts().host_hits == 2
    assert second.counts().host_hits == 0


@pytest.mark.parametrize("policy", [Lru, Lfu, ImpressScore, AttentionFrequency])
@pytest.mark.parametrize(("host", "device"), [(0, 0), (7, 0), (0, 3), (9, 4), (500, 500)])
def test_results_are_the_same_for_every_policy_and_size(make, reader, policy, host, device):
    for threads in (1, 3):
        prefetcher = make(
            host, device_units=device, policy=policy(), threads=threads, max_in_flight_bytes=4096
        )
        dice = np.random.default_rng(threads)
        already, open_tickets = reader.read_bytes, []
        total = ReadCounts(UNIT_BYTES)
        for step in range(120):
            units = rows(*dice.integers(0, (3, 2, 12), (dice.integers(1, 9), 3)).tolist())
            prefetcher.touch(units, dice.random(len(units)), dice.random(len(units)))
            if step % 3 == 0:
                prefetcher.issue(units, demand=False)
            open_tickets.append((prefetcher.issue(units, demand=bool(step % 4)), units))
            if step % 5 == 0 or len(open_tickets) > 4:
                dice.shuffle(open_tickets)
                for ticket, asked in open_tickets:
                    np.testing.assert_array_equal(prefetcher.collect(ticket), contents(asked))
                open_tickets = []
            if step % 30 == 29:
                for ticket, _ in open_tickets:
                    prefetcher.cancel(ticket)
                open_tickets = []
                counts = prefetcher.finish_request()
                check_sums(counts)
                total += counts
        assert total.read_bytes == reader.read_bytes - already
        assert total.unit_bytes == UNIT_BYTES
        check_sums(total)
        assert (total.host_hits > 0) == (host + device > 0)  # the device tier's rows are copied too
        assert total.device_hits == 0


def test_many_threads_at_once(make, reader):
    """Every result is right, every byte is accounted for, and nothing is left behind."""
    delayed, stop = [], threading.Event()

    def slow(units):
        """The fake reader, its reads ended by another thread in random order."""
        with reader.lock:
            reader.hold_all = True
            futures = reader(units)
            delayed.extend(reader.open)
            reader.open = []
        return futures

    def end_reads():
        dice = random.Random(5)
        while not stop.is_set() or delayed:
            with reader.lock:
                dice.shuffle(delayed)
                some = [delayed.pop() for _ in range(len(delayed) // 2 + bool(delayed))]
            for unit, future in some:
                future.set_result(contents(unit)[0])
            time.sleep(0.0005)

    for page in range(0, 40, 3):
        reader.faults[page] = [OSError("once")]
    prefetcher = make(12, device_units=5, read=slow, policy=AttentionFrequency(), threads=3)
    wrong = []

    def request(seed):
        dice = np.random.default_rng(seed)
        for _ in range(60):
            units = pages(*dice.integers(0, 40, dice.integers(1, 12)))
            ticket = prefetcher.issue(units, demand=bool(dice.integers(0, 2)))
            what = dice.integers(0, 4)
            if what == 0:
                prefetcher.cancel(ticket)
            elif what < 3:
                prefetcher.touch(units, dice.random(len(units)))
                if not (prefetcher.collect(ticket) == contents(units)).all():
                    wrong.append(units)

    threads = [threading.Thread(target=request, args=(seed,)) for seed in range(6)]
    threads.append(threading.Thread(target=end_reads))
    for thread in threads:
        thread.start()
    for thread in threads[:-1]:
        thread.join(60)
    stop.set()
    threads[-1].join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    counts = prefetcher.finish_request()
    check_sums(counts, reader)
    assert counts.needed > 0 < counts.failed
    assert prefetcher._tiers._pins == {}
    assert prefetcher._queue._flights == {}
    until(lambda: prefetcher._queue._held == 0)


def test_thousands_of_requests_leave_no_flight_pin_or_array(make, reader):
    prefetcher = make(host_units=20)
    dice = np.random.default_rng(1)
    for _ in range(500):
        units = pages(*dice.integers(0, 60, 6))
        prefetcher.issue(pages(*dice.integers(0, 60, 6)), demand=False)
        prefetcher.collect(prefetcher.issue(units, demand=True))
        prefetcher.finish_request()
    until(lambda: prefetcher._queue._held == 0)
    assert prefetcher._tiers._pins == {}
    assert prefetcher._queue._flights == {}
    gc.collect()
    alive = [x for x in gc.get_objects() if type(x) in (Flight, Batch)]
    assert len(alive) < 100
