"""Tensors in one safetensors file: written once with checksums, then mapped into memory.

The format is that of the `safetensors` package, which reads these files. Two things are added to
what it promises: the data and every tensor in it start at a multiple of 64 bytes, so that JAX can
use mapped tensors without a copy on a CPU, and the header carries a CRC-32 for every tensor and
for itself, so that a flipped bit is noticed and not computed with.
"""

import concurrent.futures
import dataclasses
import json
import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvjax.storage.files import publish

_ALIGNMENT = 64
_HEADER = "_header"  # the name under which the checksum of names, shapes and places is kept
_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I32": np.dtype("<i4"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int  # bytes from the first byte of data
    stop: int


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray]) -> None:
    """Writes tensors as one safetensors file that appears at `path` whole or not at all.

    Args:
      path: the file, replaced if it is there.
      tensors: float32, float16 or int32 arrays by name.

    Raises:
      ValueError: a tensor's dtype is none of these.
    """
    header: dict[str, object] = {}
    checksums: dict[str, str] = {}
    position = 0
    arrays = []
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ValueError(f"tensor {name!r} has dtype {tensor.dtype}; allowed: {list(_DTYPES)}")
        array = np.ascontiguousarray(tensor)
        data = _bytes_of(array)
        stop = position + len(data)
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, stop],
        }
        checksums[name] = _checksum(data)
        arrays.append(data)
        # The format allows no gaps, so a tensor of an odd size is followed by a filler.
        if filler := -stop % _ALIGNMENT:
            header[f"_filler.{name}"] = {
                "dtype": "U8",
                "shape": [filler],
                "data_offsets": [stop, stop + filler],
            }
            arrays.append(memoryview(bytes(filler)))
        position = stop + filler
    checksums[_HEADER] = _checksum(json.dumps(header).encode())
    encoded = json.dumps({"__metadata__": checksums, **header}, separators=(",", ":")).encode()
    encoded += b" " * (-(len(encoded) + 8) % _ALIGNMENT)
    with publish(path) as unfinished, open(unfinished, "wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for data in arrays:
            file.write(data)


def map_tensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Maps a file that `write_tensors` wrote into memory, after checking every byte of it.

    The arrays are read-only views of the file; the operating system reads and drops their pages
    as memory allows. They stay valid if the file is later replaced or removed.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is truncated, damaged, or not one of `write_tensors`; it says where.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise ValueError(f"{path} is {size} bytes long, too short for a safetensors file")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    header_bytes = int.from_bytes(data[:8], "little")
    if not 2 <= header_bytes <= size - 8:
        raise ValueError(f"{path}: header of {header_bytes} bytes in a file of {size}")
    entries, checksums = _parse(path, data[8 : 8 + header_bytes])
    view = memoryview(data)[8 + header_bytes :]
    if not entries or max(entry.stop for entry in entries) > len(view):
        raise ValueError(f"{path} holds {len(view)} bytes of data, fewer than its header says")

    def check(entry: _Entry) -> str | None:
        found = _checksum(view[entry.start : entry.stop])
        return None if found == checksums.get(entry.name) else entry.name

    # zlib lets other threads run, so the check uses as many cores as there are.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        damaged = [name for name in pool.map(check, entries) if name is not None]
    if damaged:
        raise ValueError(f"{path}: checksum mismatch in {damaged[0]!r} ({len(damaged)} tensors)")
    return {
        entry.name: np.frombuffer(view[entry.start : entry.stop], entry.dtype).reshape(entry.shape)
        for entry in entries
    }


def _parse(path: str | os.PathLike[str], encoded: bytes) -> tuple[list[_Entry], dict[str, str]]:
    try:
        header = json.loads(encoded)
        checksums = dict(header.pop("__metadata__"))
        if checksums[_HEADER] != _checksum(json.dumps(header).encode()):
            raise ValueError("checksum mismatch")
        entries = [
            _Entry(name, _DTYPES[row["dtype"]], tuple(row["shape"]), *row["data_offsets"])
            for name, row in header.items()
            if not name.startswith("_filler.")
        ]
        for entry in entries:
            size = entry.dtype.itemsize * int(np.prod(entry.shape, dtype=np.int64))
            if entry.start < 0 or entry.stop - entry.start != size:
                raise ValueError(f"{entry.name} has shape {entry.shape} but not {size} bytes")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: its header is damaged: {error!r}") from error
    return entries, checksums


def _checksum(data: bytes | memoryview) -> str:
    return f"{zlib.crc32(data):08x}"


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8)) if array.size else memoryview(b"")
