"""The codec in JAX makes the bytes that the one in NumPy makes, for every bit pattern."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.formats import lossless
from kvjax.storage import parcel, splitzip

EVERY = np.arange(1 << 16, dtype=np.uint16).view(jnp.bfloat16)
BOOK = np.arange(115, 131).astype(np.uint8)

encode = jax.jit(lossless.encode, static_argnames="room")
decode = jax.jit(lossless.decode, static_argnames="n")


def assert_same(numbers, room):
    """Both codecs agree, and what they agree on is decoded."""
    ours = encode(jnp.asarray(numbers), jnp.asarray(BOOK), room=room)
    theirs = splitzip.encode(numbers, BOOK, room)
    np.testing.assert_array_equal(np.asarray(ours.rows), theirs.rows)
    np.testing.assert_array_equal(np.asarray(ours.escapes), theirs.escapes)
    back = np.asarray(decode(ours.rows, jnp.asarray(BOOK), n=numbers.shape[-1]))
    fits = theirs.escapes <= room
    assert back[fits].tobytes() == numbers[fits].tobytes()
    return fits


@pytest.mark.parametrize("n", [1, 33, 1 << 16])
def test_every_bit_pattern_has_the_same_bytes_and_comes_back(n):
    every = np.resize(EVERY, (-(-len(EVERY) // n), n))
    room = int(splitzip.count_escapes(every, BOOK).max())
    assert assert_same(every, room).all()


@pytest.mark.parametrize(
    ("shape", "room"), [((5, 100), 0), ((5, 100), 1), ((2, 3, 64), 9), ((1, (1 << 16) + 3), 9)]
)
def test_few_escapes_in_any_place(shape, room):
    rng = np.random.default_rng(room)
    bits = (rng.integers(115, 131, shape) << 7).astype(np.uint16)
    wild = rng.random(shape) < 4 / shape[-1]
    wild[..., 0] |= rng.random(shape[:-1]) < 0.5
    numbers = np.where(wild, rng.integers(0, 1 << 16, shape), bits).astype(np.uint16)
    assert_same(numbers.view(jnp.bfloat16), room)


def test_more_escapes_than_room_are_a_value_and_others_are_whole():
    numbers = np.ones((3, 64), jnp.bfloat16)
    numbers[1, 60:] = np.inf
    assert assert_same(numbers, 3).tolist() == [True, False, True]


def test_what_was_encoded_here_is_sent_as_bytes():
    numbers = EVERY[0x3F00:0x4100].reshape(4, -1)
    encoded = encode(jnp.asarray(numbers), jnp.asarray(BOOK), room=2)
    assert int(encoded.escapes.max()) == 0
    data = parcel.packed_rows(np.asarray(encoded.rows), BOOK, numbers.shape[1])
    assert parcel.unpacked(data).tobytes() == numbers.tobytes()


def test_it_is_a_part_of_a_program():
    """Shapes are static: the same function inside a loop, and no bit is lost on the way."""
    numbers = jnp.asarray(EVERY[0x3F00:0x4100].reshape(4, -1))

    @jax.jit
    def there_and_back(x):
        def once(_, x):
            rows = lossless.encode(x, jnp.asarray(BOOK), 2).rows
            return lossless.decode(rows, jnp.asarray(BOOK), x.shape[1])

        return jax.lax.fori_loop(0, 3, once, x)

    assert np.asarray(there_and_back(numbers)).tobytes() == np.asarray(numbers).tobytes()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (functools.partial(lossless.encode, room=-1), "room is -1"),
        (lambda x, book: lossless.decode(jnp.zeros((1, 7), jnp.uint8), book, 4), "rows have 7"),
    ],
)
def test_what_is_none_is_refused(call, says):
    with pytest.raises(KvjaxError, match=says):
        call(jnp.asarray(EVERY), jnp.asarray(BOOK))
