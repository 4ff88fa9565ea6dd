"""Sketches against plain NumPy: mass in blocks and at once, padding, what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.policies import ExactKeys, LowBitKeys, MeanKeys, QuestBounds
from tests.kvjax.policies import plain

PAGES, KV_HEADS, SIZE, DIM = 11, 2, 8, 16
QUERIES, HEADS = 5, 6
SCALE = 0.3

SKETCHES = [MeanKeys(), QuestBounds(), ExactKeys(), *(LowBitKeys(bits) for bits in (2, 3, 4))]
EVERY = pytest.mark.parametrize("sketch", SKETCHES, ids=repr)


@pytest.fixture
def data():
    """Keys [N, Hkv, P, D], queries [S, Hq, D], and which queries count."""
    rng = np.random.default_rng(0)
    keys = plain.keys_with_outliers(rng, PAGES, KV_HEADS, SIZE, DIM)
    queries = rng.normal(size=(QUERIES, HEADS, DIM)).astype(np.float32)
    return keys, queries, np.array([True, True, False, True, False])


def masses(sketch, arrays, queries, valid, pages, **options):
    """The mass under jit."""
    run = jax.jit(functools.partial(sketch.page_mass, scale=SCALE, **options))
    return np.asarray(run(arrays, queries, jnp.asarray(valid), jnp.int32(pages)))


def expected(sketch, keys, queries, valid, pages, soft_cap=None):
    """The same by NumPy, from the definition in the sketch's paper."""
    rounded = jnp.asarray
    if isinstance(sketch, LowBitKeys):
        restored = sketch.keys(sketch.build(jnp.asarray(keys)))
        return plain.exact_mass(restored, queries, valid, pages, SCALE, soft_cap)
    if isinstance(sketch, ExactKeys):
        return plain.exact_mass(keys, queries, valid, pages, SCALE, soft_cap)
    if isinstance(sketch, MeanKeys):
        mean = np.asarray(rounded(keys.mean(axis=2), jnp.bfloat16), np.float64)

        def score(query, head, page):
            return mean[page, head] @ query
    else:
        low, high = (
            np.asarray(rounded(bound, jnp.bfloat16), np.float64)
            for bound in (keys.min(axis=2), keys.max(axis=2))
        )

        def score(query, head, page):
            return np.maximum(query * low[page, head], query * high[page, head]).sum()

    return plain.mass_by(score, queries, valid, keys.shape[0], pages, KV_HEADS, SCALE, soft_cap)


@EVERY
@pytest.mark.parametrize("pages", [PAGES, 7, 1, 0])
def test_mass_is_what_the_definition_says(data, sketch, pages):
    keys, queries, valid = data
    mass = masses(sketch, sketch.build(jnp.asarray(keys)), queries, valid, pages)
    np.testing.assert_allclose(
        mass, expected(sketch, keys, queries, valid, pages), rtol=2e-4, atol=2e-5
    )
    assert (mass[:, pages:] == 0).all()


@EVERY
def test_a_soft_cap_caps_scores(data, sketch):
    keys, queries, valid = data
    mass = masses(sketch, sketch.build(jnp.asarray(keys)), queries, valid, PAGES, soft_cap=2.0)
    wanted = expected(sketch, keys, queries, valid, PAGES, soft_cap=2.0)
    np.testing.assert_allclose(mass, wanted, rtol=2e-4, atol=2e-5)
