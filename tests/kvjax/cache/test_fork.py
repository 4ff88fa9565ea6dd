"""`fork`: branches share full pages and nothing that is still written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import init
from kvjax.errors import KvjaxError
from tests.kvjax.cache.plain import (
    LATENTS,
    SPEC,
    assert_gathers,
    assert_same,
    chunk,
    do_append,
    do_fork,
    do_gather,
    do_release,
    poisoned,
)


@pytest.mark.parametrize("spec", [SPEC, LATENTS], ids=["heads", "latents"])
def test_branches_of_a_half_filled_page_do_not_see_each_other(spec):
    """Three branches of one prompt with different continuations: a page that is only partly
    filled must not be shared, or the branches overwrite each other's tokens (it goes unnoticed
    where all continue alike). The parent, too, goes on."""
    cache = poisoned(init(spec, num_pages=20, batch=4, max_pages=4, page_size=4))
    prompt = list(range(1, 7))
    cache, _ = do_append(cache, *chunk([prompt, [], [], []], 20, spec))
    parent = jax.device_get(cache)
    for target in (1, 2, 3):
        cache, reservation = do_fork(cache, jnp.int32(0), jnp.int32(target))
        assert (bool(reservation.ok), int(reservation.needed)) == (True, 1)
    assert_gathers(do_gather(cache, 0), [prompt] * 4, 0, spec)
    assert cache.page_refs[:5].tolist() == [4, 1, 1, 1, 1]

    held = [prompt + [10 * b + i for i in range(1, 6)] for b in range(4)]
    branches = [[], *(tokens[6:] for tokens in held[1:])]
    cache, _ = do_append(cache, *chunk(branches, 20, spec))
    mine = [0, 1]
    np.testing.assert_array_equal(cache.k_pages[0][jnp.asarray(mine)], parent.k_pages[0][mine])
    assert_gathers(do_gather(cache, 1), [prompt, *held[1:]], 1, spec)
    cache, _ = do_append(cache, *chunk([held[0][6:], [], [], []], 20, spec))
    assert_gathers(do_gather(cache, 1), held, 1, spec)

    cache = do_release(cache, jnp.asarray([True, False, True, False]))
    assert_gathers(do_gather(cache, 0), [[], held[1], [], held[3]], 0, spec)
    cache = do_release(cache, jnp.ones(4, bool))
    assert int(cache.pages_free) == 20


def test_beams_equal_full_copies():
    """A beam search's reordering, where a parent lives on in none, one or several children."""
    rng = np.random.default_rng(4)
    cache = init(SPEC, num_pages=40, batch=8, max_pages=6, page_size=4)
    beams = [[1, 2, 3]] * 4
    cache, _ = do_append(cache, *chunk([*beams, [], [], [], []], 16))
    low, token = True, 10
    for _ in range(12):
        parents = rng.integers(0, 4, 4)
        base, spare = (0, 4) if low else (4, 0)
        for child, parent in enumerate(parents):
            cache, reservation = do_fork(cache, jnp.int32(base + parent), jnp.int32(spare + child))
            assert bool(reservation.ok)
        cache = do_release(cache, (jnp.arange(8) >= 4) != low)
        low = not low
        new = [[token + child] for child in range(4)]
        token += 4
        beams = [beams[parent] + new[child] for child, parent in enumerate(parents)]
        empty = [[]] * 4
        cache, _ = do_append(cache, *chunk([*new, *empty] if low else [*empty, *new], 16))
        shown = [*beams, *empty] if low else [*empty, *beams]
        assert_gathers(do_gather(cache, 1), shown, 1)
    assert int(do_release(cache, jnp.ones(8, bool)).pages_free) == 40


def test_a_fork_that_finds_no_page_leaves_all_as_it_was():
    """What the target held is not given up either, unless that very page is what was missing."""
    cache = init(SPEC, num_pages=3, batch=3, max_pages=2, page_size=4)
    cache, _ = do_append(cache, *chunk([[1, 2], [3, 4, 5, 6, 7], []], 20))
    same, reservation = do_fork(cache, jnp.int32(0), jnp.int32(2))
    assert (bool(reservation.ok), int(reservation.needed), int(reservation.free)) == (False, 1, 0)
    assert_same(same, cache)
    cache, reservation = do_fork(cache, jnp.int32(0), jnp.int32(1))
    assert bool(reservation.ok)
    assert_gathers(do_gather(cache, 0), [[1, 2], [1, 2], []], 0)
    assert int(cache.pages_free) == 1


@pytest.mark.parametrize("pair", [(0, 0), (0, 2), (2, 0), (-1, 1), (0, -1)])
def test_sequences_that_cannot_be_forked_change_nothing(pair):
    """Indices would wrap round or be clipped, and the fork of another sequence taken for this."""
    cache = init(SPEC, num_pages=4, batch=2, max_pages=2, page_size=4)
    cache, _ = do_append(cache, *chunk([[1, 2], [3, 4, 5, 6, 7]], 7))
    same, reservation = do_fork(cache, *map(jnp.int32, pair))
    assert_same(same, cache)
    with pytest.raises(KvjaxError, match="two different sequences, each from 0 to 1"):
        reservation.check(cache)
