"""A fake reader and prefetchers over it, closed when a test ends."""

import pytest

from kvjax.storage.prefetch import Prefetcher
from kvjax.storage.tiers import Tiers
from tests.storage.fake_reader import DTYPE, SHAPE, UNIT_BYTES, FakeReader


@pytest.fixture
def reader():
    return FakeReader()


@pytest.fixture
def make(reader):
    """Makes prefetchers, by default over the fake reader and with no memory for tiers."""
    made = []

    def prefetcher(
        host_units=0, *, device_units=0, policy=None, tiers=None, read=reader, **settings
    ):
        if tiers is None:
            sizes = {"device_bytes": device_units * UNIT_BYTES, "policy": policy}
            tiers = Tiers(host_units * UNIT_BYTES, SHAPE, DTYPE, **sizes)
        made.append(Prefetcher(read, tiers, **{"timeout_s": 20.0, **settings}))
        return made[-1]

    yield prefetcher
    reader.let_go()
    for one in made:
        one.close()
