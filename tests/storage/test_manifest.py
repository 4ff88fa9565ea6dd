"""A manifest says what it is, or is a miss with the right reason."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest

from kvjax.storage import manifest as manifests
from kvjax.storage.errors import SegmentError
from kvjax.storage.layout import Grid
from kvjax.storage.manifest import Manifest, SketchEntry, decode, segment_key
from tests.storage.pages import IDENTITY, LAYOUT, D, H, L, N, token_ids

GRID = Grid(LAYOUT, L, N, H, D, "bfloat16")
GRID_FIELDS = {"layers": L, "pages": N, "heads": H, "head_dim": D, "dtype": "bfloat16"}
KEY = segment_key(IDENTITY, GRID, token_ids())


def manifest(**changes):
    fields = {
        "key": KEY,
        "identity": IDENTITY,
        "grid": GRID,
        "tokens": token_ids(),
        "label": "a “model”",
        "folder": f"{KEY}.1.00000000",
        "created": 1.7e9 + 0.123456789,
        "data_bytes": 10,
        "array_sha256": "0" * 64,
        "sketches": (SketchEntry("mean", "float8_e4m3fn", (2, 3), 6, "1" * 64),),
    }
    return Manifest(**(fields | changes))


def reason(data, key=KEY):
    with pytest.raises(SegmentError) as caught:
        decode(key, data)
    assert caught.value.key == key
    return caught.value.reason


def sealed(body):
    """A manifest with a checksum that fits, whatever its body says."""
    head = {"magic": manifests.MAGIC, "version": manifests.VERSION}
    return json.dumps(head | {"sha256": manifests._digest(body), "body": body}).encode()


def test_a_manifest_comes_back_field_by_field():
    one = manifest()
    two = decode(KEY, one.encode())
    for field in dataclasses.fields(Manifest):
        left, right = getattr(one, field.name), getattr(two, field.name)
        assert np.array_equal(left, right) if field.name == "tokens" else left == right
    with pytest.raises(ValueError, match="read-only"):
        two.tokens[0] = 1


def test_no_flipped_bit_is_believed():
    """Wherever a bit flips, the manifest is a miss, or says exactly what was written."""
    data = manifest().encode()
    written = decode(KEY, data).encode()
    seen = set()
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << (place % 8)
        try:
            assert decode(KEY, bytes(flipped)).encode() == written
        except SegmentError as miss:
            seen.add(miss.reason)
    assert seen == {"torn", "foreign", "version", "checksum"}


@pytest.mark.parametrize("length", [0, 1, 10, 100, -1])
def test_a_manifest_cut_short_is_torn(length):
    assert reason(manifest().encode()[:length]) == "torn"


@pytest.mark.parametrize("data", [b"[]", b"{}", b"7", b'{"magic": "something"}', b"null"])
def test_a_file_of_something_else_is_foreign(data):
    assert reason(data) == "foreign"


@pytest.mark.parametrize("version", [0, 1, 6, "4", None])
def test_another_version_is_a_miss_of_its_own(version):
    written = json.loads(manifest().encode())
    assert reason(json.dumps(written | {"version": version}).encode()) == "version"


def test_a_manifest_of_version_2_is_read(monkeypatch):
    monkeypatch.setattr(manifests, "VERSION", 2)
    data = manifest().encode()
    monkeypatch.undo()
    assert np.array_equal(decode(KEY, data).tokens, token_ids())


def test_a_manifest_of_version_4_says_nothing_of_codecs(monkeypatch):
    body = json.loads(manifest().encode())["body"]
    assert body.pop("codec") == "none"
    monkeypatch.setattr(manifests, "VERSION", 4)
    data = sealed(body)
    monkeypatch.undo()
    assert decode(KEY, data).codec == "none"


def test_tokens_after_the_last_page_are_in_the_key_and_fewer_than_a_page():
    for count in range(1, 5):
        tokens = np.r_[token_ids(), range(count)].astype(np.int32)
        key = segment_key(IDENTITY, GRID, tokens)
        data = manifest(key=key, tokens=tokens, folder=f"{key}.1.00000000").encode()
        if count == 4:
            assert reason(data, key) == "foreign"
        else:
            assert decode(key, data).tokens.tolist() == tokens.tolist()
            assert reason(manifest(tokens=tokens).encode()) == "foreign"


def test_the_manifest_of_another_segment_is_foreign():
    other = dataclasses.replace(IDENTITY, tenant="b")
    key = segment_key(other, GRID, token_ids())
    assert reason(manifest().encode(), key) == "foreign"
    assert reason(manifest(identity=other).encode()) == "foreign"
    assert reason(manifest(key=key, identity=other).encode()) == "foreign"


def changes():
    """Each field that a key is made from, set to another value that could be true."""
    body = json.loads(manifest().encode())["body"]
    yield from (("identity", name, "other") for name in body["identity"])
    yield from (("layout", *pair) for pair in (("page_size", 2), ("layers", 1), ("heads", 2)))
    yield "layout", "split_kv", True
    for name, value in (("layers", 8), ("heads", 1), ("head_dim", 16), ("dtype", "float16")):
        yield "grid", name, value


@pytest.mark.parametrize(("group", "name", "value"), list(changes()))
def test_each_field_of_the_header_is_checked_against_the_key(group, name, value):
    """Another model, rope setting, dtype, page size, tenant or layout: a miss, never used."""
    body = json.loads(manifest().encode())["body"]
    assert body[group][name] != value
    body[group][name] = value
    assert reason(sealed(body)) == "foreign"


@pytest.mark.parametrize(
    "change",
    [
        {"identity": {"weights": "x"}},
        {"layout": {"page_size": 0}},
        {"tokens": "!!"},
        {"tokens": ""},
        {"sketches": [{}]},
        {"sketches": None},
        {"grid": {}},
        {"grid": None},
    ],
)
def test_fields_that_are_missing_or_make_no_sense_are_foreign(change):
    body = json.loads(manifest().encode())["body"]
    assert reason(sealed(body | change)) == "foreign"
    for name in ("tokens", "folder", "data_bytes"):
        assert reason(sealed({key: body[key] for key in body if key != name})) == "foreign"


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("created", [float("inf"), float("nan"), -1, "1", None, True, 1e300]),
        ("data_bytes", [1.5, -1, "10", None, True, 1 << 63, float("inf")]),
        ("label", [None, 7, ["a"], {}]),
        ("codec", [None, 7, "lz77", ["none"], {}]),
        ("array_sha256", [None, 7, "", "0" * 63, "g" * 64]),
        (
            "folder",
            [
                *(None, 7, "", "..", "../../etc", f"{KEY}/../..", f"{KEY}.1.00", f"{KEY}.1."),
                *(f"{'0' * 64}.1.00000000", f"{KEY}.x.00000000", f"{KEY}.1.00000000/"),
                *(f"{KEY}.1.00000000\n", f"{KEY}.-1.00000000", f"{KEY}.{'1' * 16}.00000000"),
            ],
        ),
        ("identity", [None, [], {"weights": 7}, "x"]),
        ("tokens", [None, 7, "é", [1]]),
        ("layout", [[], None, LAYOUT.__dict__ | {"split_kv": 0}]),
        ("grid", [[], *({**GRID_FIELDS, "pages": wrong} for wrong in (6.0, "6", True, 1 << 80))]),
    ],
)
def test_a_field_of_another_type_is_foreign_and_raises_nothing_else(field, values):
    body = json.loads(manifest().encode())["body"]
    assert field in body
    for value in values:
        assert reason(sealed(body | {field: value})) == "foreign", value


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "../../x"},
        {"name": 7},
        {"dtype": "no such"},
        {"dtype": 7},
        {"shape": 6},
        {"shape": [2.0, 3]},
        {"shape": [-2, -3]},
        {"bytes": 7},
        {"bytes": "6"},
        {"sha256": "x"},
        {"sha256": None},
        {"more": 1},
    ],
    ids=str,
)
def test_a_sketch_that_makes_no_sense_is_foreign(wrong):
    body = json.loads(manifest().encode())["body"]
    body["sketches"] = [body["sketches"][0] | wrong]
    assert reason(sealed(body)) == "foreign"


def test_a_manifest_that_is_nested_without_end_is_torn():
    assert reason(b"[" * 100_000) == "torn"
    assert reason(b'{"a":' * 100_000) == "torn"


def test_the_format_has_not_moved():
    """What is on disks already has this key and this form; a change needs a new version."""
    assert KEY == "f1299938dea38df20c30ebf546089252e8438ad7b918c1fd915e4bf17e7c849d"
    written = manifest(folder=f"{KEY}.1.00").encode()
    text = json.dumps(json.loads(written), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == "1e75e5957cd787082ceffa8259a8f6510597fd2c798548c6337db9a26a89b040"
