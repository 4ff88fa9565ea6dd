"""Every bfloat16 comes back bit for bit, rows have the bytes that they say, damage has a name."""

import struct
import zlib

import numpy as np
import pytest

from kvjax.storage import parcel, splitzip
from kvjax.storage.errors import ParcelError
from kvjax.storage.layout import numpy_dtype

BFLOAT16 = numpy_dtype("bfloat16")
EVERY = np.arange(1 << 16, dtype=np.uint16).view(BFLOAT16)
BOOK = np.arange(115, 131).astype(np.uint8)


def numbers(shape, seed=0, escapes=0.01):
    """Numbers whose exponents have codes in BOOK, but for a share of any bits."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 16, shape).astype(np.uint16)
    coded = bits & 0x807F | rng.choice(BOOK, shape).astype(np.uint16) << 7
    return np.where(rng.random(shape) < escapes, bits, coded).astype(np.uint16).view(BFLOAT16)


@pytest.mark.parametrize("n", [1, 7, 128, 1 << 16])
def test_every_bit_pattern_comes_back(n):
    """NaNs with their payloads, both zeros, denormals, infinities; with all escapes room."""
    every = np.resize(EVERY, (-(-len(EVERY) // n), n))
    room = int(splitzip.count_escapes(every, BOOK).max())
    encoded = splitzip.encode(every, BOOK, room)
    assert encoded.rows.shape == (len(every), splitzip.row_bytes(n, room))
    assert splitzip.decode(encoded.rows, BOOK, n).tobytes() == every.tobytes()
    assert encoded.escapes.max() == room
    assert parcel.unpacked(parcel.packed(every, BOOK)).tobytes() == every.tobytes()


def test_a_row_by_hand():
    """-1.5, 2 and a denormal, of which the last has no code, with room for two escapes."""
    row = np.array([0xBFC0, 0x4000, 0x0001], np.uint16).view(BFLOAT16)
    encoded = splitzip.encode(row, BOOK, 2)
    assert encoded.escapes == 1
    codes = [(127 - 115) << 4 | (128 - 115), 0]
    assert encoded.rows.tolist() == [0xC0, 0, 1, *codes, 2, 0, 0, 0, 0, 127]


@pytest.mark.parametrize(("n", "width"), [(1 << 16, 2), ((1 << 16) + 1, 4)])
def test_places_have_as_many_bytes_as_they_need(n, width):
    row = np.full(n, 1.0, BFLOAT16)
    row[-1] = np.inf
    encoded = splitzip.encode(row, BOOK, 1)
    assert len(encoded.rows) == n + (n + 1) // 2 + width + 1
    assert splitzip.decode(encoded.rows, BOOK, n).tobytes() == row.tobytes()


def test_more_escapes_than_room_are_told_and_leave_the_other_rows_alone():
    rows = numbers((4, 64), escapes=0)
    rows[2, 5:9] = np.inf
    encoded = splitzip.encode(rows, BOOK, 3)
    assert encoded.escapes.tolist() == [0, 0, 4, 0]
    decoded = splitzip.decode(encoded.rows, BOOK, 64)
    assert decoded[2, :8].tobytes() == rows[2, :8].tobytes()
    for row in (0, 1, 3):
        assert decoded[row].tobytes() == rows[row].tobytes()


@pytest.mark.parametrize("shape", [(3, 5, 130), (600, 1024), (0, 16)])
def test_rows_are_encoded_each_on_its_own(shape):
    many = numbers(shape, escapes=0.05)
    room = 90
    encoded = splitzip.encode(many, BOOK, room)
    alone = [splitzip.encode(row, BOOK, room).rows for row in many.reshape(-1, shape[-1])]
    assert encoded.rows.tobytes() == b"".join(row.tobytes() for row in alone)
    assert encoded.rows.shape[:-1] == encoded.escapes.shape == shape[:-1]
    np.testing.assert_array_equal(encoded.escapes, splitzip.count_escapes(many, BOOK))
    assert splitzip.decode(encoded.rows, BOOK, shape[-1]).tobytes() == many.tobytes()


def test_a_codebook_has_the_exponents_that_are_most_frequent():
    assert splitzip.fit_codebook(numbers((50, 300))).tolist() == BOOK.tolist()
    few = splitzip.fit_codebook(np.zeros(10, BFLOAT16), np.ones((2, 3), BFLOAT16))
    assert {0, 127} < set(few.tolist())
    assert len(set(few.tolist())) == 16


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: splitzip.encode(EVERY, BOOK[:15], 1), "give 16 different exponents"),
        (lambda: splitzip.encode(EVERY, np.zeros(16, np.uint8), 1), "give 16 different"),
        (lambda: splitzip.encode(EVERY, BOOK, -1), "room is -1"),
        (lambda: splitzip.decode(np.zeros((2, 7), np.uint8), BOOK, 4), "rows have 7 bytes"),
        (lambda: splitzip.decode(np.zeros(5, np.uint8), BOOK, 4), "6 bytes and 3 an escape"),
        (lambda: splitzip.decode(np.full(9, 9, np.uint8), BOOK, 4), "an escape at 2313, of 4"),
        (lambda: parcel.packed_rows(np.zeros((1, 7), np.uint8), BOOK, 4), "rows have 7 bytes"),
    ],
)
def test_what_is_none_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.parametrize("escapes", [0.0, 0.01, 1.0])
def test_a_parcel_is_as_small_as_it_can_be_and_comes_back(escapes):
    many = numbers((20, 256), escapes=escapes)
    data = parcel.packed(many)
    assert parcel.unpacked(data).tobytes() == many.tobytes()
    plain = len(parcel.packed_as_is(many))
    assert len(data) == plain if escapes == 1 else len(data) < 0.8 * plain


PARCEL = parcel.packed(numbers((3, 64), escapes=0.02), BOOK)


def test_no_flipped_bit_of_a_parcel_is_believed():
    reasons = set()
    for place in range(len(PARCEL)):
        flipped = bytearray(PARCEL)
        flipped[place] ^= 1 << (place % 8)
        with pytest.raises(ParcelError, match="cannot be unpacked") as caught:
            parcel.unpacked(bytes(flipped))
        reasons.add(caught.value.reason)
    assert reasons == {"torn", "foreign", "version", "checksum"}


@pytest.mark.parametrize("length", [0, 4, 40, 60, -1])
def test_a_parcel_cut_short_is_torn(length):
    for data in (PARCEL[:length], PARCEL + b"\0"):
        with pytest.raises(ParcelError, match=r"\(torn\)"):
            parcel.unpacked(data)


@pytest.mark.parametrize(("encoded", "n"), [(1, 63), (1, 0), (0, 64), (1, 1 << 40)])
def test_a_parcel_whose_header_lies_is_foreign(encoded, n):
    changed = bytearray(PARCEL[:-4])
    struct.pack_into("<B", changed, 5, encoded)
    struct.pack_into("<Q", changed, 22, n)
    with pytest.raises(ParcelError, match=r"\(foreign\)"):
        parcel.unpacked(bytes(changed) + struct.pack("<I", zlib.crc32(changed)))
