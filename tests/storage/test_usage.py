"""Hit counts survive a restart and never stand in anybody's way."""

import json

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
    start_write = Blobs.start_write

    class Never:
        def done(self):
            return False

        def result(self):
            return None

    def slow(blobs, name, value):
        started.append(name)
        return Never()

    monkeypatch.setattr(Blobs, "start_write", slow)
    hit(store, 20)
    assert len(started) == 1
    monkeypatch.setattr(Blobs, "start_write", start_write)
    store.flush()
    (now,) = PageStore.open(tmp_path).segments()
    assert now.hits == 20


@pytest.mark.parametrize("content", [b"", b"[]", b"7", b"{}", b'{"hits": "x", "last_used": 1}'])
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


def test_a_count_that_cannot_be_written_is_counted(tmp_path):
    store = PageStore.open(tmp_path)
    put(store)
    (tmp_path / "use").write_bytes(b"a file where the folder should be")
    hit(store, 3)
    store.flush()
    assert store.stats().lost_uses >= 1
    assert store.segments()[0].hits == 3
