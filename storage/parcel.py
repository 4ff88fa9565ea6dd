"""Numbers in bfloat16 as one string of bytes, to be sent or kept: without loss, and sealed.

    header   what follows: how it is encoded, how many rows of how many numbers, the codebook
    rows     of `splitzip`, by whoever encoded them; or the numbers as they are
    CRC-32   of all before it

Rows that have more escapes than room cannot be sent encoded. Their numbers are, as they are.
"""

import struct
import zlib

import numpy as np
from jaxtyping import BFloat16, UInt8

from kvjax.storage import splitzip
from kvjax.storage.errors import ParcelError
from kvjax.storage.layout import numpy_dtype

_MAGIC = b"KVSZ"
_VERSION = 1
_HEADER = struct.Struct("<4sBBQQQ16s")  # magic, version, encoded, rows, bytes a row, n, codebook
_SEAL = struct.Struct("<I")


def packed(
    numbers: BFloat16[np.ndarray, "rows n"], codebook: UInt8[np.ndarray, "16"] | None = None
) -> bytes:
    """Encodes rows with room for the most escapes that one has, unless that saves nothing.

    Args:
      numbers: any bit patterns.
      codebook: exponents that have codes; None fits it to these numbers.
    """
    book = splitzip.fit_codebook(numbers) if codebook is None else codebook
    room = int(splitzip.count_escapes(numbers, book).max(initial=0))
    if splitzip.row_bytes(numbers.shape[1], room) >= 2 * numbers.shape[1]:
        return packed_as_is(numbers)
    return packed_rows(splitzip.encode(numbers, book, room).rows, book, numbers.shape[1])


def packed_rows(
    rows: UInt8[np.ndarray, "rows b"], codebook: UInt8[np.ndarray, "16"], n: int
) -> bytes:
    """Seals rows that are encoded already, here or in JAX, none with more escapes than room.

    Args:
      rows: as `splitzip.encode` gives them.
      codebook: as it took it.
      n: numbers in a row.

    Raises:
      ValueError: they are none of such numbers.
    """
    splitzip.check_codebook(codebook)
    splitzip.room_of(rows.shape[1], n)
    return _sealed(1, rows, codebook.tobytes(), n)


def packed_as_is(numbers: BFloat16[np.ndarray, "rows n"]) -> bytes:
    """Seals numbers as they are."""
    rows = np.ascontiguousarray(numbers).view(np.uint8)
    return _sealed(0, rows, bytes(splitzip.CODES), numbers.shape[1])


def unpacked(data: bytes) -> BFloat16[np.ndarray, "rows n"]:
    """The numbers that were packed, bit for bit.

    Args:
      data: as one of the others gave it.

    Raises:
      ParcelError: "torn", "foreign", "version" or "checksum": it is something else.
    """
    if len(data) < _HEADER.size + _SEAL.size:
        raise ParcelError("torn", f"{len(data)} bytes are fewer than its header has")
    magic, version, encoded, rows, size, n, book = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise ParcelError("foreign", f"it begins with {magic!r}, not {_MAGIC!r}")
    if version != _VERSION:
        raise ParcelError("version", f"it has version {version}; this program reads {_VERSION}")
    end = _HEADER.size + rows * size
    if len(data) != end + _SEAL.size:
        raise ParcelError("torn", f"it has {len(data)} bytes, not {end + _SEAL.size}")
    if _SEAL.unpack_from(data, end)[0] != zlib.crc32(memoryview(data)[:end]):
        raise ParcelError("checksum", "its bytes are not those that were packed")
    body = np.frombuffer(data, np.uint8, rows * size, _HEADER.size).reshape(rows, size)
    try:
        if encoded:
            return splitzip.decode(body, np.frombuffer(book, np.uint8), n)
        return body.view(numpy_dtype("bfloat16")).reshape(rows, n)
    except ValueError as error:
        raise ParcelError("foreign", f"its header does not fit its rows: {error}") from error


def _sealed(encoded: int, rows: np.ndarray, codebook: bytes, n: int) -> bytes:
    header = _HEADER.pack(_MAGIC, _VERSION, encoded, *rows.shape, n, codebook)
    data = np.ascontiguousarray(rows).tobytes()
    return b"".join((header, data, _SEAL.pack(zlib.crc32(data, zlib.crc32(header)))))
