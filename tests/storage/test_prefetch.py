"""Tickets: order, sharing, bounds, faults, and an account of every byte."""

import numpy as np
import pytest

from kvjax.storage.prefetch import Prefetcher, ReadFailedError
from kvjax.storage.tiers import Tiers
from tests.storage.fake_reader import DTYPE, SHAPE, UNIT_BYTES, FakeReader, contents, pages, rows


@pytest.fixture
def reader():
    return FakeReader()


@pytest.fixture
def make(reader):
    """Prefetchers over the fake reader, closed in the end."""
    made = []

    def prefetcher(host_units=0, *, device_units=0, policy=None, tiers=None, **settings):
        if tiers is None:
            tiers = Tiers(
                host_units * UNIT_BYTES,
                SHAPE,
                DTYPE,
                device_bytes=device_units * UNIT_BYTES,
                policy=policy,
            )
        made.append(Prefetcher(reader, tiers, **{"timeout_s": 10.0, **settings}))
        return made[-1]

    yield prefetcher
    reader.let_go()
    for one in made:
        assert one.close()


def test_collects_in_the_order_asked(make):
    prefetcher = make()
    units = rows((2, 1, 7), (0, 0, 3), (2, 0, 7), (0, 0, 3))
    result = prefetcher.collect(prefetcher.issue(units, demand=True))
    np.testing.assert_array_equal(result, contents(units))
    assert result.dtype == DTYPE


def test_a_second_request_is_served_by_the_host(make, reader):
    prefetcher = make(host_units=8)
    for expected_hits in (0, 3):
        ticket = prefetcher.issue(pages(4, 2, 9), demand=True)
        np.testing.assert_array_equal(prefetcher.collect(ticket), contents(pages(4, 2, 9)))
        counts = prefetcher.finish_request()
        assert (counts.needed, counts.host_hits) == (3, expected_hits)
    assert reader.read_bytes == 3 * UNIT_BYTES


def test_a_read_that_fails_twice_is_an_error(make, reader):
    prefetcher = make()
    reader.faults[2] = [OSError("bad sector"), OSError("bad sector again")]
    ticket = prefetcher.issue(pages(1, 2, 3), demand=True)
    with pytest.raises(ReadFailedError, match="bad sector again") as caught:
        prefetcher.collect(ticket)
    assert caught.value.reason == "error"
    assert caught.value.units.tolist() == pages(2).tolist()
