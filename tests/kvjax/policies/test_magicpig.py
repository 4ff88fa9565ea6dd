"""MagicPIG's sampling against hashes and probabilities in plain NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.policies import MagicPIG
from kvjax.policies.magicpig import _projections
from tests.kvjax.policies import indexes
from tests.kvjax.policies.indexes import DIM, HEADS, KV_HEADS, PAGES, SIZE, build, extend, page_mass

INDEX = MagicPIG(bits=4, tables=12)

sampled = jax.jit(lambda index, *args: index.sampled(*args), static_argnums=0)
correction = jax.jit(lambda index, *args: index.correction(*args), static_argnums=0)


@pytest.fixture
def keys():
    return indexes.topical(np.random.default_rng(0))[0]


@pytest.fixture
def queries():
    return np.random.default_rng(1).normal(size=(HEADS, DIM)).astype(np.float32)


def plain_sampled(keys, queries, pages):
    """bool [Hq, N, P]: signs compared bit by bit, table by table."""
    planes = _projections(DIM, 4, 12, 0).astype(np.float64).reshape(DIM, 12, 4)
    found = np.zeros((HEADS, len(keys), SIZE), bool)
    for h in range(HEADS):
        own = keys[:pages, h // (HEADS // KV_HEADS)].astype(np.float64)
        ours = np.einsum("npd,dlk->nplk", own - own.mean(axis=(0, 1)), planes) >= 0
        asked = np.einsum("d,dlk->lk", queries[h].astype(np.float64), planes) >= 0
        found[h, :pages] = (ours == asked).all(axis=3).sum(axis=2) >= 2
    return found


@pytest.mark.parametrize("pages", [PAGES, 10, 1])
def test_tokens_that_meet_the_query_twice_are_sampled(keys, queries, pages):
    arrays = build(INDEX, jnp.asarray(keys), jnp.int32(pages))
    found = sampled(INDEX, arrays, jnp.asarray(queries), jnp.int32(pages))
    wanted = plain_sampled(keys, queries, pages)
    np.testing.assert_array_equal(found, wanted)
    assert 0 < wanted.sum() < wanted[:, :pages].size
    mass = page_mass(INDEX, arrays, jnp.asarray(queries), jnp.int32(pages))
    share = wanted.sum(axis=2) / np.maximum(wanted.sum(axis=(1, 2)), 1)[:, None]
    np.testing.assert_allclose(mass, share, rtol=1e-6)


def test_the_correction_is_the_logarithm_of_the_probability(keys, queries):
    arrays = build(INDEX, jnp.asarray(keys), jnp.int32(PAGES))
    chosen = jnp.asarray(keys[[3, 8, 40]].transpose(1, 0, 2, 3))
    found = correction(INDEX, arrays, jnp.asarray(queries), chosen)
    assert found.shape == (HEADS, 3, SIZE)
    for h in range(HEADS):
        own = h // (HEADS // KV_HEADS)
        mean = keys[:, own].astype(np.float64).mean(axis=(0, 1))
        for m, page in enumerate((3, 8, 40)):
            for t in range(SIZE):
                key, query = keys[page, own, t] - mean, queries[h]
                cosine = key @ query / np.linalg.norm(key) / np.linalg.norm(query)
                one = (1 - math.acos(cosine) / math.pi) ** 4
                missed = sum(
                    math.comb(12, met) * one**met * (1 - one) ** (12 - met) for met in (0, 1)
                )
                assert found[h, m, t] == pytest.approx(math.log(1 - missed + 1e-4), abs=2e-3)


@pytest.mark.parametrize("degrees", [20, 45, 80])
def test_tokens_are_sampled_as_often_as_the_correction_says(degrees):
    """Keys all around a query at one angle; with their opposites, so that their mean is 0."""
    rng = np.random.default_rng(5)
    query = np.zeros(DIM)
    query[0] = 2
    around = rng.normal(size=(2048, DIM))
    around[:, 0] = 0
    around /= np.linalg.norm(around, axis=1, keepdims=True)
    angle = math.radians(degrees)
    keys = 3 * (math.cos(angle) * query / 2 + math.sin(angle) * around)
    keys = np.stack([keys, -keys]).astype(np.float32).reshape(2, 1, 2048, DIM)
    index, pages = MagicPIG(bits=4, tables=40), jnp.int32(2)
    arrays = build(index, jnp.asarray(keys), pages)
    asked = jnp.asarray(query[None], jnp.float32)
    rate = np.asarray(sampled(index, arrays, asked, pages))[0, 0].mean()
    logarithm = correction(index, arrays, asked, jnp.asarray(keys[:1].transpose(1, 0, 2, 3)))
    assert rate == pytest.approx(np.exp(np.asarray(logarithm)).mean(), abs=0.1)


def test_later_pages_are_hashed_with_the_mean_there_was(keys):
    arrays = build(INDEX, jnp.asarray(keys), jnp.int32(30))
    grown = extend(INDEX, arrays, jnp.int32(30), jnp.asarray(keys[7]))
    np.testing.assert_array_equal(grown["codes"][:, 30], arrays["codes"][:, 7])
    np.testing.assert_array_equal(grown["centre"], arrays["centre"])


def test_the_pages_that_count_are_found():
    assert indexes.kept(MagicPIG()).mean() > 0.75


def test_it_keeps_to_the_protocol():
    indexes.keeps_to_the_protocol(INDEX)


def test_it_chooses_whatever_the_scores():
    indexes.chooses_whatever_the_scores(INDEX)


def test_it_grows_in_place():
    indexes.grows_in_place(MagicPIG())


def test_bytes_are_those_of_the_arrays():
    index = MagicPIG()
    assert index.bytes_per_page(2, 32, 16) == indexes.bytes_held(index, skip={"centre"})
    assert index.scanned_bytes_per_page(2, 32, 16) == index.bytes_per_page(2, 32, 16)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bits": 0}, "bits is 0"),
        ({"bits": 17}, "bits is 17: must be 1 to 16"),
        ({"tables": 0}, "tables is 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, message):
    with pytest.raises(KvjaxError, match=message):
        MagicPIG(**given)
