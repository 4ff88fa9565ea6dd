import json
import struct

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.storage.tensor_file import map_tensors, write_tensors


def example():
    random = np.random.default_rng(0)
    return {
        "layers.0.q": random.standard_normal((5, 7)).astype(np.float32),
        "norm": random.standard_normal(3).astype(np.float16),
        "ids": np.arange(16, dtype=np.int32),
        "scalar": np.float32(2.5).reshape(()),
        "transposed": random.standard_normal((4, 6)).astype(np.float32).T,
        "empty": np.zeros((0, 4), np.float32),
    }


def assert_equal(found, expected):
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_round_trip_is_exact_aligned_and_read_only(tmp_path):
    write_tensors(tmp_path / "w", example())
    found = map_tensors(tmp_path / "w")
    assert_equal(found, example())
    assert all(array.ctypes.data % 64 == 0 for array in found.values() if array.size)
    assert not any(array.flags.writeable for array in found.values())
    assert [path.name for path in tmp_path.iterdir()] == ["w"]


def test_the_safetensors_package_reads_it(tmp_path):
    write_tensors(tmp_path / "w", example())
    found = safetensors.numpy.load_file(tmp_path / "w")
    for name, array in example().items():
        np.testing.assert_array_equal(found[name], array)


def test_arrays_survive_the_removal_of_their_file(tmp_path):
    write_tensors(tmp_path / "w", example())
    found = map_tensors(tmp_path / "w")
    (tmp_path / "w").unlink()
    assert_equal(found, example())


def test_a_dtype_it_cannot_hold_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"'x' has dtype float64; allowed: .*F32"):
        write_tensors(tmp_path / "w", {"x": np.zeros(3)})
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_single_damage_goes_unnoticed(tmp_path_factory, data):
    """Any cut and any flipped bit is an error or changes nothing at all."""
    folder = tmp_path_factory.mktemp("damage")
    write_tensors(folder / "w", example())
    content = bytearray((folder / "w").read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (folder / "w").write_bytes(content)
    try:
        found = map_tensors(folder / "w")
    except ValueError:
        return
    assert_equal(found, example())


@pytest.mark.parametrize(
    "header",
    [b"[]", b"{}", b"nonsense", json.dumps({"__metadata__": {}, "x": {"dtype": "F32"}}).encode()],
)
def test_foreign_headers_are_errors(tmp_path, header):
    (tmp_path / "w").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(ValueError, match="w"):
        map_tensors(tmp_path / "w")


def test_a_missing_file_is_a_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError):
        map_tensors(tmp_path / "absent")
