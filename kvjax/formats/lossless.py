"""SplitZip (arXiv:2605.01708) in JAX: bfloat16 without loss in three quarters of the bytes.

`kvjax.storage.splitzip` says what the bytes are, and finds codebooks; both make the same bytes of
the same numbers. Shapes are static, so a row has room for a number of escapes that the caller
chooses. Whether that was enough is a value:

    encoded = lossless.encode(keys.reshape(pages, -1), codebook, room=32)
    if (encoded.escapes <= 32).all():
        rows = encoded.rows  # else send the keys as they are
    keys = lossless.decode(rows, codebook, n)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Bool, Int32, UInt8, UInt16

from kvjax.errors import KvjaxError
from kvjax.storage.splitzip import CODES, place_bytes, room_of

_WORD = 32  # numbers whose escapes are counted together, as bits


class Encoded(NamedTuple):
    """Rows of numbers in fewer bytes.

    Attributes:
      rows: uint8 [..., b], what each row became; of use only where `escapes` is at most the room.
      escapes: int32 [...], how many numbers of a row have an exponent without a code.
    """

    rows: UInt8[Array, "*rows b"]
    escapes: Int32[Array, "*rows"]


def encode(numbers: BFloat16[Array, "*rows n"], codebook: UInt8[Array, "16"], room: int) -> Encoded:
    """Encode rows, each on its own.

    Args:
      numbers: any bit patterns.
      codebook: 16 different exponents, as `kvjax.storage.splitzip.fit_codebook` gives them.
      room: escapes that a row has room for; static.

    Raises:
      KvjaxError: there are no numbers, or room is negative.
    """
    *shape, n = numbers.shape
    if room < 0 or n < 1:
        raise KvjaxError(f"room is {room} and rows have {n} numbers: must be 0 or more, and 1 up")
    bits = lax.bitcast_convert_type(numbers, jnp.uint16).reshape(-1, n)
    exponents = (bits >> 7).astype(jnp.uint8)
    codes = jnp.zeros_like(exponents)
    escaped = jnp.ones(bits.shape, bool)
    for code in range(CODES):
        found = exponents == codebook[code]
        codes = jnp.where(found, jnp.uint8(code), codes)
        escaped &= ~found
    signs = ((bits >> 8) & 0x80 | bits & 0x7F).astype(jnp.uint8)
    even = jnp.pad(codes, ((0, 0), (0, n % 2))).reshape(len(bits), -1, 2)
    pairs = even[:, :, 0] << 4 | even[:, :, 1]
    where, escapes = _first_places(escaped, room)
    left = jnp.take_along_axis(exponents, where, axis=1)
    wide = jnp.uint16 if place_bytes(n) == 2 else jnp.uint32
    places = lax.bitcast_convert_type(where.astype(wide), jnp.uint8).reshape(len(bits), -1)
    rows = jnp.concatenate([signs, pairs, places, left], axis=1)
    return Encoded(rows.reshape(*shape, rows.shape[1]), escapes.reshape(shape))


def decode(
    rows: UInt8[Array, "*rows b"], codebook: UInt8[Array, "16"], n: int
) -> BFloat16[Array, "*rows n"]:
    """The numbers that rows were made of.

    Args:
      rows: as `encode` gives them, here or in NumPy, of rows that had no more escapes than room.
      codebook: as `encode` took it.
      n: numbers in a row; static.

    Raises:
      KvjaxError: no row of n numbers has this size.
    """
    *shape, size = rows.shape
    try:
        room = room_of(size, n)
    except ValueError as error:
        raise KvjaxError(str(error)) from None
    flat = rows.reshape(-1, size)
    ends = n + (n + 1) // 2
    signs, pairs = flat[:, :n].astype(jnp.uint16), flat[:, n:ends]
    codes = jnp.stack([pairs >> 4, pairs & 0xF], axis=2).reshape(len(flat), -1)[:, :n]
    exponents = jnp.zeros(codes.shape, jnp.uint16)
    for code in range(CODES):
        exponents = jnp.where(codes == code, codebook[code].astype(jnp.uint16), exponents)
    bits = (signs & 0x80) << 8 | signs & 0x7F | exponents << 7
    if room:
        bits = _patched(bits, flat[:, ends:], room)
    return lax.bitcast_convert_type(bits, jnp.bfloat16).reshape(*shape, n)


def _first_places(
    escaped: Bool[Array, "r n"], room: int
) -> tuple[Int32[Array, "r {room}"], Int32[Array, " r"]]:
    """Where the first escapes of each row are, 0 past the last; and how many there are.

    Words of 32 bits are counted. Which word has the k-th escape follows from these counts, and
    where in it from halving it five times: nothing is scattered, and no long sum is taken.
    """
    n = escaped.shape[1]
    bits = jnp.pad(escaped, ((0, 0), (0, -n % _WORD))).reshape(len(escaped), -1, _WORD)
    shifts = jnp.arange(_WORD, dtype=jnp.uint32)[None, None]
    words = (bits.astype(jnp.uint32) << shifts).sum(axis=2, dtype=jnp.uint32)
    counts = lax.population_count(words).astype(jnp.int32)
    until = jnp.cumsum(counts, axis=1)
    wanted = jnp.arange(room, dtype=jnp.int32)[None]
    find: Any = jax.vmap(lambda ends: jnp.searchsorted(ends, wanted[0], side="right"))
    at = jnp.minimum(find(until).astype(jnp.int32), words.shape[1] - 1)
    word = jnp.take_along_axis(words, at, axis=1)
    rank = wanted - jnp.take_along_axis(until - counts, at, axis=1)
    at *= _WORD
    for half in (16, 8, 4, 2, 1):
        low = word & jnp.uint32((1 << half) - 1)
        count = lax.population_count(low).astype(jnp.int32)
        later = count <= rank
        rank = jnp.where(later, rank - count, rank)
        word = jnp.where(later, word >> half, low)
        at = jnp.where(later, at + half, at)
    total = until[:, -1]
    return jnp.where(wanted < total[:, None], at, 0), total


def _patched(
    bits: UInt16[Array, "r n"], escapes: UInt8[Array, "r e"], room: int
) -> UInt16[Array, "r n"]:
    """Bits with the exponents of the escapes in their places."""
    count, n = bits.shape
    size = place_bytes(n)
    octets = escapes[:, : room * size].reshape(count, room, size).astype(jnp.int32)
    where = sum(octets[:, :, i] << 8 * i for i in range(size))
    row = jnp.arange(count)[:, None]
    plain = bits.at[row, where].get(mode="clip") & 0x807F
    exponents = escapes[:, room * size :].astype(jnp.uint16) << 7
    return bits.at[row, where].set(plain | exponents, mode="drop")
