"""Units in fewer bytes: whatever the codec, what is read is what was stored, and bytes count."""

import json
import shutil

import numpy as np
import pytest
import tensorstore as ts

from kvjax.storage.blobs import Blobs
from kvjax.storage.errors import SegmentError, StoreError, UnitError
from kvjax.storage.layout import Grid, Layout
from kvjax.storage.page_order import PAGE_PLACES
from kvjax.storage.page_store import PageStore
from kvjax.storage.unit_codec import CODECS, UnitCodec, codec_of, fitted
from tests.storage.damage import DAMAGES, SKETCHES, damage_every_file, outcome
from tests.storage.pages import (
    IDENTITY,
    LAYOUT,
    H,
    L,
    N,
    P,
    all_units,
    assert_holds,
    bytes_below,
    keys_and_values,
    token_ids,
)

ENCODED = [codec for codec in CODECS if codec != "none"]


def like_real(seed=0, pages=N, dim=64, **shape):
    """Keys and values in bfloat16 with few exponents, and one number in 50 of any bits."""
    return tuple(map(_calmed, keys_and_values(seed, pages, dim=dim, **shape)))


def _calmed(array):
    bits = array.view(np.uint16).copy()
    rng = np.random.default_rng(int(bits.flat[0]))
    calm = rng.random(bits.shape) < 0.98
    exponent = rng.integers(118, 130, bits.shape).astype(np.uint16)
    return np.where(calm, bits & 0x8070 | exponent << 7, bits).astype(np.uint16).view(array.dtype)


def put(store, codec, both=None, **options):
    keys, values = like_real() if both is None else both
    options = {"layout": LAYOUT, **options}
    return store.put(IDENTITY, token_ids(), keys, values, codec=codec, **options)


def read_bytes():
    found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return found[0]["values"][0]["value"] if found and found[0]["values"] else 0


@pytest.fixture
def store(tmp_path):
    return PageStore.open(tmp_path / "pages")


@pytest.mark.parametrize("codec", ENCODED)
@pytest.mark.parametrize("layout", [LAYOUT, Layout(P, 4, 2, True)], ids=str)
def test_a_segment_comes_back_bit_for_bit_and_is_smaller(store, codec, layout):
    both = like_real()
    info = put(store, codec, layout=layout, sketches=SKETCHES)
    again = PageStore.open(store.url)
    assert info.bytes == again.stats().bytes
    assert [found.codec for found in again.segments()] == [info.codec] == [codec]
    assert_holds(again.open_segment(info.key), *both)
    assert again.verify() == []
    folder = store._blobs.folder
    assert info.bytes == bytes_below(folder) - (folder / "store.json").stat().st_size
    assert info.bytes < put(PageStore.open(folder / "plain"), "none", layout=layout).bytes
    assert put(store, "none", layout=layout, sketches=SKETCHES) == info  # it stays as it is


@pytest.mark.parametrize("codec", ENCODED)
def test_any_url_that_tensorstore_understands(codec):
    store = PageStore.open(f"memory://{codec}/")
    info = put(store, codec)
    assert_holds(store.open_segment(info.key), *like_real())
    assert store.verify() == []


def test_a_shard_that_lost_its_index_before_it_was_published_is_an_error(store, monkeypatch):
    monkeypatch.setattr(Blobs, "read_end", lambda blobs, name, size: b"")
    with pytest.raises(StoreError, match="it has no index"):
        put(store, "zstd")
    assert store.segments() == []
    assert not list((store._blobs.folder / "data").iterdir())


@pytest.mark.parametrize("codec", ["zstd", "blosc"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_does_not_compress_and_other_dtypes_come_back(store, codec, dtype):
    both = keys_and_values(3, dtype=dtype)
    info = put(store, codec, both)
    assert_holds(PageStore.open(store.url).open_segment(info.key), *both)
    assert info.bytes == store.stats().bytes


def test_splitzip_gives_way_where_it_saves_nothing(store):
    both = keys_and_values()
    info = put(store, "splitzip", both)
    assert info.codec == "none"
    assert_holds(store.open_segment(info.key), *both)


@pytest.mark.parametrize("codec", ENCODED)
@pytest.mark.parametrize("share", [0.2, 1.0])
def test_bytes_and_requests_are_what_tensorstore_reads(store, codec, share):
    both = like_real(0, 48, layers=2, heads=3, size=16)
    tokens = np.arange(48 * 16)
    info = store.put(IDENTITY, tokens, *both, layout=Layout(16), codec=codec)
    begun = read_bytes()
    segment = store.open_segment(info.key)
    opened = segment.bytes_read()
    assert opened.payload == 0
    assert opened.index == (288 * 4 if codec != "splitzip" else 0)  # a number a unit
    units = all_units(segment)
    chosen = units[: int(share * len(units))]
    before = read_bytes()
    assert before - begun >= opened.index
    for read in segment.read(chosen):
        read.result()
    read = segment.bytes_read()
    assert read.payload + read.index - opened.index == read_bytes() - before
    assert read.payload < 0.9 * len(chosen) * segment.unit_bytes
    assert read.requests <= len(chosen)
    assert (read.requests == 6) == (share == 1.0)  # a shard is one piece of its file


@pytest.mark.parametrize("codec", ENCODED)
@pytest.mark.parametrize("how", DAMAGES)
def test_no_damage_to_any_file_gives_wrong_data(store, codec, how):
    put(store, codec, sketches=SKETCHES)
    names = damage_every_file(store._blobs.folder, how, like_real())
    assert len(names) == 4 + 1 + 1 + 1 + (codec != "splitzip")  # and the sizes of units


@pytest.mark.parametrize("codec", ENCODED)
def test_a_whole_shard_in_the_place_of_another_is_noticed(store, codec):
    segment = store.open_segment(put(store, codec).key)
    (folder,) = (store._blobs.folder / "data").iterdir()
    shutil.copy(folder / "c/1/0/0/0/0", folder / "c/0/0/0/0/0")
    for unit, read in zip(all_units(segment), segment.read(all_units(segment)), strict=True):
        if unit[:2].tolist() == [0, 0]:
            with pytest.raises(UnitError, match=r"another place|torn|checksum"):
                read.result()
        else:
            assert isinstance(outcome(read), bytes)


@pytest.mark.parametrize("codec", ENCODED)
def test_pages_of_one_codec_go_on_those_of_another(store, codec):
    keys, values = like_real()
    first = token_ids()[: 2 * P]
    store.put(IDENTITY, first, keys[:, :2], values[:, :2], layout=LAYOUT, codec="splitzip")
    match = store.find(IDENTITY, first, layout=LAYOUT)
    rest = keys[:, 2:], values[:, 2:]
    info = store.put(IDENTITY, token_ids(), *rest, layout=LAYOUT, codec=codec, after=match)
    assert info.codec == codec
    segment = PageStore.open(store.url).open_segment(info.key)
    assert len(segment.arrays) == 2
    assert_holds(segment, keys, values)


@pytest.mark.parametrize("codec", ENCODED)
def test_pages_lie_in_another_order(store, codec):
    order = np.stack([np.random.default_rng(x).permutation(N) for x in range(L // 2 * H)])
    places = order.astype(np.int32).reshape(L // 2, H, N)
    info = put(store, codec, sketches={PAGE_PLACES: places})
    assert_holds(store.open_segment(info.key), *like_real())


def test_room_is_made_for_the_most_and_what_is_left_is_free_again(tmp_path):
    plain = put(PageStore.open(tmp_path / "plain"), "none").bytes
    store = PageStore.open(tmp_path / "pages", max_bytes=2 * plain + 1000)
    small = put(store, "zstd")
    keys, values = like_real(1)
    store.put(IDENTITY, token_ids(1), keys, values, layout=LAYOUT, codec="zstd")
    assert store.stats().bytes < 2 * plain
    assert {small.key} < {info.key for info in store.segments()}


@pytest.mark.parametrize(
    ("codec", "dtype", "says"),
    [
        ("lz77", "bfloat16", "codec is 'lz77'; give one of none, zstd, blosc, splitzip"),
        ("splitzip", "float32", "codec is 'splitzip' and k is float32; give bfloat16"),
    ],
)
def test_a_codec_that_cannot_be_is_refused_before_anything_is_written(store, codec, dtype, says):
    with pytest.raises(ValueError, match=says):
        put(store, codec, keys_and_values(dtype=dtype))
    assert store.segments() == []


BOOK = list(range(16))


@pytest.mark.parametrize(
    "wrong",
    [
        {"codec": "lz77"},
        {"codec": "splitzip"},
        {"codec": "splitzip", "codebook": BOOK[:15], "escapes": 1},
        {"codec": "splitzip", "codebook": [*BOOK[:15], 0], "escapes": 1},
        {"codec": "splitzip", "codebook": [*BOOK[:15], 256], "escapes": 1},
        {"codec": "splitzip", "codebook": "0123456789abcdef", "escapes": 1},
        {"codec": "splitzip", "codebook": BOOK, "escapes": -1},
        {"codec": "splitzip", "codebook": BOOK, "escapes": "1"},
    ],
    ids=str,
)
def test_a_description_of_no_codec_is_refused(wrong):
    with pytest.raises(ValueError, match=r"codec is|codebook is|room is"):
        codec_of(wrong)


def test_a_codec_is_what_its_description_says():
    grid = Grid(LAYOUT, L, N, H, 64, "bfloat16")
    for name in CODECS:
        codec = fitted(name, grid, *like_real())
        assert codec_of(json.loads(json.dumps(codec.attributes()))) == codec
    assert UnitCodec().attributes() == {}


def test_a_description_that_is_whole_but_of_no_codec_is_a_miss(store, monkeypatch):
    monkeypatch.setattr(UnitCodec, "attributes", lambda codec: {"codec": "lz77"})
    info = put(store, "none")
    with pytest.raises(SegmentError, match=r"foreign.*lz77"):
        store.open_segment(info.key)
