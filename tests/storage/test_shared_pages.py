"""Segments that begin with another's pages: written once, kept as long as somebody needs them."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from kvjax.storage import manifest as manifests
from kvjax.storage.blobs import Blobs
from kvjax.storage.errors import SegmentError, StoreError
from kvjax.storage.layout import Layout
from kvjax.storage.page_order import PAGE_PLACES
from kvjax.storage.page_store import PageStore
from kvjax.storage.segment_writer import Beginning
from tests.storage.pages import (
    IDENTITY,
    LAYOUT,
    N,
    P,
    all_units,
    assert_holds,
    bytes_below,
    keys_and_values,
    put,
    token_ids,
)

MORE = 3
ROOT = pathlib.Path(__file__).resolve().parents[2]
TOKENS = np.concatenate([token_ids(), token_ids(9, MORE), [7, 8]])


def pages_of(*parts):
    """Keys and values of first pages of seeds, one after the other."""
    both = [[x[:, :count] for x in keys_and_values(seed)] for seed, count in parts]
    return [np.concatenate(kind, axis=1) for kind in zip(*both, strict=True)]


def put_after(store, seed=9, pages=N, count=MORE, tokens=None, **options):
    """Stores what begins with the first pages of the segment that is there already."""
    ids = np.concatenate([token_ids()[: pages * P], token_ids(seed)[: count * P], [7]])
    ids = ids if tokens is None else tokens
    match = store.find(IDENTITY, ids, P)
    assert match is not None
    with match.segment:
        return store.put(
            IDENTITY, ids, *pages_of((seed, count)), layout=LAYOUT, after=match, **options
        )


def assert_is(store, info, *parts):
    with store.open_segment(info.key) as segment:
        assert segment.grid.pages == sum(count for _, count in parts)
        assert_holds(segment, *pages_of(*parts))


def test_pages_are_not_written_again(tmp_path):
    store = PageStore.open(tmp_path)
    first = put(store)
    size = bytes_below(tmp_path / "data")
    second = put_after(store)
    assert second.shape[1] == N + MORE
    assert second.tokens == (N + MORE) * P + 1
    assert bytes_below(tmp_path / "data") - size < size * MORE / N * 1.3
    for opened in (store, PageStore.open(tmp_path, read_only=True)):
        assert_is(opened, first, (0, N))
        assert_is(opened, second, (0, N), (9, MORE))
    assert not store.verify()
    assert store.stats().bytes == bytes_below(tmp_path / "data") + bytes_below(
        tmp_path / "segments"
    )


def test_a_prompt_that_goes_on_finds_the_longer_one(tmp_path):
    store = PageStore.open(tmp_path)
    put(store)
    longer = put_after(store)
    asked = np.concatenate([token_ids(), token_ids(9)[: MORE * P], [7, 3, 3]])
    with PageStore.open(tmp_path).find(IDENTITY, asked, P).segment as segment:
        assert segment.info.key == longer.key


def test_a_chain_that_begins_in_the_midst_of_one(tmp_path):
    """Each shares what the one before it has, up to where they part."""
    store = PageStore.open(tmp_path)
    put(store)
    put_after(store)
    tokens = np.concatenate([token_ids(), token_ids(9)[: 2 * P], token_ids(5)[: 2 * P]])
    third = put_after(store, 5, count=2, tokens=tokens)
    branch = np.concatenate([token_ids()[: 2 * P], token_ids(4)[:P]])
    fourth = put_after(store, 4, count=1, tokens=branch)
    fresh = PageStore.open(tmp_path)
    assert_is(fresh, third, (0, N), (9, 2), (5, 2))
    assert_is(fresh, fourth, (0, 2), (4, 1))
    with fresh.open_segment(third.key) as segment:
        assert len(segment.arrays) == 3
        assert [array.of for array in segment.arrays] == [N, MORE, 2]
    assert not fresh.verify()


@pytest.mark.parametrize("order", ["first removed", "last removed"])
def test_files_stay_as_long_as_somebody_needs_them(tmp_path, order):
    store = PageStore.open(tmp_path)
    first, second = put(store), put_after(store)
    gone, left = (first, second) if order == "first removed" else (second, first)
    freed = PageStore.open(tmp_path).remove(gone.key)  # by a process that wrote neither
    store.refresh()
    if left is second:
        assert freed < 5000
        assert_is(store, second, (0, N), (9, MORE))
        assert store.gc(min_age_s=0).segments == 0
        assert_is(store, second, (0, N), (9, MORE))
    else:
        assert_is(store, first, (0, N))
    assert store.remove(left.key) > 5000
    assert not list((tmp_path / "data").iterdir())


def test_the_shorter_one_may_go(tmp_path):
    store = PageStore.open(tmp_path)
    first, second = put(store, tokens=token_ids()), put_after(store)
    assert [info.key for info in store.remove_shorter(second.key)] == [first.key]
    assert_is(PageStore.open(tmp_path), second, (0, N), (9, MORE))


def test_a_full_store_counts_shared_pages_once_and_never_takes_them_from_another(tmp_path):
    store = PageStore.open(tmp_path)
    put(store)
    size = store.stats().bytes
    limited = PageStore.open(tmp_path, max_bytes=2 * size + size // 2)
    second = put_after(limited)  # one and a half of the size of the first
    assert len(limited.segments()) == 2
    put(limited, seed=3)  # as large as the first: something must go
    limited.flush()
    left = {info.key for info in limited.segments()}
    assert limited.stats().bytes <= limited.max_bytes
    assert bytes_below(tmp_path / "data") <= limited.max_bytes
    if second.key in left:
        assert_is(limited, second, (0, N), (9, MORE))
    assert not limited.verify()


def test_an_open_longer_one_keeps_its_pages(tmp_path):
    """What this process reads is not evicted, wherever it lies."""
    store = PageStore.open(tmp_path)
    put(store)
    size = store.stats().bytes
    second = put_after(store)
    limited = PageStore.open(tmp_path, max_bytes=int(2.7 * size))
    with limited.open_segment(second.key) as segment:
        put(limited, seed=3)
        put(limited, seed=4)
        assert_holds(segment, *pages_of((0, N), (9, MORE)))
    assert not limited.verify()


def test_one_that_is_written_anew_leaves_its_files_to_who_shares_them(tmp_path):
    """Sketches are added to the shorter one: its folder is another one then."""
    store = PageStore.open(tmp_path)
    first, second = put(store), put_after(store)
    again = put(store, sketches={"mean": np.zeros(2, np.float32)})
    assert again.key == first.key
    store.gc(min_age_s=0)
    for opened in (store, PageStore.open(tmp_path)):
        assert_is(opened, second, (0, N), (9, MORE))
        assert_is(opened, first, (0, N))
    store.remove(second.key)
    assert store.gc(min_age_s=0).segments == 0
    assert_is(store, first, (0, N))


def test_pages_that_are_gone_are_a_miss_and_written_whole(tmp_path):
    """Another process removed them between finding and sharing them."""
    store = PageStore.open(tmp_path)
    put(store)
    match = store.find(IDENTITY, TOKENS, P)
    other = PageStore.open(tmp_path)
    other.remove(match.segment.info.key)
    keys, values = pages_of((9, MORE))
    info = store.put(IDENTITY, TOKENS, keys, values, layout=LAYOUT, after=match)
    assert PageStore.open(tmp_path).find(IDENTITY, TOKENS, P) is None
    (finding,) = PageStore.open(tmp_path).verify()
    assert (finding.key, finding.part) == (info.key, "manifest")
    whole = pages_of((0, N), (9, MORE))
    assert store.put(IDENTITY, TOKENS, *whole, layout=LAYOUT).key == info.key
    assert_is(PageStore.open(tmp_path), info, (0, N), (9, MORE))
    assert not store.verify()


def test_what_is_damaged_is_damaged_for_all_who_share_it(tmp_path):
    """Or the next to be found would be the other, with the same page."""
    store = PageStore.open(tmp_path)
    first, second = put(store), put_after(store)
    other = put(store, seed=3)
    store.report(second.key, "checksum", second.created)
    assert store.find(IDENTITY, TOKENS, P) is None
    assert len(store.segments()) == 3
    store.report(second.key, "checksum", second.created, remove=True)
    assert [info.key for info in store.segments()] == [other.key]
    assert PageStore.open(tmp_path).find(IDENTITY, TOKENS, P) is None
    assert put(store).key == first.key
    assert_is(store, first, (0, N))
    store.report(first.key, "checksum", 1.0, remove=True)  # one that was there before
    assert_is(store, first, (0, N))


def test_damage_of_pages_that_are_not_shared_condemns_nobody_else(tmp_path):
    store = PageStore.open(tmp_path)
    first = put(store)
    second = put_after(store)
    store.report(second.key, "checksum", second.created, page=N, remove=True)
    assert [info.key for info in store.segments()] == [first.key]
    assert_is(store, first, (0, N))
    second = put_after(store)
    store.report(second.key, "checksum", second.created, page=N - 1, remove=True)
    assert store.segments() == []


def test_places_of_pages_are_those_of_each_folder(tmp_path):
    """In an order of their own, in both, in one, in the other."""
    random = np.random.default_rng(0)

    def places(count):
        rows = np.tile(np.arange(count, dtype=np.int32), (2, 2, 1))
        return {PAGE_PLACES: random.permuted(rows, axis=2)}

    for number, (mine, theirs) in enumerate(((True, True), (True, False), (False, True))):
        store = PageStore.open(tmp_path / str(number))
        put(store, sketches=places(N) if theirs else None)
        info = put_after(store, sketches=places(MORE) if mine else None)
        fourth = np.concatenate([token_ids(), token_ids(9)[:P], token_ids(5)[:P]])
        again = put_after(store, 5, count=1, tokens=fourth)
        for opened in (store, PageStore.open(tmp_path / str(number))):
            assert_is(opened, info, (0, N), (9, MORE))
            assert_is(opened, again, (0, N), (9, 1), (5, 1))
        assert not store.verify()


@pytest.mark.parametrize("condemned", [False, True])
@pytest.mark.parametrize("shares", [False, True])
def test_what_is_written_anew_forgets_where_pages_lay_in_several_folders(
    tmp_path, shares, condemned
):
    store = PageStore.open(tmp_path)
    backwards = np.tile(np.arange(N, dtype=np.int32)[::-1], (2, 2, 1))
    first = put(store, sketches={PAGE_PLACES: backwards})
    former = put_after(store)
    if condemned:
        store.report(former.key, "checksum", former.created)
    with store.open_segment(first.key) as segment, store.open_segment(former.key) as old:
        again = store.put(
            IDENTITY,
            old.tokens,
            *pages_of(*((9, MORE),) if shares else ((0, N), (9, MORE))),
            layout=LAYOUT,
            sketches={"mean": np.zeros(1, np.float32)},
            after=Beginning(segment, N) if shares else None,
        )
    assert again.key == former.key
    assert again.created > former.created
    assert_is(store, again, (0, N), (9, MORE))


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    store = PageStore.open(tmp_path)
    first = put(store)
    before = sorted((tmp_path / "data").iterdir())

    def full(*_):
        raise StoreError(28, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr("kvjax.storage.segment_writer.write_shards", full)
        with pytest.raises(StoreError):
            put_after(store)
    assert sorted((tmp_path / "data").iterdir()) == before
    assert_is(store, first, (0, N))


def test_what_does_not_go_on_is_refused(tmp_path):
    store = PageStore.open(tmp_path)
    put(store)
    match = store.find(IDENTITY, TOKENS, P)
    keys, values = pages_of((9, MORE))

    def refused(said, tokens=TOKENS, identity=IDENTITY, layout=LAYOUT, after=match, both=None):
        k, v = both or (keys, values)
        with pytest.raises(ValueError, match=said):
            store.put(identity, tokens, k, v, layout=layout, after=after)

    refused("tokens do not begin", tokens=TOKENS[::-1])
    refused("another identity", identity=dataclasses.replace(IDENTITY, tenant="other"))
    refused("another identity", layout=Layout(page_size=P))
    refused("another identity", both=keys_and_values(9, MORE, dtype="float16"))
    refused("tokens for", tokens=TOKENS[: -P - 2])
    refused("after has 0 pages", after=Beginning(match.segment, 0), tokens=TOKENS[: MORE * P])
    more = np.concatenate([TOKENS[: N * P], TOKENS[:P], TOKENS[N * P :]])
    refused("after has 7 pages", after=Beginning(match.segment, N + 1), tokens=more)
    assert len(store.segments()) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("folder", "../../etc"),
        ("pages", 0),
        ("pages", N + 1),
        ("of", 1),
        ("of", "6"),
        ("data_bytes", -1),
        ("array_sha256", "x"),
        ("extra", 1),
    ],
)
def test_a_manifest_that_lies_about_shared_pages_is_a_miss(tmp_path, field, value):
    """Its folders are joined to paths, and removed with it."""

    store = PageStore.open(tmp_path)
    put(store)
    info = put_after(store)
    path = tmp_path / "segments" / f"{info.key}.json"
    head = json.loads(path.read_text())
    head["body"]["shared"][0][field] = value
    head["sha256"] = manifests._digest(head["body"])
    path.write_text(json.dumps(head))
    with pytest.raises(SegmentError) as caught:
        PageStore.open(tmp_path).open_segment(info.key)
    assert caught.value.reason == "foreign"


def test_gc_leaves_shared_pages_while_a_manifest_cannot_be_read(tmp_path, monkeypatch):
    store = PageStore.open(tmp_path)
    first, read = put(store), Blobs.read
    second = put_after(store)
    store.remove(first.key)

    def failing(blobs, name, known=None):
        if name == f"segments/{second.key}.json":
            raise StoreError(5, "Input/output error")
        return read(blobs, name, known)

    with monkeypatch.context() as patch:
        patch.setattr(Blobs, "read", failing)
        assert PageStore.open(tmp_path).gc(min_age_s=0).segments == 0
    assert_is(PageStore.open(tmp_path), second, (0, N), (9, MORE))


def test_requests_are_counted_over_all_folders(tmp_path):
    store = PageStore.open(tmp_path)
    put(store)
    info = put_after(store)
    with store.open_segment(info.key) as segment:
        for read in segment.read(all_units(segment)):
            read.result(timeout=60)
        counts = segment.bytes_read()
        assert counts.units == len(all_units(segment))
        assert counts.payload >= counts.units * segment.unit_bytes
        assert counts.requests == 2 * 4


KILLED = """
import os
import sys

from kvjax.storage import segment_writer
from kvjax.storage.page_store import PageStore
from tests.storage.test_shared_pages import put_after

whole = segment_writer.{place}


def killed(*args, **options):
    if {after}:
        whole(*args, **options)
    os._exit(9)


segment_writer.{place} = killed
put_after(PageStore.open(sys.argv[1]))
"""


@pytest.mark.parametrize("place", ["open_array", "write_shards"])
@pytest.mark.parametrize("after", [False, True])
def test_a_process_that_is_killed_leaves_the_store_as_it_was(tmp_path, place, after):
    """What it wrote is garbage; what it was to share is not."""
    store = PageStore.open(tmp_path)
    first = put(store)
    script = KILLED.format(place=place, after=after)
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, timeout=120)
    assert done.returncode == 9
    fresh = PageStore.open(tmp_path)
    assert [info.key for info in fresh.segments()] == [first.key]
    assert not fresh.verify()
    assert len(list((tmp_path / "data").iterdir())) == 2
    assert fresh.gc(min_age_s=0).segments == 1
    assert_is(fresh, first, (0, N))
    assert_is(fresh, put_after(fresh), (0, N), (9, MORE))
