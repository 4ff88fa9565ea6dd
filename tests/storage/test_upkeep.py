"""verify finds what is damaged, gc frees what nothing leads to, and neither touches the rest."""

import json
import os

import numpy as np
import pytest

from kvjax.storage import manifest, unit_array
from kvjax.storage.blobs import Blobs
from kvjax.storage.errors import SegmentError, StoreError
from kvjax.storage.page_store import PageStore
from tests.storage.pages import (
    IDENTITY,
    N,
    P,
    assert_holds,
    bytes_below,
    files_of,
    keys_and_values,
    put,
    token_ids,
)


@pytest.fixture
def store(tmp_path):
    return PageStore.open(tmp_path / "pages")


def data_of(store, info):
    return next((store._blobs.folder / "data").glob(f"{info.key}*"))


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_verify_reads_everything_and_names_what_is_damaged(store):
    sketches = {"mean": np.arange(4)}
    whole, units, sketch, torn = (put(store, seed, sketches=sketches) for seed in range(4))
    flip(data_of(store, units) / "c/1/0/0/0/0", 3)
    flip(data_of(store, sketch) / "sketches/mean", 0)
    (store._blobs.folder / "segments" / f"{torn.key}.json").write_bytes(b"{")
    findings = {finding.key: finding for finding in store.verify()}
    assert findings.keys() == {units.key, sketch.key, torn.key}
    assert findings[units.key].part == "units of layer group 1, head group 0"
    assert findings[units.key].reason == "checksum"
    assert findings[units.key].detail.startswith(f"1 of {N} units; the first: unit (layer group 1")
    assert (findings[sketch.key].part, findings[sketch.key].reason) == ("sketches", "checksum")
    assert (findings[torn.key].part, findings[torn.key].reason) == ("manifest", "torn")
    assert store.verify(whole.key) == []
    assert store.verify(units.key) == [findings[units.key]]
    assert [finding.reason for finding in store.verify("0" * 64)] == ["absent"]


def test_verify_and_reading_change_nothing(store):
    put(store)
    before = files_of(store._blobs.folder)
    store.verify()
    assert files_of(store._blobs.folder) == before
    assert store.segments()[0].hits == 0


def test_gc_leaves_a_writer_in_progress_alone(store, monkeypatch):
    """Unpublished data is garbage only when it is old; the writer then publishes as if alone."""
    start_write, freed = unit_array.start_write, []

    def meanwhile(*arguments):
        freed.append(PageStore.open(store.url).gc())
        return start_write(*arguments)

    monkeypatch.setattr(unit_array, "start_write", meanwhile)
    info = put(store)
    assert len(freed) == 4
    assert all(result.segments == 0 for result in freed)
    assert_holds(store.open_segment(info.key), *keys_and_values())


def test_gc_leaves_what_is_published_while_it_looks(store, monkeypatch):
    """Folders are listed before manifests: what appears between the two is not among them."""
    writer, names, infos = PageStore.open(store.url), Blobs.names, []

    def publishing(blobs, prefix=""):
        found = names(blobs, prefix)
        if blobs is store._blobs and prefix == "segments/" and not infos:
            infos.append(put(writer))
        return found

    monkeypatch.setattr(Blobs, "names", publishing)
    assert store.gc(min_age_s=0).segments == 0
    assert_holds(store.open_segment(infos[0].key), *keys_and_values())


def test_gc_leaves_data_that_a_manifest_names_which_was_replaced_meanwhile(store):
    """What this process knows of a manifest may be old."""
    other = PageStore.open(store.url)
    info = put(store)
    put(other, sketches={"a.b": np.arange(3)})
    assert store.gc(min_age_s=0).segments == 1
    assert_holds(PageStore.open(store.url).open_segment(info.key), *keys_and_values())


def test_gc_leaves_a_damaged_manifest_that_was_repaired_meanwhile(store, monkeypatch):
    info = put(store)
    path = store._blobs.folder / "segments" / f"{info.key}.json"
    path.write_bytes(b"{")
    store, writer = PageStore.open(store.url), PageStore.open(store.url)
    delete_if, infos = Blobs.delete_if, []

    def repairing(blobs, name, generation):
        infos.append(put(writer))
        return delete_if(blobs, name, generation)

    monkeypatch.setattr(Blobs, "delete_if", repairing)
    store.gc(min_age_s=0)
    assert len(infos) == 1
    assert_holds(store.open_segment(info.key), *keys_and_values())


def test_gc_leaves_data_whose_manifest_cannot_be_read_just_now(store, monkeypatch):
    info = put(store)
    fresh, read = PageStore.open(store.url), Blobs.read

    def failing(blobs, name, known=None):
        if name.startswith("segments/"):
            raise StoreError(5, "Input/output error")
        return read(blobs, name, known)

    fresh._catalog.forget(info.key)
    with monkeypatch.context() as patch:
        patch.setattr(Blobs, "read", failing)
        assert fresh.gc(min_age_s=0).segments == 0
    assert_holds(fresh.open_segment(info.key), *keys_and_values())


@pytest.mark.parametrize("field", ["folder", "created", "tokens"])
def test_one_manifest_that_lies_breaks_no_other_and_removes_nothing_else(store, field):
    kept, liar = put(store, 0), put(store, 1)
    path = store._blobs.folder / "segments" / f"{liar.key}.json"
    written = json.loads(path.read_text())
    wrong = {"folder": "../segments", "created": float("inf"), "tokens": 7}[field]
    body = written["body"] | {field: wrong}
    path.write_text(json.dumps(written | {"body": body, "sha256": manifest._digest(body)}))
    for name, data in (("x", b"["), ("y" * 64, b"[" * 100_000), ("é", b"{}")):
        (path.parent / f"{name}.json").write_bytes(data)
    (store._blobs.folder / "use").mkdir(exist_ok=True)
    (store._blobs.folder / "use" / f"{kept.key}.json").write_bytes(b'{"hits": Infinity}')
    again = PageStore.open(store.url, max_bytes=10**9)
    assert [info.key for info in again.segments()] == [kept.key]
    assert again.remove(liar.key) == 0
    assert_holds(again.find(IDENTITY, token_ids(0), P).segment, *keys_and_values(0))
    assert again.verify(kept.key) == []


def test_gc_frees_old_data_that_no_manifest_names(store):
    kept, lost = put(store, 0), put(store, 1)
    (store._blobs.folder / "segments" / f"{lost.key}.json").unlink()
    size = bytes_below(data_of(store, lost))
    assert store.gc().bytes == 0
    folder = data_of(store, lost)
    old = folder.with_name(folder.name.replace(folder.name.split(".")[1], "1600000000000"))
    os.rename(folder, old)
    freed = store.gc()
    assert (freed.segments, freed.bytes) == (1, size)
    assert [info.key for info in store.segments()] == [kept.key]
    assert_holds(store.open_segment(kept.key), *keys_and_values(0))
    assert store.gc(min_age_s=0).segments == 0


def test_gc_frees_damaged_segments_and_counts_of_what_is_gone(store):
    info = put(store)
    store.find(IDENTITY, token_ids(), P)
    store.flush()
    (store._blobs.folder / "segments" / f"{info.key}.json").write_bytes(b"")
    assert store.find(IDENTITY, token_ids(), P) is None
    freed = store.gc(min_age_s=0)
    assert freed.segments == 2
    assert freed.bytes > 0
    assert files_of(store._blobs.folder) == ["store.json"]


def test_gc_leaves_what_another_version_or_program_wrote(store):
    """What cannot be read here is not garbage: neither the manifest nor the data that it names."""
    info = put(store)
    path = store._blobs.folder / "segments" / f"{info.key}.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps(written | {"version": manifest.VERSION + 1}))
    (store._blobs.folder / "data" / "notes").mkdir()
    (store._blobs.folder / "data" / "notes" / "mine.txt").write_text("x")
    before = files_of(store._blobs.folder)
    assert store.gc(min_age_s=0).segments == 0
    assert files_of(store._blobs.folder) == before
    assert store.find(IDENTITY, token_ids(), P) is None
    assert store.stats().misses["version"] == 1
    with pytest.raises(SegmentError, match="version"):
        put(store)
    path.write_text(json.dumps(written))
    assert_holds(store.find(IDENTITY, token_ids(), P).segment, *keys_and_values())


def test_remove_frees_everything_of_a_segment_and_nothing_else(store):
    kept, gone = put(store, 0), put(store, 1, sketches={"s": np.zeros(3)})
    store.find(IDENTITY, token_ids(1), P)
    store.flush()
    assert store.remove(gone.key) == gone.bytes
    assert not [name for name in files_of(store._blobs.folder) if gone.key in name]
    assert_holds(store.open_segment(kept.key), *keys_and_values(0))


def test_remove_of_a_damaged_segment_lets_gc_free_it(store):
    info = put(store)
    (store._blobs.folder / "segments" / f"{info.key}.json").write_bytes(b"{}")
    assert store.remove(info.key) == 0
    assert store.segments() == []
    assert store.gc(min_age_s=0).bytes > 0
    assert files_of(store._blobs.folder) == ["store.json"]


def test_removing_twice_at_once_is_no_error(store):
    info = put(store)
    other = PageStore.open(store.url)
    store.remove(info.key)
    with pytest.raises(SegmentError, match="absent"):
        other.remove(info.key)
