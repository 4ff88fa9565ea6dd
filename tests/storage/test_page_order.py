"""Pages in an order of their own: read by name as ever, verified, mended, and in fewer requests."""

import itertools

import numpy as np
import pytest
import tensorstore as ts

from kvjax.storage import manifest as manifests
from kvjax.storage.errors import SegmentError, UnitError
from kvjax.storage.layout import Layout
from kvjax.storage.page_order import PAGE_PLACES, are_places, near_together
from kvjax.storage.page_store import PageStore
from kvjax.storage.unit_codec import UnitCodec
from kvjax.storage.unit_sizes import UnitSizes
from tests.storage.pages import (
    IDENTITY,
    LAYOUT,
    D,
    H,
    L,
    N,
    P,
    assert_holds,
    keys_and_values,
    put,
    token_ids,
)

LAYOUTS = [
    LAYOUT,
    Layout(page_size=P, layers=1, heads=1),
    Layout(page_size=P, layers=4, heads=2, split_kv=True),
]


def any_places(layout, seed=0):
    """Places that are others in every group."""
    groups = (L // layout.layers, H // layout.heads)
    rows = np.tile(np.arange(N, dtype=np.int32), (*groups, 1))
    return np.random.default_rng(seed).permuted(rows, axis=2)


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return request.param


def reversed_places():
    return {PAGE_PLACES: np.ascontiguousarray(any_places(LAYOUT)[..., ::-1])}


def test_every_page_is_found_whatever_the_order(tmp_path, layout):
    """In the process that wrote it, and after a restart."""
    store = PageStore.open(tmp_path)
    info = put(store, layout=layout, sketches={PAGE_PLACES: any_places(layout)})
    for opened in (store, PageStore.open(tmp_path, read_only=True)):
        with opened.open_segment(info.key) as segment:
            assert_holds(segment, *keys_and_values())
        match = opened.find(IDENTITY, token_ids(), P)
        assert match is not None
        assert match.pages == N
    assert not store.verify()


def test_files_have_the_pages_in_the_order_given(tmp_path):
    """Which is what makes neighbours of them."""
    layout = LAYOUTS[1]
    plain, ordered = (PageStore.open(tmp_path / name) for name in ("plain", "ordered"))
    order = any_places(layout)
    folders = []
    for store, sketches in ((plain, {}), (ordered, {PAGE_PLACES: order})):
        info = put(store, layout=layout, sketches=sketches)
        with store.open_segment(info.key) as segment:
            folders.append(
                (tmp_path / store.url.split("/")[-2] / "data" / segment.arrays[-1].folder, segment)
            )
    (before, segment), (after, _) = folders
    size = segment.grid.stored_unit_bytes
    for group in itertools.product(range(L), range(H)):
        shards = [
            (x / "c" / str(group[0]) / str(group[1]) / "0/0/0").read_bytes()
            for x in (before, after)
        ]
        for page, place in enumerate(order[group]):
            one, other = (
                shard[at * size :][: segment.unit_bytes]
                for shard, at in zip(shards, (page, place), strict=True)
            )
            assert one == other


def test_neighbours_come_in_one_request(tmp_path):
    """Counted as TensorStore counts what it reads of files; units are larger than its gaps."""
    layout = LAYOUTS[1]
    order = any_places(layout)
    both = keys_and_values(dim=64)
    sketches = {PAGE_PLACES: order}
    store = PageStore.open(tmp_path)
    info = store.put(IDENTITY, token_ids(), *both, layout=layout, sketches=sketches)
    with PageStore.open(tmp_path).open_segment(info.key) as segment:
        for places, requests in (([1, 2, 3], 1), ([0, 2, 4], 3), ([0, 1, 4, 5], 2), ([3], 1)):
            units = np.array([[2, 1, 0, page] for page in order[2, 1].argsort()[places]], np.int32)
            before, of_files = segment.bytes_read(), file_reads()
            for read in segment.read(units):
                read.result(timeout=60)
            after = segment.bytes_read()
            assert after.requests - before.requests == requests
            assert after.units - before.units == len(places)
            assert file_reads() - of_files == requests + 1  # and the shard's index
    sizes = UnitSizes(segment.grid, UnitCodec())
    assert sizes.requests_of_read(np.empty(0, np.int64), 255) == 0
    one_of_each = np.arange(0, L * H * N, N)
    assert sizes.requests_of_read(one_of_each, 255) == L * H
    assert sizes.requests_of_read(one_of_each, 1 << 30) == L * H


def file_reads():
    """How often TensorStore read of a file."""
    found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/batch_read")
    return sum(value["value"] for one in found for value in one["values"])


def test_near_keys_lie_next_to_each_other():
    """Pages of three meanings, in turn: in the order, each is a run."""
    random = np.random.default_rng(0)
    centers = 10 * random.normal(size=(3, D)).astype(np.float32)
    keys = centers[np.arange(12) % 3][None, :, None, None] + random.normal(
        size=(2, 12, 2, P, D)
    ).astype(np.float32)
    for layout in (Layout(page_size=P), Layout(page_size=P, layers=2, heads=2)):
        places = near_together(keys, layout)
        assert places.shape == (2 // layout.layers, 2 // layout.heads, 12)
        assert places.dtype == np.int32
        for row in places.reshape(-1, 12).argsort(axis=1):
            assert sorted(row) == list(range(12))
            assert row[0] == 0
            assert (np.diff(row % 3) != 0).sum() == 2


def test_an_order_is_made_of_whatever_keys(layout):
    """Equal pages, any dtype, NaN: each page has one place."""
    keys, _ = keys_and_values(dtype="float16")
    for given in (keys, np.zeros_like(keys), keys.astype(np.float32), keys[:, :1]):
        with np.errstate(all="ignore"):
            places = near_together(given, layout)
        assert (np.sort(places, axis=2) == np.arange(given.shape[1])).all()


@pytest.mark.parametrize(
    "wrong",
    [
        any_places(LAYOUT).astype(np.int64),
        any_places(LAYOUT)[:1],
        any_places(LAYOUT)[..., :-1],
        np.zeros_like(any_places(LAYOUT)),
        any_places(LAYOUT) + 1,
    ],
    ids=["dtype", "groups", "pages", "twice", "range"],
)
def test_what_is_no_order_is_refused(tmp_path, wrong):
    store = PageStore.open(tmp_path)
    with pytest.raises(ValueError, match=r"sketches\['page-places'\] is .* near_together"):
        put(store, sketches={PAGE_PLACES: wrong})
    assert store.segments() == []


def test_an_order_that_is_damaged_is_a_miss_and_never_wrong_pages(tmp_path):
    store = PageStore.open(tmp_path)
    info = put(store, sketches=reversed_places())
    (path,) = (tmp_path / "data").rglob(PAGE_PLACES)
    whole = path.read_bytes()
    for damaged in (whole[:-4], bytes([whole[0] ^ 1]) + whole[1:], None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        with pytest.raises(SegmentError):
            PageStore.open(tmp_path).open_segment(info.key)
        assert PageStore.open(tmp_path).find(IDENTITY, token_ids(), P) is None
        (finding,) = PageStore.open(tmp_path).verify()
        assert finding.key == info.key
    put(store)
    assert not store.verify()
    with store.open_segment(info.key) as segment:
        assert_holds(segment, *keys_and_values())


def test_a_page_that_is_damaged_is_named_as_it_was_asked_for(tmp_path):
    layout = LAYOUTS[1]
    order = any_places(layout)
    info = put(PageStore.open(tmp_path), layout=layout, sketches={PAGE_PLACES: order})
    with PageStore.open(tmp_path).open_segment(info.key) as segment:
        shard = tmp_path / "data" / segment.arrays[-1].folder / "c/3/0/0/0/0"
        content = bytearray(shard.read_bytes())
        content[2 * segment.grid.stored_unit_bytes] ^= 1
        shard.write_bytes(content)
        pages = range(N)
        reads = segment.read(np.array([[3, 0, 0, page] for page in pages], np.int32))
        bad = []
        for page, read in zip(pages, reads, strict=True):
            try:
                read.result(timeout=60)
            except UnitError as error:
                bad.append((page, error.unit, error.reason))
    page = order[3, 0].tolist().index(2)
    assert bad == [(page, (3, 0, 0, page), "checksum")]


def test_an_order_stays_with_the_pages_that_are_in_it(tmp_path):
    """Sketches that are added have the segment written anew: in the order it had."""
    store = PageStore.open(tmp_path)
    put(store, sketches=reversed_places())
    info = put(store, sketches={"mean": np.zeros(3, np.float32)})
    with PageStore.open(tmp_path).open_segment(info.key) as segment:
        assert segment.sketch_names == {PAGE_PLACES, "mean"}
        assert_holds(segment, *keys_and_values())


def test_a_longer_prefix_covers_one_in_another_order(tmp_path):
    store = PageStore.open(tmp_path)
    put(
        store,
        pages=3,
        tokens=token_ids()[: 3 * P],
        sketches={PAGE_PLACES: any_places(LAYOUT)[..., :3].argsort(2).astype(np.int32)},
    )
    longer = put(store)
    assert [info.shape[1] for info in store.remove_shorter(longer.key)] == [3]


def test_programs_that_know_no_order_do_not_read_it(tmp_path, monkeypatch):
    """They would take one page for another."""
    store = PageStore.open(tmp_path)
    info = put(store, sketches=reversed_places())
    monkeypatch.setattr(manifests, "READABLE", (2, 3))
    with pytest.raises(SegmentError) as caught:
        PageStore.open(tmp_path).open_segment(info.key)
    assert caught.value.reason == "version"


def test_are_places_knows_one(tmp_path):
    store = PageStore.open(tmp_path)
    with store.open_segment(put(store).key) as segment:
        assert are_places(any_places(LAYOUT), segment.grid, segment.arrays)
