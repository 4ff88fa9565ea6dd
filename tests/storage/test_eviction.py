"""A store with a limit keeps to it, and gives up what is missed least."""

import numpy as np
import pytest

from kvjax.storage import page_store
from kvjax.storage.errors import SegmentTooLargeError, StoreFullError
from kvjax.storage.eviction import victims
from kvjax.storage.page_store import PageStore
from tests.storage.pages import (
    IDENTITY,
    P,
    assert_holds,
    bytes_below,
    keys_and_values,
    put,
    token_ids,
)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Time that moves on by a second whenever it is asked for."""

    class Clock:
        now = 1_700_000_000.0

        def time(self):
            self.now += 1
            return self.now

    clock = Clock()
    monkeypatch.setattr(page_store, "time", clock)
    monkeypatch.setattr("kvjax.storage.segment_writer.time", clock)
    return clock


@pytest.fixture
def one(tmp_path):
    """Bytes of one segment of six pages."""
    return put(PageStore.open(tmp_path / "measure"), 99).bytes + 8


def keys_of(store):
    return {info.key for info in store.segments()}


def find(store, seed):
    return store.find(IDENTITY, token_ids(seed), P)


def test_the_least_recently_used_goes_first_and_never_the_one_just_written(tmp_path, one):
    store = PageStore.open(tmp_path / "pages", max_bytes=3 * one)
    infos = [put(store, seed) for seed in range(3)]
    assert find(store, 0).key == infos[0].key
    new = put(store, 3)
    assert keys_of(store) == {infos[0].key, infos[2].key, new.key}
    assert find(store, 1) is None
    assert_holds(find(store, 3).segment, *keys_and_values(3))
    assert store.stats().evicted == 1


def test_no_more_is_evicted_than_is_needed(tmp_path, one):
    """Room for n bytes takes at least n, and less than n and one segment."""
    store = PageStore.open(tmp_path / "pages", max_bytes=4 * one)
    for seed in range(4):
        put(store, seed)
    put(store, 4, pages=1)
    assert len(store.segments()) == 4
    put(store, 5, pages=1)
    assert len(store.segments()) == 5


@pytest.mark.parametrize("restart", [False, True])
def test_files_entries_and_counter_agree_over_ten_times_the_capacity(tmp_path, one, restart):
    """Sum of the entries == the counter == what the folder holds <= max_bytes, at each step."""
    root, rng = tmp_path / "pages", np.random.default_rng(0)
    store = PageStore.open(root, max_bytes=3 * one)
    for seed in range(30):
        if restart and seed % 7 == 6:
            store.flush()
            store = PageStore.open(root, max_bytes=3 * one)
        info = put(store, seed, pages=int(rng.integers(1, 7)))
        assert info.key in keys_of(store)
        store.flush()
        total = bytes_below(root / "data") + bytes_below(root / "segments")
        stats = store.stats()
        assert stats.bytes == total == sum(entry.bytes for entry in store.segments())
        assert total <= 3 * one
        index = store._catalog.index
        held = {name for entry in index.entries.values() for name in entry.page_keys}
        assert held == index._holders.keys()
    assert store.verify() == []


def test_a_segment_larger_than_the_store_is_refused_by_name(tmp_path, one):
    store = PageStore.open(tmp_path / "pages", max_bytes=one)
    old = put(store, 0)
    with pytest.raises(SegmentTooLargeError, match=f"'book' needs .* max_bytes is {one}"):
        put(store, 1, pages=20, label="book")
    assert keys_of(store) == {old.key}


def test_what_is_open_is_not_evicted(tmp_path, one):
    """The prefix that a request is using stays while room is made for the same request's pages."""
    store = PageStore.open(tmp_path / "pages", max_bytes=one)
    put(store, 0)
    match = find(store, 0)
    with pytest.raises(StoreFullError, match="open segments hold") as caught:
        put(store, 1)
    size = match.segment.info.bytes
    assert caught.value.open_bytes == size
    assert size - 100 < caught.value.missing <= size
    assert caught.value.errno is None
    assert_holds(match.segment, *keys_and_values(0))
    match.segment.close()
    new = put(store, 1)
    assert keys_of(store) == {new.key}


def test_what_nobody_holds_any_more_is_not_open(tmp_path, one):
    store = PageStore.open(tmp_path / "pages", max_bytes=one)
    put(store, 0)
    find(store, 0)
    new = put(store, 1)
    assert keys_of(store) == {new.key}


def test_segments_that_a_longer_one_covers_go_first(tmp_path, one):
    """Snapshots of a growing prompt give way to the longest of them, not to each other's rivals."""
    store = PageStore.open(tmp_path / "pages", max_bytes=int(3.4 * one))
    hot = put(store, 50)
    for pages in (2, 4, 6):
        longest = put(store, 0, pages, tokens=token_ids(0, 6)[: pages * P])
    rival = put(store, 51)
    assert keys_of(store) == {hot.key, longest.key, rival.key}
    assert find(store, 0).pages == 6


def test_a_short_prefix_that_many_share_stays_under_pressure(tmp_path, one):
    """Use decides, not size: a small segment that is asked for again and again outlives others."""
    store = PageStore.open(tmp_path / "pages", max_bytes=3 * one)
    shared = put(store, 77, pages=1)
    for seed in range(12):
        assert store.find(IDENTITY, token_ids(77, 1), P).key == shared.key
        put(store, seed)
    assert shared.key in keys_of(store)


def test_a_store_that_is_opened_with_a_smaller_limit_keeps_to_it(tmp_path, one):
    """After a restart the index, the hits and the order of use are there, and the limit holds."""
    store = PageStore.open(tmp_path / "pages")
    infos = [put(store, seed) for seed in range(5)]
    find(store, 0)
    store.flush()
    again = PageStore.open(tmp_path / "pages", max_bytes=2 * one)
    assert keys_of(again) == {infos[0].key, infos[4].key}
    assert again.stats().hits == 1
    assert bytes_below(tmp_path / "pages" / "data") < 2 * one
    reader = PageStore.open(tmp_path / "pages", max_bytes=1, read_only=True)
    assert len(reader.segments()) == 2


def test_victims_are_chosen_without_a_store(tmp_path):
    assert victims([], 0, set(), lambda key: False) == []
    with pytest.raises(StoreFullError):
        victims([], -1, set(), lambda key: False)
