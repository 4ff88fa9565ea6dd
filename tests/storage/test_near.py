"""Units in memory that programs read: where they are, what is counted, what changed."""

import numpy as np

from kvjax.storage.placement import Lfu
from tests.storage.fake_reader import contents, pages


def test_units_in_device_memory_are_counted_and_gain_rank(make, reader):
    first = make(0, device_units=2, policy=Lfu())
    first.collect(first.issue(pages(1, 2), demand=True))
    changes = first._tiers.take_changes(2)
    np.testing.assert_array_equal(changes.data[changes.rows.argsort()], changes.data)
    assert len(changes.units) == 2
    second = make(tiers=first._tiers, near=changes.units)
    rows = second.rows_near(pages(2, 3, 1))
    assert rows[1] == -1
    np.testing.assert_array_equal(changes.data[rows[[2, 0]]], contents(pages(1, 2)))
    for _ in range(3):
        second.took_near(pages(2))
    counts = second.counts()
    assert (counts.needed, counts.device_hits, counts.issued) == (3, 3, 0)
    for _ in range(2):  # page 1 has one use, page 2 four: the newcomer takes page 1's row
        second.collect(second.issue(pages(3), demand=True))
    later = first._tiers.take_changes(2)
    assert later.rows.tolist() == [rows[2]]
    np.testing.assert_array_equal(later.data, contents(pages(3)))
    everything = first._tiers.take_changes(2, whole=True)
    assert sorted(everything.rows.tolist()) == [0, 1]
