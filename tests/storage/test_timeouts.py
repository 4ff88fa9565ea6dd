"""A store that never answers costs who asks it a bounded wait, and nobody else anything."""

import errno
import threading
import time

import numpy as np
import pytest
import tensorstore as ts

from kvjax.storage import stored_array
from kvjax.storage.blobs import Blobs
from kvjax.storage.errors import SegmentError, StoreError, UnitError
from kvjax.storage.page_store import PageStore
from kvjax.storage.unit_read import units_in_time
from tests.storage.pages import (
    IDENTITY,
    P,
    assert_holds,
    files_of,
    keys_and_values,
    put,
    token_ids,
)


class Silent:
    """A key-value store of which some calls never end, once they are named."""

    def __init__(self, kvstore):
        self._kvstore = kvstore
        self.calls = set()
        self.asked = threading.Event()
        self.promises = []

    def __getattr__(self, name):
        if name not in self.calls:
            return getattr(self._kvstore, name)

        def never(*_, **__):
            promise, future = ts.Promise.new()
            self.promises.append(promise)
            self.asked.set()
            return future

        return never

    def __truediv__(self, path):
        return self._kvstore / path


@pytest.fixture
def stored(tmp_path):
    """A store with a prefix, which waits for at most 0.2 s, and its key-value store."""
    put(PageStore.open(tmp_path / "pages"))
    store = PageStore.open(tmp_path / "pages", timeout_s=0.2)
    silent = store._blobs.kvstore = Silent(store._blobs.kvstore)
    yield store, silent
    silent.calls = set()


def find(store, seed=0):
    return store.find(IDENTITY, token_ids(seed), P)


def late(call):
    """It raises ETIMEDOUT, in about the time it may take."""
    began = time.monotonic()
    with pytest.raises(StoreError, match=r"no answer in 0\.2") as caught:
        call()
    assert caught.value.errno == errno.ETIMEDOUT
    assert caught.value.reason == "io"
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_a_wait_is_above_zero_seconds(tmp_path, timeout_s):
    with pytest.raises(ValueError, match="timeout_s is"):
        PageStore.open(tmp_path / "pages", timeout_s=timeout_s)
    assert PageStore.open(tmp_path / "pages").timeout_s == 30.0


def test_lists_and_writes_that_never_end_are_errors_with_etimedout(stored):
    store, silent = stored
    silent.calls = {"list"}
    for call in (store.refresh, store.segments, store.stats, store.verify, store.gc):
        late(call)
    late(lambda: find(store, 8))
    assert find(store).pages  # all of it is known, so nothing is listed
    silent.calls = {"write"}
    late(lambda: put(store, 1))
    late(lambda: store.remove(find(store).key))
    silent.calls = {"delete_range"}
    late(lambda: store._blobs.delete_folder("data/x/"))


def test_a_manifest_that_is_never_read_is_a_miss_of_reason_io(stored):
    store, silent = stored
    silent.calls = {"read"}
    assert find(store) is None
    assert store.stats().misses["io"] >= 1
    with pytest.raises(SegmentError, match="io"):
        store.open_segment(store._catalog.names()[0])
    late(lambda: put(store))
    silent.calls = set()
    assert_holds(find(store).segment, *keys_and_values())


def test_who_waits_for_the_store_holds_up_nobody_else(stored):
    store, silent = stored
    store._blobs.timeout_s = 20.0
    info = store.segments()[0]
    silent.calls = {"list"}

    def find_what_is_not_known():
        with pytest.raises(StoreError):
            find(store, 9)

    waiting = threading.Thread(target=find_what_is_not_known)
    waiting.start()
    assert silent.asked.wait(10)
    began = time.monotonic()
    assert find(store).key == info.key
    store.open_segment(info.key)
    store.report(info.key, "io", info.created)
    assert time.monotonic() - began < 5
    assert waiting.is_alive()
    for promise in silent.promises:
        promise.set_exception(RuntimeError("UNAVAILABLE: gone"))
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_manifest_whose_write_is_late_may_still_appear_and_is_whole(stored, monkeypatch):
    store, _ = stored
    ended = Blobs.ended_write_if

    def slow(blobs, name, future, size=0):
        ended(blobs, name, future, size)
        raise StoreError(errno.ETIMEDOUT, "no answer")

    with monkeypatch.context() as patch:
        patch.setattr(Blobs, "ended_write_if", slow)
        with pytest.raises(StoreError, match="no answer"):
            put(store, 3)
    assert_holds(find(store, 3).segment, *keys_and_values(3))


def test_verify_says_what_did_not_come_in_time(stored, monkeypatch):
    store, _ = stored
    key = store.segments()[0].key
    promises = []

    def never(*_):
        promise, future = ts.Promise.new()
        promises.append(promise)
        return future

    monkeypatch.setattr(stored_array, "read_places", never)
    began = time.monotonic()
    findings = store.verify(key)
    assert [finding.reason for finding in findings] == ["timeout"] * 4
    assert "no answer in 0.2 s" in findings[0].detail
    assert time.monotonic() - began < 10


def test_shards_that_are_never_written_end_a_put_and_leave_nothing(stored, monkeypatch):
    store, _ = stored
    before = files_of(store._blobs.folder)

    class Never:
        def result(self, timeout=None):
            assert timeout is not None
            raise TimeoutError

        commit = property(lambda self: self)

        def exception(self, timeout=None):
            self.result(timeout)

    monkeypatch.setattr("kvjax.storage.unit_array.start_write", lambda *_: Never())
    with pytest.raises(StoreError, match="writing units: no answer") as caught:
        put(store, 5)
    assert caught.value.errno == errno.ETIMEDOUT
    assert files_of(store._blobs.folder) == before


def test_use_counts_that_are_never_written_hold_up_no_find(stored):
    store, silent = stored
    silent.calls = {"write"}
    began = time.monotonic()
    for _ in range(50):
        assert find(store)
    assert time.monotonic() - began < 5
    store.flush()
    assert time.monotonic() - began < 10
    assert store.stats().lost_uses >= 1
    assert np.isclose(store.segments()[0].hits, 50)


def test_units_that_do_not_come_in_time_are_named(stored, monkeypatch):
    store, _ = stored
    promises = []

    def never(*_):
        promises.append(ts.Promise.new())
        return promises[-1][1]

    units = np.array([[1, 0, 0, 2], [0, 1, 0, 3]], np.int32)
    with find(store).segment as opened, monkeypatch.context() as patch:
        assert len(list(units_in_time(opened.read(units), 20.0))) == 2
        patch.setattr(stored_array, "read_places", never)
        with pytest.raises(UnitError, match=r"page 2\).*timeout.*no answer in 0\.1 s") as caught:
            list(units_in_time(opened.read(units), 0.1))
    assert (caught.value.unit, caught.value.reason) == ((1, 0, 0, 2), "timeout")
