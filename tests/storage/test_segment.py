"""Units: what is read is what was stored, or an error that names the unit; bytes are counted."""

import contextlib
import itertools
import os
import shutil
import threading
import time

import numpy as np
import pytest
import tensorstore as ts

from kvjax.storage.errors import ReadFailedError, UnitError
from kvjax.storage.layout import Layout
from kvjax.storage.page_store import PageStore
from kvjax.storage.prefetch import Prefetcher
from kvjax.storage.tiers import Tiers
from kvjax.storage.unit_array import read_places
from kvjax.storage.unit_tags import folder_number
from tests.storage.damage import DAMAGES, SKETCHES, damage_every_file, outcome, read_all
from tests.storage.pages import (
    IDENTITY,
    LAYOUT,
    N,
    P,
    all_units,
    assert_holds,
    expected,
    keys_and_values,
    put,
    token_ids,
)


@pytest.fixture
def store(tmp_path):
    return PageStore.open(tmp_path / "pages")


@pytest.fixture
def segment(store):
    return store.open_segment(put(store, sketches=SKETCHES).key)


def folder_of(store):
    (folder,) = (store._blobs.folder / "data").iterdir()
    return folder


def metric(name):
    found = ts.experimental_collect_matching_metrics(f"/tensorstore/kvstore/file/{name}")
    return found[0]["values"][0]["value"] if found and found[0]["values"] else 0


def test_units_come_in_the_order_asked_for_and_twice_if_asked_twice(segment):
    keys, values = keys_and_values()
    units = np.array([[1, 1, 0, 5], [0, 0, 0, 0], [1, 1, 0, 5], [0, 1, 0, 3]], np.int64)
    reads = segment.read(units)
    for unit, read in zip(units, reads, strict=True):
        assert read.result().tobytes() == expected(unit, keys, values, LAYOUT)
        assert read.done()
    assert segment.bytes_read().payload == 3 * segment.unit_bytes


def test_reading_nothing_is_nothing(segment):
    assert segment.read(np.empty((0, 4), np.int32)) == []
    assert segment.bytes_read().payload == segment.bytes_read().index == 0


def test_what_is_read_is_nobody_elses(segment):
    units = np.array([[0, 0, 0, 1]])
    first = segment.read(units)[0].result()
    kept = first.tobytes()
    first.view(np.uint16)[...] = 7
    assert segment.read(units)[0].result().tobytes() == kept


@pytest.mark.parametrize(
    ("units", "says"),
    [
        (np.array([[2, 0, 0, 0]]), "below \\(2, 2, 1, 6\\)"),
        (np.array([[0, 0, 0, 0], [0, 0, 1, 0]]), "\\(0, 0, 1, 0\\) is out of range"),
        (np.array([[0, 0, 0, -1]]), "out of range"),
        (np.array([0, 0, 0, 0]), "shape \\(4,\\)"),
        (np.array([[0, 0, 0]]), "\\[n, 4\\]"),
        (np.array([[0.0, 0, 0, 0]]), "whole numbers"),
    ],
)
def test_units_that_are_none_are_refused_before_anything_is_read(segment, units, says):
    with pytest.raises(ValueError, match=says):
        segment.read(units)
    assert segment.bytes_read().payload == 0


def test_a_closed_segment_refuses_to_read(segment):
    with segment as opened:
        running = opened.read(np.array([[0, 0, 0, 0]]))
    assert running[0].result().shape == segment.unit_shape
    with pytest.raises(ValueError, match="closed"):
        segment.read(np.array([[0, 0, 0, 0]]))


@pytest.mark.parametrize("layout", [Layout(16), Layout(16, 2, 3), Layout(16, 1, 1, True)], ids=str)
@pytest.mark.parametrize(("dim", "share"), [(64, 0.1), (64, 1.0), (8, 0.1), (8, 0.6), (1, 0.3)])
def test_bytes_read_are_what_tensorstore_counts(tmp_path, layout, dim, share):
    """Payload, gaps that are read over, and the index of each shard that was touched."""
    keys, values = keys_and_values(0, 48, "bfloat16", 2, 3, dim, 16)
    store = PageStore.open(tmp_path)
    info = store.put(IDENTITY, np.arange(48 * 16), keys, values, layout=layout)
    segment = store.open_segment(info.key)
    units = all_units(segment)
    chosen = units[: max(1, int(share * len(units)))]
    before = metric("bytes_read")
    for read in segment.read(chosen):
        read.result()
    counted = segment.bytes_read()
    assert counted.payload + counted.index == metric("bytes_read") - before
    needed = len(chosen) * segment.unit_bytes
    shards = len(np.unique(chosen[:, :2], axis=0))
    assert counted.index == shards * segment.grid.index_bytes + (16 + 4) * len(chosen)
    if dim == 64:
        assert counted.payload == needed
    else:
        assert counted.payload >= needed


def test_any_reader_of_zarr3_opens_the_units(segment, store):
    """The array describes itself: axes, what a unit's elements are, whose it is."""
    array = ts.open(
        {"driver": "zarr3", "kvstore": f"file://{folder_of(store)}/"}, open=True, read=True
    ).result()
    spec = array.spec().to_json()["metadata"]
    assert spec["dimension_names"] == ["layer group", "head group", "page", "kind", "element"]
    assert spec["attributes"]["unit_shape"] == list(segment.unit_shape)
    assert spec["attributes"]["segment"] == segment.info.key
    keys, values = keys_and_values()
    stored = array[1, 0, 4, 0].read().result()
    unit, tag = stored[: segment.unit_bytes // 2], stored[segment.unit_bytes // 2 :]
    assert unit.tobytes() == expected((1, 0, 0, 4), keys, values, LAYOUT)
    assert tag.view("<u8").tolist() == [folder_number(folder_of(store).name), (2 * 1 + 0) * N + 4]


@pytest.mark.parametrize("how", DAMAGES)
def test_no_damage_to_any_file_gives_wrong_data(store, how):
    """Checksums are looked at before any use, of headers and of payload."""
    put(store, sketches=SKETCHES)
    names = damage_every_file(store._blobs.folder, how)
    assert len(names) == 4 + 1 + 1 + 1  # shards, zarr.json, sketch, manifest


def test_every_bit_of_a_shard_counts(store):
    put(store)
    shard = folder_of(store) / "c/0/0/0/0/0"
    whole = shard.read_bytes()
    segment = store.segments()[0].key
    units = np.array([[0, 0, 0, page] for page in range(N)])
    keys, values = keys_and_values()
    for place in itertools.chain(range(0, len(whole), 97), range(len(whole) - 40, len(whole))):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << (place % 8)
        shard.write_bytes(flipped)
        failed = 0
        for unit, read in zip(units, store.open_segment(segment).read(units), strict=True):
            got = outcome(read)
            if isinstance(got, UnitError):
                assert got.reason in ("checksum", "torn")
                failed += 1
            else:
                assert got == expected(unit, keys, values, LAYOUT)
        stored = N * store.open_segment(segment).grid.stored_unit_bytes
        assert failed == (1 if place < stored else N)


def test_units_beside_a_damaged_one_are_read(store):
    put(store, sketches=SKETCHES)
    shard = folder_of(store) / "c/1/1/0/0/0"
    data = bytearray(shard.read_bytes())
    stored = store.open_segment(store.segments()[0].key).grid.stored_unit_bytes
    data[2 * stored + 5] ^= 4
    shard.write_bytes(data)
    right, errors, misses = read_all(store.url)
    assert (right, misses) == (4 * N - 1, {})
    assert [(error.unit, error.reason) for error in errors] == [((1, 1, 0, 2), "checksum")]


def test_data_of_another_segment_in_its_place_is_noticed(store):
    """A folder of the same shape, swapped in, is not read as if it were one's own."""
    infos = [put(store, seed) for seed in (0, 1)]
    folders = {path.name[:64]: path for path in (store._blobs.folder / "data").iterdir()}
    mine, other = (folders[info.key] for info in infos)
    shutil.rmtree(mine)
    shutil.copytree(other, mine)
    assert store.find(IDENTITY, token_ids(0), P) is None
    assert store.stats().misses["checksum"] == 1


def shards_of(folder):
    return sorted(path for path in (folder / "c").rglob("*") if path.is_file())


@pytest.mark.parametrize("how", ["swapped", "copied over", "of an older writing", "of a sibling"])
def test_a_whole_shard_in_the_place_of_another_is_noticed(store, tmp_path, how):
    """Every checksum in it holds; its units are those of another place all the same."""
    info = put(store)
    one, two, *_ = shards_of(folder_of(store))
    assert one.stat().st_size == two.stat().st_size
    if how == "swapped":
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)
    elif how == "copied over":
        shutil.copy(two, one)
    elif how == "of an older writing":  # of the same tokens, by a program that computed otherwise
        older = one.read_bytes()
        store.remove(info.key)
        keys, values = keys_and_values(1)
        store.put(IDENTITY, token_ids(), values, keys, layout=LAYOUT)
        one = shards_of(folder_of(store))[0]
        one.write_bytes(older)
    else:
        other = PageStore.open(tmp_path / "other")
        put(other, 1)
        shutil.copy(shards_of(folder_of(other))[0], one)
    segment = store.open_segment(info.key)
    wrong = {(0, 0)} | ({(0, 1)} if how == "swapped" else set())
    units = all_units(segment)
    for unit, read in zip(units, segment.read(units), strict=True):
        if tuple(unit[:2].tolist()) in wrong:
            with pytest.raises(UnitError, match=r"\(foreign\).* another place") as caught:
                read.result()
            assert caught.value.unit == tuple(unit.tolist())
        else:
            assert isinstance(outcome(read), bytes)
    findings = store.verify(info.key)
    assert [(finding.reason, finding.detail[:6]) for finding in findings] == [
        ("foreign", f"{N} of {N}")
    ] * len(wrong)
    tiers = Tiers(1 << 20, segment.unit_shape, segment.grid.numpy_dtype)
    with Prefetcher(segment.read, tiers, timeout_s=20) as prefetcher:
        prefetcher.issue(units, demand=False)
        for _ in range(2):
            with pytest.raises(ReadFailedError, match="another place") as caught:
                prefetcher.collect(prefetcher.issue(units, demand=True))
            assert {tuple(unit[:2].tolist()) for unit in caught.value.units} == wrong


def test_a_unit_out_of_place_is_noticed_when_it_is_read_alone(store):
    """A batch that fails for another reason leads to the same answer, unit by unit."""
    info = put(store)
    one, two, three, _ = shards_of(folder_of(store))
    shutil.copy(two, one)
    three.unlink()
    reads = store.open_segment(info.key).read(np.array([[0, 0, 0, 1], [0, 1, 0, 1], [1, 0, 0, 1]]))
    assert outcome(reads[0]).reason == "foreign"
    assert outcome(reads[1]) == expected((0, 1, 0, 1), *keys_and_values(), LAYOUT)
    assert outcome(reads[2]).reason == "absent"


def test_a_damaged_segment_gives_way_to_a_shorter_whole_one(store):
    short = put(store, 0, 2, tokens=token_ids(0)[: 2 * P])
    long = put(store, 0)
    shutil.rmtree(next((store._blobs.folder / "data").glob(f"{long.key}*")))
    match = store.find(IDENTITY, token_ids(0), P)
    assert (match.key, match.pages) == (short.key, 2)
    assert store.stats().misses["torn"] == 1


def test_a_damaged_segment_is_stored_anew(store):
    """What cannot be opened is written over; then it is whole again, and gc frees the rest."""
    for name in ("manifest", "zarr.json"):
        info = put(store)
        root = store._blobs.folder
        path = (
            root / "segments" / f"{info.key}.json"
            if name == "manifest"
            else next((root / "data").glob(f"{info.key}*")) / name
        )
        path.write_bytes(b"")
        assert PageStore.open(root).find(IDENTITY, token_ids(0), P) is None
        put(store)
        assert_holds(store.find(IDENTITY, token_ids(0), P).segment, *keys_and_values())
        assert store.gc(min_age_s=0).segments == 1
        assert store.verify() == []
        assert len(list((root / "data").iterdir())) == 1


def test_a_segment_that_is_removed_while_it_is_open_gives_its_data_or_an_error(store):
    """A slow read that outlives its segment is right or an error, never other bytes."""
    info = put(store)
    segment = store.open_segment(info.key)
    started = segment.read(all_units(segment))
    store.remove(info.key)
    keys, values = keys_and_values()
    for unit, read in zip(all_units(segment), started, strict=True):
        with contextlib.suppress(UnitError):
            assert read.result(timeout=60).tobytes() == expected(unit, keys, values, LAYOUT)
    for read in segment.read(all_units(segment)):
        with pytest.raises(UnitError, match="absent"):
            read.result(timeout=60)
    put(store, 0)  # a new segment of the same key is another folder
    with pytest.raises(UnitError, match="absent"):
        segment.read(np.array([[0, 0, 0, 0]]))[0].result()


def test_a_read_that_takes_too_long_stops_waiting(segment, monkeypatch):
    """The wait is bounded; the read itself may still end."""
    promise, future = ts.Promise.new()
    stored = read_places(segment._reads[0]._array, segment.grid, np.array([0])).result()
    monkeypatch.setattr("kvjax.storage.stored_array.read_places", lambda *_: future)
    read = segment.read(np.array([[0, 0, 0, 0]]))[0]
    assert not read.done()
    called = []
    read.add_done_callback(called.append)
    with pytest.raises(TimeoutError):
        read.result(timeout=0.01)
    promise.set_result(stored)
    assert read.result(timeout=10).tobytes() == expected((0, 0, 0, 0), *keys_and_values(), LAYOUT)
    assert called == [read]


def test_the_second_read_of_a_unit_is_waited_for_no_longer_than_the_first_left(
    segment, monkeypatch
):
    """A batch fails late, and units that are then read one by one never return."""
    batch, alone = ts.Promise.new(), ts.Promise.new()
    futures = [batch[1], alone[1]]
    monkeypatch.setattr("kvjax.storage.stored_array.read_places", lambda *_: futures.pop(0))
    read, other = segment.read(np.array([[0, 0, 0, 0], [0, 0, 0, 1]]))
    threading.Timer(0.5, batch[0].set_exception, [OSError("the batch")]).start()
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        read.result(timeout=0.8)
    assert 0.5 < time.monotonic() - begun < 1.1

    def wait_long():
        with contextlib.suppress(UnitError):
            read.result(timeout=5)

    waiting = threading.Thread(target=wait_long)
    waiting.start()  # who has time does not hold up who has none
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        read.result(timeout=0.1)
    assert time.monotonic() - begun < 1
    alone[0].set_exception(ValueError("DATA_LOSS: Digest mismatch"))
    waiting.join(10)
    with pytest.raises(UnitError, match=r"page 0.*checksum"):  # read again once, not for each wait
        read.result(timeout=0.1)
    assert futures == []
    assert read.done()
    assert not other.done()  # nobody has asked for it since


def test_opening_and_closing_leaves_no_file_open(store):
    info = put(store)

    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("this system does not list open files in /proc")
    assert_holds(store.open_segment(info.key), *keys_and_values())
    before = descriptors()
    for _ in range(30):
        assert_holds(store.open_segment(info.key), *keys_and_values())
    assert descriptors() <= before + 2
