"""H2O's and IMPRESS's choice by token, against sets in plain Python."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.policies import chunk_pages, heavy_hitters, impress

by_h2o = functools.partial(jax.jit, static_argnames=("count", "chunk"))(heavy_hitters)
by_impress = functools.partial(jax.jit, static_argnames=("count", "chunk", "alpha"))(impress)


def top(mass, tokens, count):
    """The tokens of greatest mass, the earlier of equals."""
    return set(sorted(range(tokens), key=lambda token: (-mass[token], token))[:count])


def padded(ids, size, sentinel):
    return sorted(ids) + [sentinel] * (size - len(ids))


@pytest.mark.parametrize(("tokens", "count"), [(50, 12), (33, 12), (5, 12), (0, 12), (50, 50)])
def test_heavy_hitters_and_the_chunks_that_hold_them(tokens, count):
    mass = np.random.default_rng(0).integers(0, 9, size=(3, 50)).astype(np.float32)
    choice = by_h2o(jnp.asarray(mass), jnp.int32(tokens), count=count, chunk=8)
    wanted = top(mass.sum(axis=0), tokens, count)
    np.testing.assert_array_equal(choice.tokens, padded(wanted, count, 50))
    chunks = {token // 8 for token in wanted}
    np.testing.assert_array_equal(choice.chunks, padded(chunks, min(count, 7), 7))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("heads", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [64, 40, 7])
def test_impress_compares_probe_heads_by_their_jaccard_indices(seed, heads, tokens):
    rng = np.random.default_rng(seed)
    common = rng.random(64) * seed  # the more of it, the more similar the heads
    mass = (common + rng.random((heads, 64))).astype(np.float32)
    choice, similar = by_impress(jnp.asarray(mass), jnp.int32(tokens), count=10, chunk=8)
    own = [top(row, tokens, 10) for row in mass]
    pairs = list(itertools.combinations(own, 2))
    kept = min(10 / tokens, 1)
    threshold = (kept / (2 - kept)) ** 0.6
    index = np.mean([len(a & b) / len(a | b) for a, b in pairs]) if pairs else 1.0
    assert bool(similar) == (index >= threshold - 1e-6)
    np.testing.assert_array_equal(choice.tokens, padded(top(mass.sum(axis=0), tokens, 10), 10, 64))


def test_equal_heads_are_similar_and_disjoint_ones_are_not():
    same = jnp.tile(jnp.arange(32.0), (3, 1))
    apart = jnp.stack([jnp.roll(jnp.arange(32.0), 8 * head) for head in range(3)])
    for alpha in (0.0, 0.6, 3.0):
        assert impress(same, jnp.int32(32), count=4, alpha=alpha)[1]
    assert not impress(apart, jnp.int32(32), count=4)[1]


def test_a_smaller_alpha_asks_for_more_similarity():
    """Two of three tokens shared: Jaccard 1/2, against 3/29 for sets chosen at random."""
    first = jnp.zeros(16).at[jnp.array([1, 2, 3])].set(1.0)
    second = jnp.zeros(16).at[jnp.array([1, 2, 4])].set(1.0)
    probes = jnp.stack([first, second])
    assert impress(probes, jnp.int32(16), count=3, alpha=0.6)[1]
    assert not impress(probes, jnp.int32(16), count=3, alpha=0.2)[1]


def test_chunks_are_runs_of_pages():
    pages = chunk_pages(jnp.array([0, 2, 3], jnp.int32), chunk=64, page_size=16, num_pages=10)
    np.testing.assert_array_equal(pages, [0, 1, 2, 3, 8, 9, 10, 10, 10, 10, 10, 10])
    with pytest.raises(KvjaxError, match="chunk is 24 tokens: must be a multiple of the page size"):
        chunk_pages(jnp.array([0], jnp.int32), chunk=24, page_size=16, num_pages=10)


@pytest.mark.parametrize("choose", [heavy_hitters, impress])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "count is 0: must be an integer, 1 to 32 tokens"),
        ({"count": 33}, "count is 33"),
        ({"count": 2.5}, "count is 2.5"),
        ({"count": 4, "chunk": 0}, "chunk is 0"),
    ],
)
def test_numbers_that_cannot_be_are_refused(choose, options, message):
    with pytest.raises(KvjaxError, match=message):
        choose(jnp.ones((3, 32)), jnp.int32(32), **options)


@pytest.mark.parametrize("alpha", [-0.1, float("nan")])
def test_an_alpha_below_0_is_refused(alpha):
    with pytest.raises(KvjaxError, match="alpha is"):
        impress(jnp.ones((3, 32)), jnp.int32(32), count=4, alpha=alpha)
