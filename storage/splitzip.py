"""SplitZip (arXiv:2605.01708): bfloat16 without loss in three quarters of the bytes, in NumPy.

A bfloat16 is 8 bits of sign and mantissa, which do not compress, and 8 bits of exponent, of which
16 values make up nearly all of a tensor. So a row of n numbers becomes, one part after the other,

    n          bytes  sign and mantissa, in the numbers' order
    ceil(n/2)  bytes  4-bit codes of exponents, two a byte, the first one high
    C x w      bytes  where the escapes are, little-endian; w is 2 if n <= 65,536, and 4 otherwise
    C          bytes  their exponents

where an escape is a number whose exponent has no code; its code is 0. C, the escapes that a row has
room for, is the same for all rows, so all have the same size. What is left of the room repeats the
exponent of number 0. Every bit pattern comes back, whatever it stands for.

`kvjax.formats.lossless` does the same in JAX, to the same bytes.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import BFloat16, Int64, Integer, UInt8

from kvjax.storage.layout import numpy_dtype

CODES = 16
"""Exponents of a codebook."""

_ESCAPE = CODES  # in place of a code, in tables that are not stored
_BLOCK = 1 << 18  # numbers that are worked on at once: what arises from them stays in the cache


class Encoded(NamedTuple):
    """Rows of numbers in fewer bytes.

    Attributes:
      rows: the bytes of each row; not to be decoded where `escapes` is more than there is room for.
      escapes: how many escapes each row has.
    """

    rows: UInt8[np.ndarray, "*rows b"]
    escapes: Int64[np.ndarray, "*rows"]


def fit_codebook(*arrays: BFloat16[np.ndarray, "..."]) -> UInt8[np.ndarray, "16"]:
    """The 16 exponents that these numbers have most often, in ascending order."""
    counts = np.zeros(256, np.int64)
    for array in arrays:
        bits = array.view(np.uint16).reshape(-1)
        for some in _blocks(len(bits), 1):
            counts += np.bincount(_exponents(bits[some]), minlength=256)
    return np.sort(np.argsort(-counts, kind="stable")[:CODES]).astype(np.uint8)


def row_bytes(n: int, room: int) -> int:
    """Bytes of a row.

    Args:
      n: numbers in it.
      room: escapes that it has room for.
    """
    return n + (n + 1) // 2 + room * (place_bytes(n) + 1)


def place_bytes(n: int) -> int:
    """Bytes that say where in a row of n numbers an escape is."""
    return 2 if n <= 1 << 16 else 4


def room_of(size: int, n: int) -> int:
    """Escapes that a row has room for.

    Args:
      size: bytes of the row.
      n: numbers in it.

    Raises:
      ValueError: no row of n numbers has this size.
    """
    room, rest = divmod(size - row_bytes(n, 0), place_bytes(n) + 1)
    if n < 1 or room < 0 or rest:
        raise ValueError(
            f"rows have {size} bytes, of {n} numbers each; give rows of "
            f"{row_bytes(max(n, 1), 0)} bytes and {place_bytes(n) + 1} an escape, as encode does"
        )
    return room


def check_codebook(codebook: Integer[np.ndarray, "codes"]) -> None:
    """Refuses what is no codebook.

    Raises:
      ValueError: it does not have 16 different exponents.
    """
    values = set(codebook.tolist())
    if codebook.shape != (CODES,) or len(values) < CODES or not values <= set(range(256)):
        raise ValueError(
            f"codebook is {codebook.tolist()}; give 16 different exponents of 0 to 255, as "
            "fit_codebook does"
        )


def count_escapes(
    numbers: BFloat16[np.ndarray, "*rows n"], codebook: UInt8[np.ndarray, "16"]
) -> Int64[np.ndarray, "*rows"]:
    """How many numbers of each row have an exponent without a code."""
    table = _code_table(codebook)
    *rows, n = numbers.shape
    flat = numbers.view(np.uint16).reshape(-1, n)
    counts = np.empty(len(flat), np.int64)
    for some in _blocks(len(flat), n):
        counts[some] = (_looked_up(_exponents(flat[some]), table) == _ESCAPE).sum(axis=1)
    return counts.reshape(rows)


def encode(
    numbers: BFloat16[np.ndarray, "*rows n"], codebook: UInt8[np.ndarray, "16"], room: int
) -> Encoded:
    """Encodes rows, each on its own.

    Args:
      numbers: any bit patterns.
      codebook: exponents that have codes, as `fit_codebook` gives them.
      room: escapes that a row has room for.

    Raises:
      ValueError: the codebook is none, or the room negative.
    """
    check_codebook(codebook)
    if room < 0:
        raise ValueError(f"room is {room}; give a number of escapes from 0 up")
    *rows, n = numbers.shape
    flat = numbers.view(np.uint16).reshape(-1, n)
    out = np.empty((len(flat), row_bytes(n, room)), np.uint8)
    counts = np.empty(len(flat), np.int64)
    table = _code_table(codebook)
    for some in _blocks(len(flat), n):
        counts[some] = _encode(flat[some], table, room, out[some])
    return Encoded(out.reshape(*rows, out.shape[1]), counts.reshape(rows))


def decode(
    rows: UInt8[np.ndarray, "*rows b"], codebook: UInt8[np.ndarray, "16"], n: int
) -> BFloat16[np.ndarray, "*rows n"]:
    """The numbers that rows were made of.

    Args:
      rows: as `encode` gives them, of rows that had no more escapes than room.
      codebook: as `encode` took it.
      n: numbers in a row.

    Raises:
      ValueError: the codebook is none, or the rows are none of such numbers.
    """
    check_codebook(codebook)
    *shape, size = rows.shape
    room_of(size, n)
    flat = rows.reshape(-1, size)
    out = np.empty((len(flat), n), np.uint16)
    pairs = np.repeat(codebook, CODES).tobytes(), np.tile(codebook, CODES).tobytes()
    for some in _blocks(len(flat), n):
        _decode(flat[some], pairs, out[some])
    return out.view(numpy_dtype("bfloat16")).reshape(*shape, n)


def _encode(bits: np.ndarray, table: bytes, room: int, out: np.ndarray) -> np.ndarray:
    """Encodes bit patterns [r, n] into rows [r, b]; gives the number of escapes of each."""
    count, n = bits.shape
    places = n + (n + 1) // 2
    exponents = _exponents(bits)
    codes = np.zeros((count, n + n % 2), np.uint8)
    codes[:, :n] = _looked_up(exponents, table)
    row, at = np.nonzero(codes == _ESCAPE)
    codes[row, at] = 0
    out[:, :n] = ((bits >> 8) & 0x80) | (bits & 0x7F)
    pairs = codes.view("<u2")  # the first code of two is the low byte
    out[:, n:places] = (pairs << 4) | (pairs >> 8)
    escapes = np.bincount(row, minlength=count)
    slot = np.arange(len(row)) - np.repeat(np.cumsum(escapes) - escapes, escapes)
    fits = slot < room
    row, at, slot = row[fits], at[fits], slot[fits]
    where = np.zeros((count, room), f"<u{place_bytes(n)}")
    where[row, slot] = at
    out[:, places : out.shape[1] - room] = where.view(np.uint8)
    left = out[:, out.shape[1] - room :]
    left[:] = exponents[:, :1]
    left[row, slot] = exponents[row, at]
    return escapes


def _decode(rows: np.ndarray, pairs: tuple[bytes, bytes], out: np.ndarray) -> None:
    """Decodes rows [r, b] into bit patterns [r, n]."""
    count, n = out.shape
    places, room = n + (n + 1) // 2, room_of(rows.shape[1], n)
    signs = rows[:, :n].astype(np.uint16)
    codes = np.ascontiguousarray(rows[:, n:places])
    exponents = np.empty((*codes.shape, 2), np.uint8)
    for half, table in enumerate(pairs):
        exponents[:, :, half] = _looked_up(codes, table)
    plain = exponents.reshape(count, -1)[:, :n]
    if room:
        ends = rows.shape[1] - room
        where = np.ascontiguousarray(rows[:, places:ends]).view(f"<u{place_bytes(n)}")
        if (where >= n).any():
            raise ValueError(f"rows have an escape at {where.max()}, of {n} numbers; not encode's")
        plain[np.arange(count)[:, None], where] = rows[:, ends:]
    out[:] = ((signs & 0x80) << 8) | (signs & 0x7F) | (plain.astype(np.uint16) << 7)


def _exponents(bits: np.ndarray) -> np.ndarray:
    return (bits >> 7).astype(np.uint8)


def _code_table(codebook: np.ndarray) -> bytes:
    table = np.full(256, _ESCAPE, np.uint8)
    table[codebook] = np.arange(CODES)
    return table.tobytes()


def _looked_up(array: np.ndarray, table: bytes) -> np.ndarray:
    """`table[array]` of bytes, several times as fast: no index becomes 8 bytes."""
    return np.frombuffer(array.tobytes().translate(table), np.uint8).reshape(array.shape)


def _blocks(rows: int, n: int) -> list[slice]:
    step = max(1, _BLOCK // n)
    return [slice(first, first + step) for first in range(0, rows, step)]
