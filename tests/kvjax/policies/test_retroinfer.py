"""RetroInfer's clusters of tokens: mass and the estimation zone against plain NumPy, and growth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.policies import EstimatingIndex, RetroInfer
from kvjax.policies.entries import loose
from tests.kvjax.policies import indexes
from tests.kvjax.policies.indexes import (
    DIM,
    HEADS,
    KV_HEADS,
    PAGES,
    SCALE,
    SIZE,
    build,
    extend,
    page_mass,
)

INDEX = RetroInfer(tokens_per_cluster=4, segment=128)
VALUE_DIM = 5

estimate = jax.jit(lambda index, *args: index.estimate(*args, scale=SCALE), static_argnums=0)


@pytest.fixture
def data():
    """Keys [N, Hkv, P, D], values [N, Hkv, P, Dv], queries [Hq, D]."""
    rng = np.random.default_rng(0)
    keys, _ = indexes.topical(rng)
    values = rng.normal(size=(PAGES, KV_HEADS, SIZE, VALUE_DIM)).astype(np.float32)
    queries = rng.normal(size=(HEADS, DIM)).astype(np.float32)
    return jnp.asarray(keys), jnp.asarray(values), jnp.asarray(queries)


def by_head(arrays, pages):
    """Each head's centroids, values if there are, and every live token's cluster."""
    found = loose(arrays)
    centroid = np.asarray(found["centroid"].astype(jnp.float32), np.float64)
    value = np.asarray(found["value"].astype(jnp.float32)) if "value" in found else None
    member = np.asarray(INDEX.clustering.clusters_of(arrays["member"].reshape(KV_HEADS, -1)))
    return centroid, value, member[:, : pages * SIZE]


@pytest.mark.parametrize("pages", [PAGES, 30, 1])
def test_a_token_has_the_mass_of_its_centroid(data, pages):
    keys, _, queries = data
    arrays = build(INDEX, keys, jnp.int32(pages))
    mass = page_mass(INDEX, arrays, queries, jnp.int32(pages))
    centroid, _, member = by_head(arrays, pages)
    for h in range(HEADS):
        own = h // (HEADS // KV_HEADS)
        scores = centroid[own][member[own]] @ np.asarray(queries[h]) * SCALE
        weight = np.exp(scores - scores.max())
        wanted = (weight / weight.sum()).reshape(pages, SIZE).sum(axis=1)
        np.testing.assert_allclose(mass[h, :pages], wanted, rtol=1e-3, atol=1e-6)


def test_values_of_clusters_are_means(data):
    keys, values, _ = data
    arrays = build(INDEX, keys, jnp.int32(30), values.at[30:].set(jnp.nan))
    for page in range(30, 34):
        arrays = extend(INDEX, arrays, jnp.int32(page), keys[page], values[page])
    _, value, member = by_head(arrays, 34)
    for head in range(KV_HEADS):
        mine = np.asarray(values[:34, head]).reshape(-1, VALUE_DIM)
        for cluster in np.unique(member[head]):
            mean = mine[member[head] == cluster].mean(axis=0)
            np.testing.assert_allclose(value[head, cluster], mean, atol=0.03)


@pytest.mark.parametrize("covered", [0.25, 1.0])
def test_the_estimate_is_that_of_the_paper(data, covered):
    """One key a cluster, as often as it has unread tokens, of the clusters of greatest share."""
    keys, values, queries = data
    index, pages = RetroInfer(4, 128, covered=covered), 40
    arrays = build(index, keys, jnp.int32(pages), values)
    chosen = np.random.default_rng(1).random((KV_HEADS, PAGES)) < 0.4
    out, lse = estimate(index, arrays, queries, jnp.asarray(chosen), jnp.int32(pages))
    centroid, value, member = by_head(arrays, pages)
    group = HEADS // KV_HEADS
    for own in range(KV_HEADS):
        held, size = np.unique(member[own], return_counts=True)
        asked = np.asarray(queries, np.float64)[own * group : (own + 1) * group]
        scores = asked @ centroid[own][held].T * SCALE
        share = np.exp(scores) / (np.exp(scores) * size).sum(axis=1, keepdims=True)
        counted = np.argsort(-share.sum(axis=0))[: int(np.ceil(covered * len(held)))]
        unread = ~np.repeat(chosen[own, :pages], SIZE)
        left = np.array([(unread & (member[own] == c)).sum() for c in held])
        for g in range(group):
            weight = np.exp(scores[g][counted]) * left[counted]
            wanted = weight @ value[own][held[counted]] / weight.sum()
            np.testing.assert_allclose(out[own * group + g], wanted, rtol=1e-3, atol=1e-3)
            np.testing.assert_allclose(lse[own * group + g], np.log(weight.sum()), rtol=1e-4)


def test_nothing_left_is_no_estimate(data):
    keys, values, queries = data
    arrays = build(INDEX, keys, jnp.int32(20), values)
    chosen = jnp.ones((KV_HEADS, PAGES), bool)
    out, lse = estimate(INDEX, arrays, queries, chosen, jnp.int32(20))
    assert (lse == -jnp.inf).all()
    assert (out == 0).all()


def test_clusters_of_one_token_estimate_exactly(data):
    """With a cluster a token and no page chosen, the estimate is attention."""
    keys, values, queries = data
    keys = keys.astype(jnp.bfloat16).astype(jnp.float32)
    values = values.astype(jnp.bfloat16).astype(jnp.float32)
    index = RetroInfer(1, 128, covered=1.0)
    arrays = build(index, keys, jnp.int32(16), values)
    chosen = jnp.zeros((KV_HEADS, PAGES), bool)
    out, _ = estimate(index, arrays, queries, chosen, jnp.int32(16))
    for h in range(HEADS):
        own = h // (HEADS // KV_HEADS)
        key = np.asarray(keys[:16, own], np.float64).reshape(-1, DIM)
        scores = key @ np.asarray(queries[h]) * SCALE
        weight = np.exp(scores - scores.max())
        wanted = weight @ np.asarray(values[:16, own]).reshape(-1, VALUE_DIM) / weight.sum()
        np.testing.assert_allclose(out[h], wanted, rtol=0.03, atol=0.03)


def test_the_pages_that_count_are_found():
    assert indexes.kept(INDEX).mean() > 0.85


def test_a_page_that_joined_is_found(data):
    keys, _, _ = data
    odd = jnp.asarray(np.random.default_rng(9).normal(size=(KV_HEADS, 1, DIM)) * 4, jnp.float32)
    page = jnp.broadcast_to(odd, (KV_HEADS, SIZE, DIM))
    arrays = extend(INDEX, build(INDEX, keys, jnp.int32(33)), jnp.int32(33), page)
    queries = jnp.repeat(odd[:, 0], HEADS // KV_HEADS, axis=0)
    mass = np.asarray(page_mass(INDEX, arrays, queries, jnp.int32(34)))
    assert (mass.argmax(axis=1) == 33).all()


def test_it_keeps_to_the_protocol():
    indexes.keeps_to_the_protocol(INDEX)
    assert isinstance(INDEX, EstimatingIndex)


def test_it_chooses_whatever_the_scores():
    indexes.chooses_whatever_the_scores(INDEX)


def test_it_grows_in_place():
    indexes.grows_in_place(RetroInfer())


def test_bytes_are_those_of_the_arrays():
    index = RetroInfer()
    values = 2 * 32 * 2  # of a page's one cluster, in 2 heads
    held = indexes.bytes_held(index, skip={"centre"})
    assert index.bytes_per_page(2, 32, 16) == held + values
    assert index.scanned_bytes_per_page(2, 32, 16) == index.bytes_per_page(2, 32, 16)


def test_values_belong_to_all_pages_or_to_none(data):
    keys, values, queries = data
    without = build(INDEX, keys, jnp.int32(9))
    with pytest.raises(KvjaxError, match="values are given, but the index was built without"):
        INDEX.extend(without, jnp.int32(9), keys[9], values[9])
    with pytest.raises(KvjaxError, match="the index was built without values"):
        INDEX.estimate(without, queries, jnp.ones((KV_HEADS, PAGES), bool), jnp.int32(9), SCALE)
    arrays = build(INDEX, keys, jnp.int32(9), values)
    with pytest.raises(KvjaxError, match="values are missing, but the index was built with"):
        INDEX.extend(arrays, jnp.int32(9), keys[9])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"covered": 0}, "covered is 0"),
        ({"covered": 1.1}, "covered is 1.1"),
        ({"tokens_per_cluster": 0}, "per_cluster is 0"),
        ({"segment": 0}, "segment is 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, message):
    with pytest.raises(KvjaxError, match=message):
        RetroInfer(**given)
