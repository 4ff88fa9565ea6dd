"""A GGUF file's metadata and tensors.

The parser reads what llama.cpp's `gguf.md` lays down: a header, key/value pairs, a tensor index,
then aligned data. It is written for the long string arrays of tokenizers, where the `gguf`
package's own reader takes seconds; that package dequantizes.
"""

import dataclasses
import math
import mmap
import pathlib
import struct
from typing import Any

import gguf
import numpy as np
from jaxtyping import Float32, UInt8

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_LONGEST = 1 << 32  # elements; a damaged count must not become an allocation


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies. `shape` is in numpy order (rows first), GGUF's reversed."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file
    size: int  # bytes


class GGUFFile:
    """A parsed GGUF file: `metadata`, `tensors`, and their values.

    Args:
        path: the file.

    Raises:
        ValueError: it is no GGUF file, is truncated, or has a tensor type not known here.
        FileNotFoundError: there is no such file.
    """

    def __init__(self, path: str | pathlib.Path) -> None:
        self.path = pathlib.Path(path)
        with self.path.open("rb") as file:
            head = file.read(4)
            if head != b"GGUF":
                raise ValueError(
                    f"{self.path}: not a GGUF file: it starts with {head!r}, not b'GGUF'"
                )
            # Mapped: nothing is read until it is used.
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._cursor, self._reading = 4, "version"
        try:
            self._parse()
        except struct.error as error:
            raise self._truncated() from error

    def _parse(self) -> None:
        version = self._scalar("<I")
        if version not in (2, 3):
            raise ValueError(
                f"{self.path}: GGUF version {version} is not supported: versions 2 and 3 "
                "(little-endian) are"
            )
        self._reading = "counts"
        tensors, pairs = self._scalar("<Q"), self._scalar("<Q")
        self.metadata: dict[str, Any] = {}
        for index in range(pairs):
            self._reading = f"metadata key {index} of {pairs}"
            key = self._string()
            self._reading = f"metadata {key}"
            self.metadata[key] = self._value(self._scalar("<I"))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"{self.path}: general.alignment={alignment!r} must be at least 1")
        rows = []
        for index in range(tensors):
            self._reading = f"tensor entry {index} of {tensors}"
            name = self._string()
            rank = self._scalar("<I")
            if rank > 8:
                raise ValueError(f"{self.path}: tensor {name} has {rank} dimensions")
            dims = [self._scalar("<Q") for _ in range(rank)]
            rows.append((name, tuple(reversed(dims)), self._scalar("<I"), self._scalar("<Q")))
        start = -(-self._cursor // alignment) * alignment
        self.tensors = {
            name: self._entry(name, shape, kind, start + offset)
            for name, shape, kind, offset in rows
        }

    def _entry(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorEntry:
        try:
            quantization = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise ValueError(
                f"{self.path}: tensor {name} has quantization type {kind}, which is not known"
            ) from None
        block, width = gguf.GGML_QUANT_SIZES[quantization]
        if shape and shape[-1] % block:
            raise ValueError(
                f"{self.path}: tensor {name} has rows of {shape[-1]} elements, "
                f"{quantization.name} needs a multiple of {block}"
            )
        size = math.prod(shape) // block * width
        if offset + size > len(self._bytes):
            raise ValueError(
                f"{self.path}: truncated: tensor {name} ends at byte {offset + size}, "
                f"the file has {len(self._bytes)}: get it again"
            )
        return TensorEntry(name, shape, quantization, offset, size)

    def _truncated(self) -> ValueError:
        return ValueError(
            f"{self.path}: truncated: it ends at byte {len(self._bytes)}, while reading "
            f"{self._reading}: get it again"
        )

    def _scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self._bytes, self._cursor)
        self._cursor += struct.calcsize(layout)
        return value

    def _string(self) -> str:
        length = self._scalar("<Q")
        end = self._cursor + length
        if end > len(self._bytes):
            raise self._truncated()
        # A vocabulary may hold pieces that are not whole characters.
        text = self._bytes[self._cursor : end].decode("utf-8", errors="replace")
        self._cursor = end
        return text

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"{self.path}: {self._reading} has value type {kind}, not known")
        inner, count = self._scalar("<I"), self._scalar("<Q")
        if count > min(_LONGEST, len(self._bytes)):
            raise self._truncated()
        if inner in _SCALARS:
            dtype = np.dtype(_SCALARS[inner])
            end = self._cursor + count * dtype.itemsize
            if end > len(self._bytes):
                raise self._truncated()
            values = np.frombuffer(self._bytes, dtype, count, self._cursor).tolist()
            self._cursor = end
            return values
        return (
            self._strings(count) if inner == _STRING else [self._value(inner) for _ in range(count)]
        )

    def _strings(self, count: int) -> list[str]:
        data, cursor, end = self._bytes, self._cursor, len(self._bytes)
        unpack, strings = struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            start = cursor + 8
            cursor = start + unpack(data, cursor)[0]
            if cursor > end:
                raise self._truncated()
            strings.append(data[start:cursor].decode("utf-8", errors="replace"))
        self._cursor = cursor
        return strings

    def tensor(self, name: str) -> Float32[np.ndarray, "..."]:
        """One tensor's values, dequantized to float32; it may be a read-only view of the file.

        Raises:
            ValueError: its quantization type cannot be dequantized.
        """
        entry = self.tensors[name]
        raw: UInt8[np.ndarray, " bytes"] = np.frombuffer(
            self._bytes, np.uint8, entry.size, entry.offset
        )
        kind, types = entry.kind, gguf.GGMLQuantizationType
        if kind == types.F32:
            return raw.view(np.float32).reshape(entry.shape)
        if kind == types.F16:
            return raw.view(np.float16).reshape(entry.shape).astype(np.float32)
        block, width = gguf.GGML_QUANT_SIZES[kind]
        packed = raw.reshape(*entry.shape[:-1], entry.shape[-1] // block * width)
        try:
            values: np.ndarray = gguf.quants.dequantize(packed, kind)
        except NotImplementedError as error:
            raise ValueError(
                f"{self.path}: tensor {name} has quantization type {kind.name}, which cannot be "
                "dequantized: use a file with another one, such as Q8_0 or Q4_K"
            ) from error
        return np.ascontiguousarray(values, np.float32).reshape(entry.shape)
