"""`append` and `gather` against a cache in plain Python, on scattered and poisoned pages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import advance, append, fork, init, release, reserve, token_slots
from kvjax.errors import KvjaxError
from tests.kvjax.cache.plain import (
    LATENTS,
    SPEC,
    assert_gathers,
    assert_holds,
    assert_same,
    ceil_div,
    chunk,
    do_append,
    do_gather,
    do_release,
    do_reserve,
    scattered,
)

SIZE = 4
STARTS = (0, 1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 2 * SIZE + 1)


def numbered(counts, first=1):
    """Lists of that many tokens, all different, and the number after the last."""
    lists = []
    for count in counts:
        lists.append(list(range(first, first + count)))
        first += count
    return lists, first


def test_any_chunk_at_any_offset():
    """Chunks of 0 to 3 pages onto every kind of length, all in one batch: each sequence holds the
    pages its tokens need and no more (a chunk may cross several boundaries), nothing lands
    elsewhere (padding is NaN, as is every slot that holds no token), and all is read back."""
    rng = np.random.default_rng(0)
    pairs = [(start, n) for start in STARTS for n in range(3 * SIZE + 1)]
    pairs = [pairs[i] for i in rng.permutation(len(pairs))]
    starts, counts = zip(*pairs, strict=True)
    ends = [start + n for start, n in pairs]
    needed = sum(ceil_div(end, SIZE) for end in ends)
    pages = 2 * needed
    blocked = rng.permutation(pages)[:needed]
    batch = len(pairs) + 1
    cache = scattered(pages, batch, pages, SIZE, blocked=blocked)

    before, following = numbered(starts)
    cache, reservation = do_append(cache, *chunk([*before, []], sum(counts) + 7))
    assert bool(reservation.ok)
    added, _ = numbered(counts, following)
    cache, reservation = do_append(cache, *chunk([*added, []], sum(counts) + 7))
    assert bool(reservation.ok)
    assert int(reservation.needed) == needed - sum(ceil_div(start, SIZE) for start in starts)
    assert int(reservation.free) - int(reservation.needed) == int(cache.pages_free) == 0

    sequences = [old + new for old, new in zip(before, added, strict=True)] + [[]]
    assert_holds(cache, sequences)
    held = np.asarray(cache.pages_held)
    np.testing.assert_array_equal(held, [*(ceil_div(end, SIZE) for end in ends), len(blocked)])
    owned = np.asarray(cache.block_tables)[np.asarray(cache.block_tables) < pages]
    np.testing.assert_array_equal(np.sort(owned), np.arange(pages))
    small = dataclasses.replace(cache, block_tables=cache.block_tables[:, :6])
    for layer in range(2):
        assert_gathers(do_gather(small, layer), sequences, layer)


@pytest.mark.parametrize("spec", [SPEC, LATENTS], ids=["heads", "latents"])
def test_one_token_a_sequence(spec):
    cache = scattered(10, 3, 4, SIZE, blocked=[0, 2, 5], spec=spec)
    sequences = [[], [], []]
    for token in range(1, 10, 2):
        keys, values, _ = chunk([[token], [token + 1], []], 3, spec)
        cu = jnp.asarray([0, 1, 2, 2], jnp.int32)
        cache, _ = do_append(cache, keys, values, cu)
        sequences = [[*sequences[0], token], [*sequences[1], token + 1], []]
    assert_holds(cache, sequences)
    np.testing.assert_array_equal(
        cache.block_tables, [[1, 4, 10, 10], [3, 6, 10, 10], [0, 2, 5, 10]]
    )

    every = do_release(cache, jnp.asarray([False, False, True]))
    keys, values, _ = chunk([[11], [12], [13]], 3, spec)
    every, reservation = do_append(every, keys, values)
    assert int(reservation.needed) == 1  # two go into open pages
    assert_holds(every, [[*sequences[0], 11], [*sequences[1], 12], [13]])


def test_no_free_page_is_needed_while_the_last_one_is_open():
    """A pool without a free page still has room: the slots of open last pages."""
    cache = scattered(3, 2, 3, SIZE, blocked=[1])
    first, _ = numbered([SIZE + 2, 0])
    cache, _ = do_append(cache, *chunk(first, 6))
    assert int(cache.pages_free) == 0
    cache, reservation = do_append(cache, *chunk([[7, 8], []], 6))
    assert (bool(reservation.ok), int(reservation.needed)) == (True, 0)
    assert_holds(cache, [[*first[0], 7, 8], []])
    same, reservation = do_append(cache, *chunk([[9], []], 6))
    assert (bool(reservation.ok), int(reservation.needed), int(reservation.free)) == (False, 1, 0)
    assert_same(same, cache)


def test_a_block_table_can_be_filled_to_its_last_slot():
    cache = scattered(9, 2, 2, SIZE, blocked=[3, 4])
    first, _ = numbered([2 * SIZE, 0])
    cache, reservation = do_append(cache, *chunk(first, 8))
    assert bool(reservation.ok)
    same, reservation = do_append(cache, *chunk([[99], []], 8))
    assert not bool(reservation.ok)
    assert int(reservation.longest) == 3
    assert_same(same, cache)
    assert_holds(cache, first)


def test_a_chunk_that_fails_for_one_sequence_changes_none():
    cache = scattered(5, 3, 2, SIZE, blocked=[0])
    cache, _ = do_append(cache, *chunk([[1, 2, 3], [4], []], 9))
    same, reservation = do_append(cache, *chunk([[5], list(range(6, 14)), []], 9))
    assert not bool(reservation.ok)  # the first sequence's token had a slot
    assert int(reservation.longest) == 3
    assert_same(same, cache)


def test_tokens_without_a_page_have_no_slot():
    """A slot that is not in a table (padding, or past what is reserved) is the one no write
    reaches; slot ids and page ids differ for every page size."""
    for size in (1, 2, 16, 64):
        cache = init(SPEC, num_pages=4, batch=2, max_pages=3, page_size=size)
        cache, _ = do_reserve(cache, jnp.asarray([0, 2 * size], jnp.int32))
        sequences = jnp.asarray([1, 1, 1, 1, 0, 2, 1], jnp.int32)
        positions = jnp.asarray([0, size, 2 * size - 1, 2 * size, 0, 0, 3 * size], jnp.int32)
        pages, offsets = token_slots(cache, sequences, positions)
        assert pages.tolist() == [0, 1, 1, 4, 4, 4, 4]
        assert offsets.tolist()[:3] == [0, 0, size - 1]


def test_rows_are_stored_in_the_pools_dtype():
    cache = init(dataclasses.replace(SPEC, dtype="bfloat16"), num_pages=1, batch=1, max_pages=1)
    keys, values, _ = chunk([[1]], 1)
    cache, _ = do_append(cache, keys, values)
    assert {pool.dtype.name for pool in (*cache.k_pages, *cache.v_pages)} == {"bfloat16"}
    k, _, _ = do_gather(cache, 1)
    np.testing.assert_array_equal(k[0, 0], np.asarray(keys[1][0]).astype(jnp.bfloat16))


def test_arguments_that_do_not_fit_the_cache():
    cache = init(SPEC, num_pages=2, batch=2, max_pages=1)
    keys, values, cu = chunk([[1], [2]], 2)
    with pytest.raises(ValueError, match="keys and values hold 1 and 2 arrays"):
        append(cache, keys[:1], values, cu)
    with pytest.raises(ValueError, match=r"cu_lengths has shape \(2,\): must be \(3,\)"):
        append(cache, keys, values, cu[:2])
    with pytest.raises(ValueError, match="keys have 3 tokens and the cache 2 sequences"):
        append(cache, *chunk([[1], [2]], 3)[:2])
    with pytest.raises(ValueError, match=r"values\[1\] has shape \(2, 1, 5\)"):
        append(cache, keys, (values[0], values[1][..., :5]), cu)
    # One head would fill one head of two, and one token every slot: neither may pass for data.
    with pytest.raises(ValueError, match=r"keys\[0\] has shape \(2, 1, 4\)"):
        append(cache, (keys[0][:, :1], keys[1]), values, cu)
    with pytest.raises(ValueError, match=r"keys\[1\] has shape \(1, 1, 6\)"):
        append(cache, (keys[0], keys[1][:1]), values, cu)


@pytest.mark.parametrize("cu", [[0, 3, 3], [0, 2, 1], [1, 2, 2]], ids=str)
def test_starts_that_make_no_sense_append_nothing(cu):
    """Past the keys' end, falling, or not from 0: tokens would be counted that nobody wrote."""
    cache = init(SPEC, num_pages=4, batch=2, max_pages=2)
    keys, values, _ = chunk([[1], [2]], 2)
    same, reservation = do_append(cache, keys, values, jnp.asarray(cu, jnp.int32))
    assert_same(same, cache)
    with pytest.raises(ValueError, match="cu_lengths must start at 0, never fall, and end within"):
        reservation.check(cache)


@pytest.mark.parametrize("wide", [False, True], ids=["int32", "int64"])
def test_integers_of_any_kind_are_kept_as_int32(wide):
    """Lists, NumPy's int64, and JAX's own where 64 bits are switched on."""
    cache = init(SPEC, num_pages=8, batch=2, max_pages=2)
    keys, values, _ = chunk([[1], [2]], 2)
    with jax.enable_x64(wide):
        for cu in ([0, 1, 2], np.asarray([0, 1, 2]), jnp.asarray([0, 1, 2])):
            cache, reservation = append(cache, keys, values, cu)
            reservation.check(cache)
        cache, _ = reserve(cache, [1, 0])
        cache = advance(cache, np.asarray([1, 0]))
        cache, reservation = fork(cache, 0, 1)
        reservation.check(cache)
        cache = release(cache, [True, False])
    np.testing.assert_array_equal(cache.lengths, [0, 4])
    integers = (cache.block_tables, cache.lengths, cache.skipped, cache.page_refs)
    assert {array.dtype.name for array in integers} == {"int32"}


def test_what_is_no_integer_or_mask_is_refused():
    cache = init(SPEC, num_pages=2, batch=2, max_pages=1)
    keys, values, _ = chunk([[1], [2]], 2)
    with pytest.raises(KvjaxError, match="cu_lengths is float32: must be integers"):
        append(cache, keys, values, [0.0, 1.0, 2.0])
    with pytest.raises(KvjaxError, match="counts is bool: must be integers"):
        reserve(cache, [True, False])
    with pytest.raises(KvjaxError, match=r"sequences is int32 of shape \(1,\): must be bool"):
        release(cache, [1])
