"""Which pages are near: against a simulation in plain Python, over random steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.residency import admit, find, nothing_near, only, ranked, used
from tests.kvjax.cache.plain_slots import Slots

B, H, N, S, K = 2, 3, 11, 5, 4

do_find = jax.jit(find)
do_used = jax.jit(used)
do_ranked = jax.jit(ranked, static_argnums=1)
do_admit = jax.jit(admit)
do_only = jax.jit(only)


def each(heads):
    return [(b, h, heads[b][h]) for b in range(B) for h in range(H)]


def empty():
    return nothing_near(B, H, pages=N, slots=S), [[Slots(N, S) for _ in range(H)] for _ in range(B)]


def assert_same(near, heads):
    """Both hold the same pages in the same slots, in both directions, and no page twice."""
    slot_of, page_in, rank = (np.asarray(x) for x in (near.slot_of, near.page_in, near.rank))
    for b, h, head in each(heads):
        want = [N if page is None else page for page in head.page_in]
        assert page_in[b, h].tolist() == want
        assert slot_of[b, h].tolist() == [head.find(page) for page in range(N)]
        held = [page for page in want if page < N]
        assert len(set(held)) == len(held)
        full = page_in[b, h] < N
        np.testing.assert_array_equal(
            rank[b, h][full], np.float32([r for r, f in zip(head.rank, full, strict=True) if f])
        )


@pytest.mark.parametrize("evict", ["lookahead", "lru", "lfu"])
@pytest.mark.parametrize("seed", range(3))
def test_equals_a_simulation(evict, seed):
    """Steps as decoding takes them: look up, rank, fetch what is missing; at times drop the rest.

    Masses are of few values, so that ties are frequent; each head keeps a slot more than it reads.
    """
    random = np.random.default_rng(seed)
    near, heads = empty()
    for step in range(1, 60):
        pages = np.full((B, H, K), N, np.int32)
        for b, h, _ in each(heads):
            count = random.integers(0, K + 1)
            places = random.permutation(K)[:count]
            pages[b, h, places] = random.permutation(N)[:count]
        slots = np.asarray(do_find(near, jnp.asarray(pages)))
        for b, h, head in each(heads):
            assert slots[b, h].tolist() == [head.find(page) for page in pages[b, h]]

        read = np.asarray(do_used(near, jnp.asarray(slots)))
        mass = random.integers(0, 4, (B, H, N)).astype(np.float32) / 4
        near = do_ranked(
            near,
            evict,
            mass=jnp.asarray(mass),
            read=jnp.asarray(read),
            step=jnp.int32(step),
        )
        keep = read.copy()
        for b, h, head in each(heads):
            assert read[b, h].tolist() == [slot in slots[b, h] for slot in range(S)]
            head.ranked(evict, mass[b, h], read[b, h], step)
            spare = np.flatnonzero(~keep[b, h])
            if len(spare) > (slots[b, h] == S).sum():  # always: S is more than K
                keep[b, h, random.choice(spare)] = True
        missing = np.where(slots == S, pages, N).astype(np.int32)
        rank = random.integers(0, 4, (B, H, K)).astype(np.float32)
        before = np.asarray(near.page_in)
        near, taken = do_admit(near, jnp.asarray(missing), jnp.asarray(rank), jnp.asarray(keep))
        for b, h, head in each(heads):
            assert np.asarray(taken)[b, h].tolist() == head.admit(
                missing[b, h].tolist(), rank[b, h].tolist(), keep[b, h]
            )
        assert_same(near, heads)
        np.testing.assert_array_equal(np.asarray(near.page_in)[keep], before[keep])
        found = np.asarray(do_find(near, jnp.asarray(pages)))
        assert ((found < S) == (pages < N)).all()  # all that was asked for is near now

        if step % 7 == 0:
            keep = random.random((B, H, S)) < 0.5
            near = do_only(near, jnp.asarray(keep))
            for b, h, head in each(heads):
                head.only(keep[b, h])
            assert_same(near, heads)


def test_nothing_is_near_at_first():
    near, heads = empty()
    assert_same(near, heads)
    pages = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32), (B, H, N))
    assert (find(near, pages) == S).all()


def test_what_is_no_page_is_nowhere():
    """-1 would be the last page, and N the one before it, if indices were taken as they come."""
    near, _ = empty()
    last = jnp.full((B, H, 1), N - 1, jnp.int32)
    near, _ = admit(near, last, jnp.zeros((B, H, 1)), jnp.zeros((B, H, S), bool))
    for nothing in (-1, N, N + 1, 2**31 - 1):
        assert (find(near, jnp.full((B, H, 1), nothing, jnp.int32)) == S).all()
        after, taken = admit(
            near,
            jnp.full((B, H, 1), nothing, jnp.int32),
            jnp.ones((B, H, 1)),
            jnp.zeros((B, H, S), bool),
        )
        assert (taken == S).all()
        jax.tree.map(np.testing.assert_array_equal, after, near)


def test_a_rank_that_is_not_a_number_frees_no_slot_that_is_kept():
    """XLA's top-k puts a negated NaN below -inf, and so below the slots that are kept."""
    pages = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, H, S))
    near, _ = admit(empty()[0], pages, jnp.full((B, H, S), jnp.nan), jnp.zeros((B, H, S), bool))
    keep = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32) < S - 1, (B, H, S))
    near, taken = admit(near, jnp.full((B, H, 1), S, jnp.int32), jnp.zeros((B, H, 1)), keep)
    assert (taken == S - 1).all()
    assert (near.page_in[..., :-1] == pages[..., :-1]).all()


@pytest.mark.parametrize("evict", ["lookahead", "lru", "lfu"])
def test_who_goes(evict):
    """Four pages; page 2 was read last, page 1 most often, page 0 gets most attention now."""
    free, slots = jnp.zeros((1, 1, 4), bool), jnp.arange(4, dtype=jnp.int32)[None, None]
    near = nothing_near(1, 1, pages=8, slots=4)
    near, _ = admit(near, slots, jnp.zeros((1, 1, 4)), free)
    mass = jnp.asarray([[[0.9, 0.2, 0.1, 0.3, 0, 0, 0, 0]]])
    for step, reads in enumerate(((1, 3), (1, 0), (1, 3), (0, 2)), start=1):
        read = used(near, jnp.asarray([[reads]], jnp.int32))
        near = ranked(near, evict, mass=mass, read=read, step=jnp.int32(step))
    new = jnp.asarray([[[6, 8, 7]]], jnp.int32)  # 8 is no page
    near, taken = admit(near, new, jnp.zeros((1, 1, 3)), free)
    first, second = {"lookahead": (2, 1), "lru": (1, 3), "lfu": (2, 0)}[evict]
    assert taken.tolist() == [[[first, 4, second]]]
    assert find(near, new).tolist() == taken.tolist()
    assert find(near, jnp.asarray([[[first, second]]], jnp.int32)).tolist() == [[[4, 4]]]
