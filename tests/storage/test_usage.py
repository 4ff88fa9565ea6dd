"""Hit counts survive a restart and never stand in anybody's way."""

import json
import threading

import pytest

from kvjax.storage.blobs import Blobs
from kvjax.storage.page_store import PageStore
from tests.storage.pages import IDENTITY, P, put, token_ids


def hit(store, times=1):
    for _ in range(times):
        assert store.find(IDENTITY, token_ids(), P)


def test_hits_are_counted_and_kept(tmp_path):
    store = PageStore.open(tmp_path)
    info = put(store)
    hit(store, 5)
    store.flush()
    again = PageStore.open(tmp_path)
    hit(again, 2)
    again.flush()
    (now,) = PageStore.open(tmp_path).segments()
    assert now.hits == 7
    assert now.last_used > info.created


def test_a_fast_run_of_hits_is_not_a_run_of_writes(tmp_path, monkeypatch):
    store = PageStore.open(tmp_path)
    put(store)
    started = []
    start_write_if = Blobs.start_write_if

    class Never:
        def done(self):
            return False

        def result(self, timeout=None):
            return self

        generation = b""  # another process was faster

    def slow(blobs, name, value, generation):
        started.append(name)
        return Never()

    monkeypatch.setattr(Blobs, "start_write_if", slow)
    hit(store, 20)
    assert len(started) == 1
    monkeypatch.setattr(Blobs, "start_write_if", start_write_if)
    store.flush()
    (now,) = PageStore.open(tmp_path).segments()
    assert now.hits == 20


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"7", b"{}", b"null", b"\xff", b"[" * 100_000),
        b'{"hits": "x", "last_used": 1}',
        b'{"hits": Infinity, "last_used": 1}',
        b'{"hits": 1, "last_used": Infinity}',
        b'{"hits": 1, "last_used": NaN}',
        b'{"hits": 1, "last_used": 1e300}',
        b'{"hits": -5, "last_used": 1}',
        b'{"hits": 1.5, "last_used": 1}',
        b'{"hits": 1, "last_used": "1"}',
        b'{"hits": true, "last_used": 1}',
    ],
)
def test_a_damaged_count_is_lost_and_the_segment_is_not(tmp_path, content):
    store = PageStore.open(tmp_path)
    info = put(store)
    hit(store)
    store.flush()
    (tmp_path / "use" / f"{info.key}.json").write_bytes(content)
    again = PageStore.open(tmp_path)
    hit(again, 2)
    again.flush()
    assert again.stats().lost_uses == 1
    assert again.segments()[0].hits == 2
    assert json.loads((tmp_path / "use" / f"{info.key}.json").read_bytes())["hits"] == 2


def test_processes_add_to_each_others_counts(tmp_path):
    one, two = PageStore.open(tmp_path), PageStore.open(tmp_path)
    put(one)
    for times in (1, 3, 2):
        for store in (one, two):
            hit(store, times)
        two.flush()
        one.flush()
    assert PageStore.open(tmp_path).segments()[0].hits == 12
    one.refresh()
    two.flush()  # nothing is left to write, so what others wrote stays
    assert PageStore.open(tmp_path).segments()[0].hits == 12


def test_many_threads_count_every_hit(tmp_path):
    store, other = PageStore.open(tmp_path), PageStore.open(tmp_path)
    put(store)
    threads = [threading.Thread(target=hit, args=(one, 20)) for one in (store, other) * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    store.flush()
    other.flush()
    assert PageStore.open(tmp_path).segments()[0].hits == 120


def test_room_is_made_by_what_other_processes_use(tmp_path):
    one = put(PageStore.open(tmp_path / "measure")).bytes + 100
    store = PageStore.open(tmp_path / "pages", max_bytes=2 * one)
    used = put(store, 0)
    idle = put(store, 1)
    reader = PageStore.open(tmp_path / "pages")
    hit(reader, 3)
    reader.flush()
    new = put(store, 2)
    keys = {info.key for info in store.segments()}
    assert keys == {used.key, new.key}
    assert idle.key not in keys


def test_a_count_that_cannot_be_written_is_counted(tmp_path):
    store = PageStore.open(tmp_path)
    put(store)
    (tmp_path / "use").write_bytes(b"a file where the folder should be")
    hit(store, 3)
    store.flush()
    assert store.stats().lost_uses >= 1
    assert store.segments()[0].hits == 3
