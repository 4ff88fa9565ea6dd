"""Drawing tokens, against allowed sets and probabilities computed in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.decode import Sampling
from kvjax.decode.sampling import make_sampler

VOCAB = 40
DRAWS = 4000


def oracle(logits, sampling):
    """float64 [V], the probability of every token: 0 where a filter takes it out."""
    scaled = np.asarray(logits, np.float64) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")  # of equals, the lower id comes first
    kept = np.ones(scaled.size, bool)
    if sampling.top_k is not None:
        kept[order[sampling.top_k :]] = False
    p = softmax(np.where(kept, scaled, -np.inf))
    if sampling.top_p is not None:
        before = np.cumsum(p[order]) - p[order]
        kept[order[before >= sampling.top_p]] = False
        kept[order[0]] = True
    if sampling.min_p is not None:
        kept &= p >= sampling.min_p * p.max()
    return softmax(np.where(kept, scaled, -np.inf))


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


@functools.partial(jax.jit, static_argnames="rows")
def draw(sampler, logits, key, step=0, rows=None):
    batch = jnp.broadcast_to(logits[None], (rows, logits.size)) if rows else logits
    return sampler(batch, key, jnp.int32(step))


def frequencies(logits, sampling, seed=0):
    sampler = make_sampler(sampling, len(logits))
    tokens = draw(sampler, jnp.asarray(logits, jnp.float32), jax.random.key(seed), rows=DRAWS)
    return np.bincount(np.asarray(tokens), minlength=len(logits))


def assert_drawn_from(counts, p):
    """Nothing that is out is drawn; the rest within five standard deviations."""
    assert counts[p == 0].sum() == 0
    spread = 5 * np.sqrt(DRAWS * p * (1 - p)) + 1
    assert (np.abs(counts - DRAWS * p) <= spread).all()


LOGITS = np.random.default_rng(3).normal(0, 2, VOCAB).astype(np.float32)
SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.3),
    Sampling(temperature=3.0),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_k=5),
    Sampling(temperature=2.0, top_k=10_000),
    Sampling(temperature=1.0, top_p=0.6),
    Sampling(temperature=1.0, top_p=1.0),
    Sampling(temperature=1.0, top_p=1e-6),
    Sampling(temperature=1.0, min_p=0.2),
    Sampling(temperature=1.0, min_p=1.0),
    Sampling(temperature=1.5, top_k=12, top_p=0.8, min_p=0.1),
    Sampling(temperature=0.7, top_p=0.9, min_p=0.05),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_frequencies(sampling):
    assert_drawn_from(frequencies(LOGITS, sampling), oracle(LOGITS, sampling))


def test_ties_at_the_threshold():
    """Ten equal logits: top_k and top_p keep so many of them, the lowest ids; min_p, which
    compares likelihoods, keeps or drops equals together."""
    flat = np.zeros(10, np.float32)
    for sampling, allowed in (
        (Sampling(temperature=1.0, top_k=4), range(4)),
        (Sampling(temperature=1.0, top_p=0.35), range(4)),
        (Sampling(temperature=1.0, top_k=5, top_p=0.5), range(3)),  # of the five, 0.2 each
        (Sampling(temperature=1.0, min_p=1.0), range(10)),
    ):
        drawn = np.flatnonzero(frequencies(flat, sampling))
        np.testing.assert_array_equal(drawn, list(allowed))
        np.testing.assert_array_equal(np.flatnonzero(oracle(flat, sampling)), list(allowed))
    steps = np.log(np.asarray([1, 0.5, 0.5, 0.25, 0.2]))
    drawn = np.flatnonzero(frequencies(steps, Sampling(temperature=1.0, min_p=0.4999)))
    np.testing.assert_array_equal(drawn, [0, 1, 2])


def kept(logits, sampling):
    """Which tokens the filters let through, by a float32 sampler."""
    sampler = make_sampler(sampling, logits.size)
    below = logits - logits.max()
    filtered, order = jax.jit(type(sampler)._filtered)(
        sampler, jnp.asarray(below / sampling.temperature)[None]
    )
    mask = np.zeros(logits.size, bool)
    finite = np.isfinite(np.asarray(filtered[0]))
    mask[np.arange(logits.size) if order is None else np.asarray(order[0])] = finite
    return mask


@pytest.mark.parametrize("options", [{"top_k": 50}, {"top_p": 0.95}, {"min_p": 0.01}], ids=str)
def test_allowed_sets_in_a_real_vocabulary(options):
    """49,152 tokens: float32 sums may disagree with float64 about tokens at the very edge only."""
    logits = np.random.default_rng(5).normal(0, 3, 49_152).astype(np.float32)
    sampling = Sampling(temperature=0.8, **options)
    wrong = kept(logits, sampling) ^ (oracle(logits, sampling) > 0)
    assert wrong.sum() <= 1 + 0.01 * (oracle(logits, sampling) > 0).sum()


def test_what_is_not_asked_for_filters_nothing():
    """A float32 sum of probabilities reaches 1 long before the last of 49,152 tokens: with top_k
    alone, or top_p=1, all that top_k keeps must stay."""
    logits = np.random.default_rng(6).normal(0, 3, 49_152).astype(np.float32)
    assert kept(logits, Sampling(temperature=1.0, top_p=1.0)).all()
    assert kept(logits, Sampling(temperature=1.0, top_k=40_000)).sum() == 40_000


def test_greedy_takes_the_first_of_the_best():
    logits = jnp.asarray([[0, 3, 3, 1], [-5, -6, -7, -5.5]], jnp.float32)
    sampler = make_sampler(Sampling(), 4)
    assert draw(sampler, logits, jax.random.key(1)).tolist() == [1, 0]


def test_a_small_temperature_is_greedy():
    """Logits divided by it overflow float32; the best token must still win, not the first one."""
    logits = np.asarray([300, 500, 499.9, 400], np.float32)
    for options in ({}, {"top_p": 0.9}, {"top_k": 3}):
        sampling = Sampling(temperature=1e-6, **options)
        assert frequencies(logits * 1e30, sampling).tolist() == [0, DRAWS, 0, 0]
        assert frequencies(logits, sampling).tolist() == [0, DRAWS, 0, 0]


@pytest.mark.parametrize("options", [{}, {"top_k": 7, "top_p": 0.9}], ids=str)
def test_a_rows_draw_does_not_depend_on_other_rows(options):
    rng = np.random.default_rng(8)
    sampler = make_sampler(Sampling(temperature=1.0, **options), VOCAB)
    key = jax.random.key(9)
    batch = jnp.asarray(rng.normal(0, 2, (64, VOCAB)), jnp.float32)
    drawn = np.asarray(draw(sampler, batch, key))
    others = batch.at[::2].set(jnp.asarray(rng.normal(0, 9, (32, VOCAB)), jnp.float32))
    np.testing.assert_array_equal(np.asarray(draw(sampler, others, key))[1::2], drawn[1::2])
    np.testing.assert_array_equal(draw(sampler, batch[:5], key), drawn[:5])
    np.testing.assert_array_equal(draw(sampler, batch, key), drawn)
    for key_or_step in ((key, 1), (jax.random.key(10), 0)):
        assert (np.asarray(draw(sampler, batch, *key_or_step)) != drawn).any()


def test_rows_of_one_step_draw_apart():
    """Equal rows with one key must not all draw the same token (or beams would be copies)."""
    sampler = make_sampler(Sampling(temperature=1.0), 100)
    drawn = draw(sampler, jnp.zeros(100), jax.random.key(2), rows=50)
    assert len(set(drawn.tolist())) > 20


def test_changing_numbers_compiles_nothing():
    count = draw._cache_size
    frequencies(LOGITS, Sampling(temperature=0.9, top_p=0.5))
    before = count()
    frequencies(LOGITS, Sampling(temperature=0.5, top_k=3, top_p=0.7, min_p=0.3))
    assert count() == before
