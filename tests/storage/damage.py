"""Damage to a store's files: a miss that says why, an error that names the unit, or right bytes."""

import shutil

import numpy as np

from kvjax.storage.errors import SegmentError, UnitError
from kvjax.storage.page_store import PageStore
from tests.storage.pages import (
    IDENTITY,
    LAYOUT,
    N,
    P,
    all_units,
    expected,
    files_of,
    keys_and_values,
    token_ids,
)

SKETCHES = {"mean": np.arange(40, dtype=np.float32)}

DAMAGES = {
    "emptied": lambda data: b"",
    "cut to half": lambda data: data[: len(data) // 2],
    "short of one byte": lambda data: data[:-1],
    "longer by one byte": lambda data: data + b"\0",
    "first bit flipped": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "last bit flipped": lambda data: data[:-1] + bytes([data[-1] ^ 128]),
    "bit in the middle flipped": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 8]) + data[len(data) // 2 + 1 :]
    ),
    "zeros": lambda data: bytes(len(data)),
    "removed": lambda data: None,
    "a folder": lambda data: "folder",
}


def damage(path, how):
    data = how(path.read_bytes())
    path.unlink()
    if data == "folder":
        path.mkdir()
    elif data is not None:
        path.write_bytes(data)


def outcome(read):
    """A unit's bytes, or the error in their place."""
    try:
        return read.result(timeout=60).tobytes()
    except UnitError as error:
        return error


def read_all(url, both=None):
    """(right units, errors of units, reasons of misses); fails on any wrong byte."""
    keys, values = keys_and_values() if both is None else both
    store = PageStore.open(url)
    match = store.find(IDENTITY, token_ids(), P)
    misses = {reason: count for reason, count in store.stats().misses.items() if count}
    if match is None:
        return 0, [], misses
    units, right, errors = all_units(match.segment), 0, []
    for unit, read in zip(units, match.segment.read(units), strict=True):
        got = outcome(read)
        if isinstance(got, UnitError):
            assert got.unit == tuple(unit.tolist())
            assert got.key == match.key
            assert f"page {got.unit[3]}" in str(got)
            errors.append(got)
        else:
            assert got == expected(unit, keys, values, LAYOUT)
            right += 1
    try:
        sketches = match.segment.sketches()
    except SegmentError as miss:
        misses[miss.reason] = misses.get(miss.reason, 0) + 1
    else:
        np.testing.assert_array_equal(sketches["mean"], SKETCHES["mean"])
    return right, errors, misses


def damage_every_file(root, how, both=None):
    """Damages a copy of each file of a store that holds one segment, and reads all that is left.

    Args:
      root: the store's folder.
      how: a key of DAMAGES.
      both: keys and values that were put; None for those of `keys_and_values`.

    Returns:
      The names of the files.
    """
    names = [name for name in files_of(root) if name != "store.json"]
    for number, name in enumerate(names):
        copy = root.parent / f"{number}"
        shutil.copytree(root, copy)
        damage(copy / name, DAMAGES[how])
        right, errors, misses = read_all(copy, both)
        parts = name.split("/")
        if parts[0] == "segments":
            assert (right, errors) == (0, [])
            if how == "removed" or how == "a folder":
                assert misses == {"absent": 1}
            else:
                assert set(misses) - {"absent"} <= {"torn", "checksum", "foreign"}
                assert len(misses) == 2  # its manifest, and the prompt that found nothing
        elif parts[-1] in ("zarr.json", "unit-sizes"):
            assert (right, errors, len(misses)) == (0, [], 1)
            assert set(misses) <= {"torn", "checksum", "io"}
        elif "sketches" in parts:
            assert (right, errors, len(misses)) == (4 * N, [], 1)
        else:
            assert right >= 3 * N
            assert len(errors) == 4 * N - right >= 1
            assert {error.reason for error in errors} <= {"checksum", "torn", "absent", "io"}
    return names
