"""What lacks a sketch, or was found damaged, is passed over and written anew in one step."""

import errno
import threading

import numpy as np
import pytest

from kvjax.storage.blobs import Blobs
from kvjax.storage.errors import DAMAGED, REASONS, SegmentError, StoreError, fault
from kvjax.storage.layout import Layout
from kvjax.storage.page_store import PageStore
from tests.storage.pages import (
    IDENTITY,
    LAYOUT,
    N,
    P,
    assert_holds,
    bytes_below,
    keys_and_values,
    put,
    token_ids,
)

MEAN = {"mean.values": np.arange(4.0), "tail": np.arange(3)}
QUEST = {"quest.low": np.arange(5.0), "quest.high": np.arange(6.0), "tail": np.arange(2)}


@pytest.fixture
def store(tmp_path):
    return PageStore.open(tmp_path / "pages")


def find(store, pages=N, **options):
    return store.find(IDENTITY, token_ids(0)[: pages * P], P, **options)


def folders(store):
    return sorted(path.name for path in (store._blobs.folder / "data").iterdir())


def test_only_segments_with_the_sketch_are_found_whatever_is_longer(store):
    short = put(store, 0, 3, tokens=token_ids(0)[: 3 * P], sketches=MEAN)
    full = put(store, 0, sketches=QUEST, layout=Layout(P, 1, 1))
    assert find(store).key == find(store, sketch="quest").key == full.key
    match = find(store, sketch="mean")
    assert (match.key, match.pages) == (short.key, 3)
    for none in ("tail", "quest.low", "qu", ""):
        assert find(store, sketch=none) is None
    assert store.stats().misses["absent"] == 4


def test_a_name_with_a_dot_is_not_taken_for_a_longer_one(store):
    info = put(store, sketches={"low-bit-3-0.9.codes": np.arange(3)})
    assert find(store, sketch="low-bit-3-0") is None
    assert find(store, sketch="low-bit-3-0.9").key == info.key


def test_of_equals_the_newest_is_found(store):
    layouts = [Layout(P, layers, heads) for layers in (1, 2, 4) for heads in (1, 2)]
    for layout in layouts:
        info = put(store, layout=layout)
        assert find(store).key == info.key
        assert find(PageStore.open(store.url)).key == info.key


def test_put_adds_sketches_and_who_has_the_former_open_reads_on(store):
    first = put(store, sketches=MEAN, label="a")
    reader = PageStore.open(store.url)
    old = find(reader)
    second = put(store, sketches=QUEST, label="b")
    assert second.key == first.key
    assert second.created > first.created
    for one in (store, reader, PageStore.open(store.url)):
        match = find(one, sketch="quest")
        assert match.segment.info.created == find(one, sketch="mean").segment.info.created
        arrays = match.segment.sketches()
        assert arrays.keys() == MEAN.keys() | QUEST.keys()
        for name, array in (QUEST | MEAN).items():  # those there were stay as they were
            np.testing.assert_array_equal(arrays[name], array)
        assert_holds(match.segment, *keys_and_values())
    assert reader.gc().segments == PageStore.open(store.url).gc().segments == 0
    assert reader.gc(min_age_s=0).segments == 0  # it is open there
    assert_holds(old.segment, *keys_and_values())
    np.testing.assert_array_equal(old.segment.sketches()["tail"], MEAN["tail"])
    old.segment.close()
    assert reader.gc(min_age_s=0).segments == 1
    assert len(folders(store)) == 1
    assert put(store, sketches=MEAN) == put(store) == store.segments()[0]


def test_gc_leaves_what_was_replaced_lately_however_long_ago_it_was_written(store, monkeypatch):
    monkeypatch.setattr("kvjax.storage.segment_writer.time.time", lambda: 1.6e9)
    put(store)
    monkeypatch.undo()
    put(store, sketches=MEAN)
    assert store.gc().segments == 0
    assert len(folders(store)) == 2


@pytest.mark.parametrize("how", ["at the last step", "threads"])
def test_writers_of_different_sketches_at_once_end_with_all_of_them(store, monkeypatch, how):
    other = PageStore.open(store.url)
    if how == "threads":
        threads = [
            threading.Thread(target=put, args=(one,), kwargs={"sketches": sketches})
            for one, sketches in ((store, MEAN), (other, QUEST), (store, {"x.y": np.arange(2)}))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        wanted = MEAN.keys() | QUEST.keys() | {"x.y"}
    else:
        write_if, done = Blobs.write_if, []

        def late(blobs, name, value, generation):
            if blobs is store._blobs and not done:
                done.append(put(other, sketches=QUEST))
            return write_if(blobs, name, value, generation)

        monkeypatch.setattr(Blobs, "write_if", late)
        put(store, sketches=MEAN)
        wanted = MEAN.keys() | QUEST.keys()
    segment = PageStore.open(store.url).open_segment(store.segments()[0].key)
    assert segment.sketches().keys() == wanted
    assert_holds(segment, *keys_and_values())


def test_the_only_segment_with_a_sketch_is_not_covered_by_a_longer_one(tmp_path):
    one = put(PageStore.open(tmp_path / "measure")).bytes
    store = PageStore.open(tmp_path / "pages", max_bytes=3 * one)
    short = put(store, 0, 2, tokens=token_ids(0)[: 2 * P], sketches=MEAN)
    oldest = put(store, 50)
    put(store, 0)
    find(store, 2, sketch="mean").segment.close()
    put(store, 51)
    keys = {info.key for info in store.segments()}
    assert short.key in keys
    assert oldest.key not in keys


def test_what_was_replaced_counts_and_goes_when_room_is_needed(tmp_path):
    one = put(PageStore.open(tmp_path / "measure"), sketches=MEAN | QUEST).bytes + 10
    store = PageStore.open(tmp_path / "pages", max_bytes=2 * one)
    put(store, sketches=MEAN)
    put(store, sketches=QUEST)
    assert len(folders(store)) == 2
    new = put(store, 1)
    assert {info.key for info in store.segments()} == {new.key, find(store).key}
    assert len(folders(store)) == 2
    tight = PageStore.open(tmp_path / "tight", max_bytes=one)
    put(tight, sketches=MEAN)
    put(tight, sketches=QUEST)  # in the place of the former: both have no room
    assert find(tight, sketch="quest")
    assert bytes_below(tmp_path / "tight" / "data") < one


@pytest.mark.parametrize("reason", sorted(DAMAGED))
def test_reported_damage_is_counted_and_healed_by_the_next_put(store, reason):
    info = put(store, sketches=MEAN)
    match = find(store)
    (path,) = (store._blobs.folder / "data").glob("*/c/1/0/0/0/0")
    path.write_bytes(b"")
    store.report(match.key, reason, match.segment.info.created)
    assert store.stats().misses == dict.fromkeys(REASONS, 0) | {reason: 1}
    match.segment.close()
    assert find(store) is None
    assert find(PageStore.open(store.url)).key == info.key  # others find out by themselves
    new = put(store, sketches={"tail": QUEST["tail"]})
    assert new.key == info.key
    assert store.verify() == []
    for one in (store, PageStore.open(store.url)):
        again = find(one, sketch="mean")
        assert_holds(again.segment, *keys_and_values())
        np.testing.assert_array_equal(again.segment.sketches()["tail"], QUEST["tail"])
    store.report(info.key, reason, info.created)  # late, and about the former one
    assert find(store).key == info.key


@pytest.mark.parametrize("reason", sorted(set(REASONS) - DAMAGED))
def test_what_passes_by_itself_is_counted_only(store, reason):
    info = put(store)
    store.report(info.key, reason, info.created)
    assert store.stats().misses[reason] == 1
    assert find(store).key == info.key
    assert put(store).created == info.created


def test_a_sketch_that_is_damaged_is_not_taken_along(store):
    put(store, sketches=MEAN)
    (path,) = (store._blobs.folder / "data").glob("*/sketches/mean.values")
    path.write_bytes(b"x")
    info = put(store, sketches=QUEST)
    assert store.stats().misses["checksum"] == 1
    assert store.open_segment(info.key).sketches().keys() == QUEST.keys()
    put(store, sketches=MEAN)
    assert store.verify() == []


def test_damage_is_healed_though_what_else_is_there_cannot_be_read(store, monkeypatch):
    info = put(store, sketches=MEAN)
    read = Blobs.read

    def failing(blobs, name, known=None):
        if "/sketches/" in name:
            raise StoreError(errno.EIO, "device")
        return read(blobs, name, known)

    monkeypatch.setattr(Blobs, "read", failing)
    with pytest.raises(StoreError, match="device"):
        put(store, sketches=QUEST)  # nothing is known to be damaged, and would be lost
    store.report(info.key, "checksum", info.created)
    put(store, sketches=QUEST)
    monkeypatch.undo()
    assert find(store).segment.sketches().keys() == QUEST.keys()


def test_a_damaged_segment_stands_for_no_other_and_goes_first(tmp_path):
    one = put(PageStore.open(tmp_path / "measure")).bytes + 10
    store = PageStore.open(tmp_path / "pages", max_bytes=3 * one)
    short = put(store, 0, 5, tokens=token_ids(0)[: 5 * P])
    put(store, 1)
    damaged = put(store, 0)
    store.report(damaged.key, "checksum", damaged.created)
    put(store, 2)
    keys = {info.key for info in store.segments()}
    assert short.key in keys
    assert damaged.key not in keys
    assert find(store).key == short.key


def test_reports_of_many_threads_are_all_counted(store):
    info = put(store)

    def report():
        for _ in range(200):
            store.report(info.key, "io", info.created)

    threads = [threading.Thread(target=report) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert store.stats().misses["io"] == 1600


def test_a_fault_keeps_its_number_and_is_one_line():
    denied = fault(PermissionError(errno.EACCES, "Permission denied", "/x"), "removing x")
    assert denied.errno == errno.EACCES
    text = "INTERNAL: no room [os_error_code='28'] [source locations='a.cc:1\nb.cc:2']"
    full = fault(ValueError(text), "writing x")
    assert (full.errno, full.strerror) == (errno.ENOSPC, "writing x: INTERNAL: no room")
    assert fault(RuntimeError("UNAVAILABLE: gone"), "reading x").errno == errno.EIO


def test_a_segment_that_is_evicted_while_it_is_opened_is_a_miss(store):
    info = put(store)
    entry = store._catalog.get(info.key)
    store._catalog.forget(info.key)
    with pytest.raises(SegmentError, match="removed just now"):
        store._opened(entry)
    assert put(store, layout=LAYOUT).key == info.key
