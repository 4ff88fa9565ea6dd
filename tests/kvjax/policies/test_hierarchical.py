"""The index of two levels: recall, what it reads, growth, and that it is the lower level at 1."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.policies import ExactKeys, Hierarchical, LowBitKeys, MeanKeys, PerPage, QuestBounds
from tests.kvjax.policies import indexes, plain
from tests.kvjax.policies.indexes import (
    DIM,
    HEADS,
    KV_HEADS,
    PAGES,
    SCALE,
    build,
    extend,
    page_mass,
    topical,
)

BELOW = [MeanKeys(), QuestBounds(), LowBitKeys(3), ExactKeys()]


@pytest.fixture
def keys():
    return jnp.asarray(topical(np.random.default_rng(0))[0])


@pytest.fixture
def queries():
    return jnp.asarray(np.random.default_rng(1).normal(size=(HEADS, DIM)), jnp.float32)


@pytest.mark.parametrize("below", BELOW, ids=repr)
def test_probing_all_pages_is_the_level_below(keys, queries, below):
    index, pages = Hierarchical(below, probe=1.0, segment=16), jnp.int32(40)
    mass = page_mass(index, build(index, keys, pages), queries, pages)
    alone = PerPage(below)
    wanted = page_mass(alone, build(alone, keys, pages), queries, pages)
    np.testing.assert_array_equal(mass, wanted)


@pytest.mark.parametrize("pages", [PAGES, 31, 12, 5, 1, 0])
def test_scored_pages_have_the_softmax_of_their_own(keys, queries, pages):
    """Of exact keys: the pages with mass are as many as are probed, and share it as in NumPy."""
    index = Hierarchical(ExactKeys(), probe=0.25, segment=16)
    mass = np.asarray(page_mass(index, build(index, keys, jnp.int32(pages)), queries, pages))
    whole = plain.exact_mass(np.asarray(keys), np.asarray(queries)[None], [True], pages, SCALE)
    for head in range(HEADS):
        scored = np.flatnonzero(mass[head])
        assert len(scored) == min(pages, PAGES // 4)
        assert (scored < pages).all()
        same_head = head // 3 * 3
        np.testing.assert_array_equal(scored, np.flatnonzero(mass[same_head]))
        np.testing.assert_allclose(
            mass[head, scored], whole[head, scored] / whole[head, scored].sum(), rtol=1e-3
        )


@pytest.mark.parametrize("below", [MeanKeys(), LowBitKeys(3)], ids=repr)
def test_the_pages_that_count_are_found(below):
    """A quarter of the pages is looked at; the best eighth of them is nearly what it should be."""
    assert indexes.kept(Hierarchical(below, probe=0.25, segment=48)).mean() > 0.95


def test_a_page_that_joined_is_found():
    """One on its own topic, another on a topic that has a cluster already."""
    rng = np.random.default_rng(4)
    keys, centres = topical(rng, topics=4)
    keys[33] = rng.normal(size=(KV_HEADS, 1, DIM)) * 4
    keys[34] = centres[2][:, None, :] * 1.5
    index = Hierarchical(LowBitKeys(3), probe=0.25, segment=16)
    arrays = build(index, jnp.asarray(keys), jnp.int32(33))
    for page in (33, 34):
        arrays = extend(index, arrays, jnp.int32(page), jnp.asarray(keys[page]))
        queries = jnp.asarray(np.repeat(keys[page].mean(axis=1), HEADS // KV_HEADS, axis=0))
        mass = np.asarray(page_mass(index, arrays, queries, jnp.int32(page + 1)))
        assert (mass.argmax(axis=1) == page).all()


def test_growing_from_nothing_finds_what_building_finds(keys):
    index = Hierarchical(ExactKeys(), probe=0.5, segment=16)
    arrays = build(index, keys, jnp.int32(0))
    for page in range(PAGES):
        arrays = extend(index, arrays, jnp.int32(page), keys[page])
    assert np.asarray(arrays["size"]).sum(axis=1).tolist() == [PAGES] * KV_HEADS
    rebuilt = build(index, keys, jnp.int32(PAGES))
    np.testing.assert_array_equal(arrays["below/keys"], rebuilt["below/keys"])
    found = {"grown": 0, "built": 0}
    for page in range(PAGES):
        queries = jnp.repeat(keys[page].mean(axis=1), HEADS // KV_HEADS, axis=0)
        for name, held in (("grown", arrays), ("built", rebuilt)):
            mass = np.asarray(page_mass(index, held, queries, jnp.int32(PAGES)))
            found[name] += (mass[:, page] > 0).all()
    assert found["grown"] >= PAGES * 0.8
    assert found["grown"] >= found["built"] - 2


@pytest.mark.slow
@pytest.mark.parametrize("below", [MeanKeys(), LowBitKeys(2)], ids=repr)
def test_it_keeps_to_the_protocol(below):
    indexes.keeps_to_the_protocol(Hierarchical(below, segment=16))


def test_it_chooses_whatever_the_scores():
    indexes.chooses_whatever_the_scores(Hierarchical(MeanKeys(), segment=16))


def test_it_grows_in_place():
    indexes.grows_in_place(Hierarchical())


@pytest.mark.parametrize("below", BELOW, ids=repr)
def test_bytes_are_those_of_the_arrays(below):
    index = Hierarchical(below, segment=64)
    assert index.bytes_per_page(2, 32, 16) == indexes.bytes_held(index, skip={"centre"})
    coarse = 2 * ((2 * 32 + 4) / 4 + 2)
    wanted = coarse + below.bytes_per_page(2, 32, 16) / 4
    assert index.scanned_bytes_per_page(2, 32, 16) == wanted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"below": PerPage(MeanKeys())}, "below is PerPage.*must be a sketch"),
        ({"probe": 0}, "probe is 0: must be above 0"),
        ({"probe": 1.5}, "probe is 1.5"),
        ({"pages_per_cluster": 0}, "pages_per_cluster is 0"),
        ({"segment": 0}, "segment is 0"),
        ({"iterations": 0}, "iterations is 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, message):
    with pytest.raises(KvjaxError, match=message):
        Hierarchical(**given)
