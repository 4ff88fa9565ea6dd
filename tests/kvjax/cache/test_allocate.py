"""What `reserve`, `copy_pages` and `init` promise besides what the state machine sees."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from kvjax.cache import copy_pages, init, reserve
from kvjax.errors import KvjaxError, PoolExhaustedError
from tests.kvjax.cache.plain import (
    SPEC,
    assert_holds,
    assert_same,
    chunk,
    do_append,
    do_reserve,
)


def test_messages_say_what_is_needed_and_what_to_do():
    cache = init(SPEC, num_pages=3, batch=2, max_pages=5, page_size=4)
    same, reservation = do_reserve(cache, jnp.asarray([9, 5], jnp.int32))
    assert_same(same, cache)
    message = (
        "the page pool is exhausted: 5 more pages of 4 tokens are needed and 3 of 3 are free; "
        "raise num_pages to 5 or more, or release sequences"
    )
    with pytest.raises(PoolExhaustedError, match=message) as caught:
        reservation.check(cache)
    assert (caught.value.needed, caught.value.free) == (5, 3)
    _, reservation = do_reserve(cache, jnp.asarray([21, 0], jnp.int32))
    message = "needs 6 pages of 4 tokens, but max_pages is 5: make the cache with max_pages=6"
    with pytest.raises(KvjaxError, match=message):
        reservation.check(cache)
    with pytest.raises(KvjaxError, match="max_count is 0: must be an integer of at least 1, or"):
        reserve(cache, jnp.asarray([1, 1], jnp.int32), max_count=0)


@pytest.mark.parametrize("most", [1, 4, 5, 8])
def test_a_known_bound_changes_nothing_but_the_program(most):
    cache = init(SPEC, num_pages=12, batch=3, max_pages=6, page_size=4)
    cache, _ = do_append(cache, *chunk([[1, 2, 3], [4, 5, 6, 7], []], 7))
    wanted = jnp.asarray([most, 1, most], jnp.int32)
    bounded = jax.jit(reserve, static_argnames="max_count")
    assert_same(bounded(cache, wanted, max_count=most), do_reserve(cache, wanted))


def test_pages_move_at_once():
    """Swapped pages: every source is read before a target is written; N copies nothing."""
    cache = init(SPEC, num_pages=3, batch=1, max_pages=3, page_size=2)
    cache, _ = do_append(cache, *chunk([[1, 2, 3, 4, 5, 6]], 6))
    source, target = jnp.asarray([0, 2, 1], jnp.int32), jnp.asarray([2, 0, 3], jnp.int32)
    moved = copy_pages(cache, source, target)
    assert_holds(moved, [[5, 6, 3, 4, 1, 2]])


def test_counts_out_of_range_reserve_nothing():
    """More tokens than `max_count` would be counted as reserved while pages are missing."""
    cache = init(SPEC, num_pages=12, batch=2, max_pages=6, page_size=4)
    for counts, most in (([20, 0], 1), ([-1, 4], None)):
        same, reservation = reserve(cache, jnp.asarray(counts, jnp.int32), max_count=most)
        assert_same(same, cache)
        with pytest.raises(KvjaxError, match="counts must be 0 to max_count tokens a sequence"):
            reservation.check(cache)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_dtypes_that_need_a_scale_are_refused(dtype):
    with pytest.raises(KvjaxError, match=f"the spec's dtype is {dtype}"):
        init(dataclasses.replace(SPEC, dtype=dtype), num_pages=1, batch=1, max_pages=1)


@pytest.mark.parametrize("size", [{"num_pages": 0}, {"batch": -1}, {"page_size": True}])
def test_sizes_are_positive_integers(size):
    (name, value), *_ = size.items()
    with pytest.raises(KvjaxError, match=f"{name} is {value}: must be an integer of at least 1"):
        init(SPEC, **{"num_pages": 4, "batch": 1, "max_pages": 2, **size})


def test_a_pool_is_no_larger_than_int32_can_index():
    """Offsets into a pool are computed in int32 in a program; past 2**31 they would wrap round and
    read another sequence's tokens. Nothing may be allocated before the pool is refused."""
    with pytest.raises(KvjaxError, match="more than int32 can index; use at most 16777215 pages"):
        init(SPEC, num_pages=2**31 // 128 + 1, batch=1, max_pages=1, page_size=16)
    jax.eval_shape(
        lambda: init(SPEC, num_pages=2**31 // 128 - 1, batch=1, max_pages=1, page_size=16)
    )
