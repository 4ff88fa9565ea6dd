"""What is stored is found by its tokens and comes back bit for bit, whoever opens the store."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from kvjax.storage import catalog, prefix_index
from kvjax.storage import manifest as manifests
from kvjax.storage.errors import (
    NotAStoreError,
    ReadOnlyStoreError,
    SegmentError,
    StoreError,
    UnknownKeyError,
)
from kvjax.storage.keys import Identity
from kvjax.storage.layout import Layout
from kvjax.storage.page_store import PageStore
from tests.storage.pages import (
    IDENTITY,
    LAYOUT,
    H,
    L,
    N,
    P,
    assert_holds,
    bytes_below,
    files_of,
    keys_and_values,
    put,
    token_ids,
)

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
LAYOUTS = [
    Layout(P, layers, heads, split)
    for layers in (1, 2, 4)
    for heads in (1, 2)
    for split in (False, True)
]


@pytest.fixture
def store(tmp_path):
    return PageStore.open(tmp_path / "pages")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_dtype_and_layout_comes_back_bit_for_bit(tmp_path, dtype, layout):
    keys, values = keys_and_values(3, dtype=dtype)
    info = PageStore.open(tmp_path).put(IDENTITY, token_ids(), keys, values, layout=layout)
    assert (info.dtype, info.layout, info.shape) == (dtype, layout, keys.shape)
    assert_holds(PageStore.open(tmp_path).open_segment(info.key), keys, values)


def test_all_zeros_are_stored_and_not_taken_for_missing(store):
    keys = np.zeros((L, N, H, P, 8), np.float16)
    info = store.put(IDENTITY, token_ids(), keys, keys, layout=LAYOUT)
    assert_holds(store.open_segment(info.key), keys, keys)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (3, 2, 5, 7, 3), (2, 40, 1, 16, 64)])
def test_any_extents(store, shape):
    layers, pages, heads, size, dim = shape
    keys, values = keys_and_values(1, pages, "float32", layers, heads, dim, size)
    tokens = np.arange(pages * size)
    info = store.put(IDENTITY, tokens, keys, values, layout=Layout(size, 1, heads))
    assert_holds(store.open_segment(info.key), keys, values)


def test_arrays_that_are_views_are_stored_as_they_read(store):
    keys, values = keys_and_values(2)
    backwards = np.ascontiguousarray(keys.view(np.uint16)[::-1]).view(keys.dtype)[::-1]
    across = np.ascontiguousarray(values.swapaxes(0, 4).view(np.uint16)).view(values.dtype)
    info = store.put(IDENTITY, token_ids(), backwards, across.swapaxes(0, 4), layout=LAYOUT)
    assert_holds(store.open_segment(info.key), keys, values)


@pytest.mark.parametrize("url", ["memory://", "memory://some/pages", "file"])
def test_any_url_that_tensorstore_understands(tmp_path, url):
    store = PageStore.open(f"file://{tmp_path}/a%20b/" if url == "file" else url)
    keys, values = keys_and_values()
    info = put(store)
    assert store.find(IDENTITY, token_ids(), P).key == info.key
    assert_holds(store.open_segment(info.key), keys, values)
    assert store.verify() == []
    store.flush()
    store.remove(info.key)
    assert store.segments() == []
    assert store.find(IDENTITY, token_ids(), P) is None
    if url == "file":
        assert files_of(tmp_path) == ["a b/store.json"]


def test_sketches_come_back_with_the_segment(store):
    sketches = {
        "mean": np.arange(6, dtype=np.float32).reshape(2, 3),
        "bits": np.arange(256, dtype=np.uint8),
        "scale": np.ones((2, 0, 3), np.int16),
        "big_endian": np.arange(3, dtype=">i4"),
        "scalar": np.array(2.5),
        "bf16": keys_and_values()[0][0, 0],
    }
    info = put(store, sketches=sketches, label="a model")
    again = PageStore.open(store.url).open_segment(info.key)
    read = again.sketches()
    assert read.keys() == sketches.keys()
    for name, sketch in sketches.items():
        assert read[name].shape == sketch.shape
        if name == "bf16":
            assert read[name].tobytes() == sketch.tobytes()
        else:
            np.testing.assert_array_equal(read[name], sketch)
    assert (again.info.label, again.info.sketch_bytes) == (
        "a model",
        sum(sketch.nbytes for sketch in sketches.values()),
    )
    assert again.bytes_read().sketches == again.info.sketch_bytes


def test_find_gives_the_longest_run_of_full_pages(store):
    short = put(store, seed=1, pages=2, tokens=token_ids(0)[: 2 * P])
    full = put(store, seed=0)
    cases = [(N * P, full, N), (N * P + 3, full, N), (N * P - 1, full, N - 1), (P, full, 1)]
    for length, info, pages in cases:
        match = store.find(IDENTITY, np.r_[token_ids(0), [1, 2, 3]][:length], P)
        assert (match.key, match.pages) == (info.key, pages)
    assert store.find(IDENTITY, token_ids(0)[: P - 1], P) is None
    store.remove(full.key)
    match = store.find(IDENTITY, token_ids(0), P)
    assert (match.key, match.pages) == (short.key, 2)


def test_a_request_that_shares_only_the_first_pages_of_a_longer_segment_gets_these(store):
    """Only the contiguous head that is shared counts, and page i of it is page i of the prompt."""
    info = put(store)
    keys, values = keys_and_values()
    for shared in range(N + 1):
        tokens = token_ids(0).copy()
        tokens[shared * P :] += 1
        match = store.find(IDENTITY, tokens, P)
        if shared == 0:
            assert match is None
        else:
            assert (match.key, match.pages) == (info.key, shared)
            assert_holds(match.segment, keys, values, match.pages)


def test_a_token_that_differs_inside_a_page_ends_the_match_before_that_page(store):
    put(store)
    for place in range(N * P):
        tokens = token_ids(0).copy()
        tokens[place] += 1
        match = store.find(IDENTITY, tokens, P)
        assert (match.pages if match else 0) == place // P


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Identity)])
def test_another_identity_finds_nothing(store, field):
    """Weights, rope and dtype, adapter version, tenant and inputs each keep pages apart."""
    put(store)
    other = dataclasses.replace(IDENTITY, **{field: "other"})
    assert store.find(other, token_ids(0), P) is None
    assert store.find(IDENTITY, token_ids(0), P).pages == N
    assert store.stats().misses["absent"] == 1


def test_two_identities_keep_their_own_pages_for_the_same_tokens(store):
    tenants = [dataclasses.replace(IDENTITY, tenant=name) for name in ("", "a", "b")]
    for seed, tenant in enumerate(tenants):
        put(store, seed=seed, tokens=token_ids(0), identity=tenant)
    for seed, tenant in enumerate(tenants):
        match = store.find(tenant, token_ids(0), P)
        assert match.segment.info.identity == tenant
        assert_holds(match.segment, *keys_and_values(seed))


def test_another_page_size_finds_nothing(store):
    put(store)
    assert store.find(IDENTITY, token_ids(0), 2 * P) is None
    assert store.find(IDENTITY, token_ids(0), layout=Layout(P, 1, 1)) is None
    assert store.find(IDENTITY, token_ids(0), layout=LAYOUT).pages == N


def test_layouts_and_dtypes_of_one_prefix_stand_side_by_side(store):
    """The physical form is in the key, and says how a segment is read: never another's units."""
    infos = {}
    for layout in LAYOUTS:
        for dtype in ("bfloat16", "float32"):
            arrays = keys_and_values(len(infos), dtype=dtype)
            info = store.put(IDENTITY, token_ids(0), *arrays, layout=layout)
            infos[info.key] = arrays
    assert len(infos) == 2 * len(LAYOUTS)
    again = PageStore.open(store.url)
    for key, arrays in infos.items():
        assert_holds(again.open_segment(key), *arrays)
    for layout in LAYOUTS:
        assert again.find(IDENTITY, token_ids(0), layout=layout).segment.info.layout == layout


def test_equal_keys_are_no_proof_tokens_and_identity_are_compared(store, monkeypatch):
    """With a hash that collides always, nothing is found that was not asked for."""

    def colliding(identity, namespace, tokens, page_size):
        return ["7" * 64] * (len(tokens) // page_size)

    monkeypatch.setattr(prefix_index, "page_keys", colliding)
    monkeypatch.setattr(manifests, "prompt_key", lambda *_: "7" * 64)
    put(store)
    assert store.find(IDENTITY, token_ids(0), P).pages == N
    assert store.find(IDENTITY, token_ids(0)[: 3 * P], P).pages == 3
    assert store.find(IDENTITY, token_ids(1), P) is None
    assert store.stats().misses["tokens differ"] == 1
    assert store.find(dataclasses.replace(IDENTITY, tenant="b"), token_ids(0), P) is None
    assert store.stats().misses["foreign"] == 1


def test_a_new_store_on_the_same_path_sees_everything(tmp_path):
    """The index is rebuilt from manifests; page counts, hits and times are as they were."""
    store = PageStore.open(tmp_path)
    infos = [put(store, seed) for seed in range(3)]
    for _ in range(2):
        store.find(IDENTITY, token_ids(1), P)
    store.flush()
    before = store.segments()
    assert [info.hits for info in before] == [2, 0, 0]
    again = PageStore.open(tmp_path, read_only=True)
    assert again.segments() == before
    for seed, info in enumerate(infos):
        match = again.find(IDENTITY, token_ids(seed), P)
        assert (match.key, match.pages) == (info.key, N)
        assert_holds(match.segment, *keys_and_values(seed))


def test_a_segment_of_an_unreadable_version_is_a_counted_miss_and_is_stored_anew_beside(
    store, monkeypatch
):
    with monkeypatch.context() as former:
        former.setattr(manifests, "VERSION", 1)
        former.setattr(manifests, "READABLE", (1,))
        former.setattr(Layout, "namespace", lambda layout, grid: "units v1")
        old = put(store)
    store = PageStore.open(store.url)
    assert store.find(IDENTITY, token_ids(), P) is None
    assert store.stats().misses["version"] == 1
    new = put(store)
    assert new.key != old.key
    assert_holds(store.find(IDENTITY, token_ids(), P).segment, *keys_and_values())
    store.remove(old.key)
    assert store.gc(min_age_s=0).segments == 1
    assert [info.key for info in store.segments()] == [new.key]


def test_a_segment_of_version_2_is_read(store, monkeypatch):
    with monkeypatch.context() as former:
        former.setattr(manifests, "VERSION", 2)
        old = put(store)
    again = PageStore.open(store.url)
    assert_holds(again.find(IDENTITY, token_ids(), P).segment, *keys_and_values())
    assert put(again).key == old.key
    assert again.find(IDENTITY, token_ids(), P).segment.info.created == old.created


def test_tokens_after_the_last_page_are_part_of_what_a_key_stands_for(store):
    endings = ([], [7], [7, 8], [9, 8])
    infos = [put(store, tokens=np.r_[token_ids(), ending].astype(int)) for ending in endings]
    assert len({info.key for info in infos}) == 4
    again = PageStore.open(store.url, read_only=True)
    for info, ending in zip(infos, endings, strict=True):
        assert info.tokens == N * P + len(ending)
        with again.open_segment(info.key) as segment:
            assert segment.tokens.tolist() == [*token_ids(), *ending]
            assert_holds(segment, *keys_and_values())
        prompt = [*token_ids().tolist(), *ending]
        assert again.find(IDENTITY, prompt, P, exact=True).key == info.key
        assert again.find(IDENTITY, [*prompt, 6], P, exact=True) is None
    assert again.find(IDENTITY, [*token_ids().tolist(), 6, 6, 6, 6, 6], P).pages == N
    assert again.find(IDENTITY, token_ids()[:-P], P, exact=True) is None


def test_what_a_longer_segment_begins_with_can_be_removed(store):
    def stored(count, ending=(), **options):
        tokens = np.r_[token_ids()[: count * P], ending].astype(int)
        return put(store, pages=count, tokens=tokens, **options)

    ids = token_ids().tolist()
    shorter = [stored(2), stored(2, ids[2 * P : 2 * P + 3]), stored(6, [1])]
    kept = [
        stored(2, [ids[2 * P], ids[2 * P + 1] + 1]),  # it ends otherwise
        stored(3, sketches={"x": np.zeros(3)}),  # what is chosen by is in no other
        stored(3, layout=Layout(P, layers=4)),
        stored(3, identity=dataclasses.replace(IDENTITY, tenant="b")),
        put(store, seed=1, pages=3),
    ]
    longest = stored(6, [1, 2])
    assert store.remove_shorter(shorter[0].key) == []
    assert {info.key for info in store.remove_shorter(longest.key)} == {i.key for i in shorter}
    assert {info.key for info in store.segments()} == {i.key for i in (*kept, longest)}
    assert store.find(IDENTITY, [*ids[: 4 * P], 0, 0, 0], P).key == longest.key
    assert store.find(IDENTITY, [*ids[: 4 * P], 0, 0, 0], P).pages == 4
    assert store.remove_shorter(longest.key) == []


def test_nothing_is_removed_for_a_segment_that_is_damaged_or_gone(store):
    shorter, longer = put(store, pages=2), put(store)
    store.report(longer.key, "checksum", longer.created)
    assert store.remove_shorter(longer.key) == []
    store.remove(longer.key)
    assert store.remove_shorter(longer.key) == []
    assert [info.key for info in store.segments()] == [shorter.key]
    with pytest.raises(ValueError, match="read_only"):
        PageStore.open(store.url, read_only=True).remove_shorter(shorter.key)


def test_settings_of_the_process_are_not_in_the_key(tmp_path):
    """Capacity and place of a store change between restarts, and what is stored stays found."""
    put(PageStore.open(tmp_path / "one"))
    (tmp_path / "one").rename(tmp_path / "two")
    again = PageStore.open(tmp_path / "two", max_bytes=10**9)
    assert again.find(IDENTITY, token_ids(0), P).pages == N


def test_another_process_finds_it_and_what_it_removes_is_gone_here(tmp_path):
    store = PageStore.open(tmp_path)
    info = put(store)
    script = (
        "import sys; from kvjax.storage.page_store import PageStore\n"
        "from tests.storage.pages import *\n"
        "store = PageStore.open(sys.argv[1])\n"
        "match = store.find(IDENTITY, token_ids(0), P)\n"
        "assert_holds(match.segment, *keys_and_values(0))\n"
        "store.remove(match.key); print(put(store, 5).key)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert store.find(IDENTITY, token_ids(0), P) is None
    assert store.find(IDENTITY, token_ids(5), P).key == done.stdout.strip()
    assert [other.key for other in store.segments()] == [done.stdout.strip()]
    with pytest.raises(SegmentError, match="absent") as caught:
        store.open_segment(info.key)
    assert (caught.value.key, caught.value.reason) == (info.key, "absent")
    assert store.stats().misses["absent"] == 2


def test_what_is_stored_is_not_written_again(store):
    info = put(store)
    files = files_of(store._blobs.folder)
    assert put(store) == info
    assert files_of(store._blobs.folder) == files


def test_bytes_of_a_segment_are_those_of_its_files(store):
    """Sum of the entries, the counter and the folder agree."""
    for seed in range(3):
        put(store, seed, layout=LAYOUTS[seed], sketches={"s": np.arange(seed + 1)})
    store.remove(store.segments()[0].key)
    marker = len((store._blobs.folder / "store.json").read_bytes())
    total = sum(info.bytes for info in store.segments())
    assert store.stats().bytes == total == bytes_below(store._blobs.folder) - marker


def test_stats_count_sizes_ages_and_hits(store):
    assert store.stats().oldest is None
    put(store, sketches={"s": np.zeros(10, np.uint8)})
    for _ in range(3):
        store.find(IDENTITY, token_ids(0), P)
    store.find(IDENTITY, token_ids(8), P)
    stats = store.stats()
    assert (stats.segments, stats.hits, stats.sketch_bytes) == (1, 3, 10)
    assert 0 <= stats.idle <= stats.oldest < 60
    assert stats.misses == dict.fromkeys(stats.misses, 0) | {"absent": 1}
    assert (stats.evicted, stats.lost_uses, stats.max_bytes) == (0, 0, None)


def test_a_read_only_store_answers_and_never_writes(tmp_path):
    info = put(PageStore.open(tmp_path))
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in files_of(tmp_path)}
    store = PageStore.open(tmp_path, read_only=True)
    assert_holds(store.find(IDENTITY, token_ids(0), P).segment, *keys_and_values())
    assert store.segments()[0].hits == 1
    store.flush()
    for write in (lambda: put(store, 1), lambda: store.remove(info.key), store.gc):
        with pytest.raises(ReadOnlyStoreError, match="read_only=True"):
            write()
    assert before == {name: (tmp_path / name).stat().st_mtime_ns for name in files_of(tmp_path)}


def test_places_that_are_no_store_are_refused_and_left_alone(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotAStoreError, match="is a file"):
        PageStore.open(tmp_path / "file")
    with pytest.raises((NotAStoreError, StoreError), match="file"):
        PageStore.open(tmp_path / "file" / "below")
    with pytest.raises(NotAStoreError, match="holds no page store"):
        PageStore.open(tmp_path / "missing", read_only=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    with pytest.raises(NotAStoreError, match=r"thesis\.tex"):
        PageStore.open(tmp_path / "other")
    with pytest.raises(NotAStoreError, match="nonsense"):
        PageStore.open("nonsense://place")
    with pytest.raises(ValueError, match="max_bytes is 0"):
        PageStore.open(tmp_path / "new", max_bytes=0)
    assert files_of(tmp_path) == ["file", "other/thesis.tex"]
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize(
    "marker", ["", "{}", "[1]", '{"magic": "other"}', "\0\0", "[" * 100_000], ids=range(6)
)
def test_a_store_whose_marker_is_damaged_says_so_and_opens_without_it(tmp_path, marker):
    put(PageStore.open(tmp_path))
    (tmp_path / "store.json").write_text(marker)
    with pytest.raises(NotAStoreError, match=r"store\.json"):
        PageStore.open(tmp_path)
    (tmp_path / "store.json").unlink()
    assert PageStore.open(tmp_path).find(IDENTITY, token_ids(0), P).pages == N


def test_a_store_of_another_version_is_refused(tmp_path):
    PageStore.open(tmp_path)
    marker = json.loads((tmp_path / "store.json").read_text())
    (tmp_path / "store.json").write_text(json.dumps(marker | {"version": 2}))
    with pytest.raises(NotAStoreError, match="version 2; this program reads 1"):
        PageStore.open(tmp_path)


@pytest.mark.parametrize("key", ["", "../../etc/passwd", "a" * 63, "A" * 64, "a" * 64 + "/"])
def test_keys_that_are_none_are_refused(store, key):
    for call in (store.open_segment, store.remove, store.verify):
        with pytest.raises(ValueError, match="64 hexadecimal"):
            call(key)


def test_wrong_arguments_of_put_are_named_and_nothing_is_written(store):
    keys, values = keys_and_values()
    good = {"identity": IDENTITY, "tokens": token_ids(), "k": keys, "v": values, "layout": LAYOUT}
    bits = keys.view(np.uint16)
    cases = [
        ({"k": keys[0]}, "k has shape"),
        ({"v": values[:, :2]}, "they must agree"),
        ({"v": values.astype(np.float32)}, "they must agree"),
        ({"layout": Layout(8)}, "pages of 4 tokens"),
        ({"tokens": token_ids()[:-1]}, "23 tokens for 6 pages of 4"),
        ({"tokens": np.r_[token_ids(), token_ids()[:P]]}, "28 tokens for 6 pages of 4"),
        ({"tokens": -token_ids() - 1}, "token id"),
        ({"layout": Layout(P, layers=3)}, r"divide the model's 4 layers; give one of \[1, 2, 4\]"),
        ({"layout": Layout(P, heads=4)}, r"divide the model's 2 heads"),
        ({"k": bits, "v": bits}, "dtype uint16 cannot be stored; allowed: bfloat16"),
        ({"k": keys[:, :0], "v": values[:, :0], "tokens": []}, "pages is 0"),
        ({"sketches": {"../x": bits}}, "no file name"),
        ({"sketches": {"x": np.array(["text"])}}, "sketch 'x' has dtype"),
        ({"sketches": {"x": np.array([None])}}, "sketch 'x' has dtype"),
    ]
    for wrong, says in cases:
        with pytest.raises(ValueError, match=says):
            store.put(**(good | wrong))
    assert files_of(store._blobs.folder) == ["store.json"]
    with pytest.raises(ValueError, match=r"Layout\.layers is 0"):
        Layout(layers=0)


def test_a_key_is_told_by_its_first_digits(store):
    with pytest.raises(UnknownKeyError, match="no stored prefix has a key that starts with '5'"):
        store.full_key("5")
    keys = [put(store, seed).key for seed in range(17)]  # more than there are digits
    first = next(key[0] for key in keys if sum(other[0] == key[0] for other in keys) > 1)
    for key in keys:
        assert store.full_key(key) == store.full_key(key[:9]) == key
    with pytest.raises(UnknownKeyError, match=rf"prefixes have .* '{first}', such as .*more"):
        store.full_key(first)
    for none in ("", keys[0] + "0", keys[0].upper() + "G", "../"):
        with pytest.raises(UnknownKeyError, match="no stored prefix"):
            store.full_key(none)
    (store._blobs.folder / "segments" / f"{keys[0]}.json").write_text("{")
    assert store.full_key(keys[0][:9]) == keys[0]  # or it could not be removed


def test_removing_what_is_not_there_says_so(store):
    with pytest.raises(SegmentError, match="absent"):
        store.remove("0" * 64)


def test_a_store_that_disappears_is_an_error_of_files_or_a_miss(tmp_path):
    store = PageStore.open(tmp_path / "pages")
    put(store)
    (tmp_path / "pages").rename(tmp_path / "gone")
    assert store.find(IDENTITY, token_ids(0), P) is None
    assert store.segments() == []


def test_a_manifest_that_cannot_be_read_is_a_counted_miss(store, monkeypatch):
    """A device error is a miss with reason io, and what is stored stays."""
    info = put(store)
    read = catalog.Blobs.read

    def failing(blobs, name, known=None):
        if name.startswith("segments/"):
            raise StoreError(5, f"reading {name}: Input/output error")
        return read(blobs, name, known)

    monkeypatch.setattr(catalog.Blobs, "read", failing)
    assert store.find(IDENTITY, token_ids(0), P) is None
    assert store.stats().misses["io"] == 1
    monkeypatch.undo()
    assert store.find(IDENTITY, token_ids(0), P).key == info.key
