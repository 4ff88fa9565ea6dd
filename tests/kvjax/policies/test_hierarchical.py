"""The index of two levels: recall, what it reads, growth, and that it is the lower level at 1."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.policies import (
    ExactKeys,
    Hierarchical,
    LowBitKeys,
    MeanKeys,
    PageIndex,
    PerPage,
    QuestBounds,
    select,
)
from tests.kvjax.policies import plain

PAGES, KV_HEADS, SIZE, DIM, HEADS = 48, 2, 8, 16, 6
SCALE = 0.5
BELOW = [MeanKeys(), QuestBounds(), LowBitKeys(3), ExactKeys()]

build = jax.jit(lambda index, keys, pages: index.build(keys, pages), static_argnums=0)
extend = jax.jit(lambda index, *args: index.extend(*args), static_argnums=0)
page_mass = jax.jit(lambda index, *args: index.page_mass(*args, scale=SCALE), static_argnums=0)


def topical(rng, pages=PAGES, topics=6):
    """Keys of pages that each keep to one of a few topics, as text does; [N, Hkv, P, D]."""
    centres = rng.normal(size=(topics, KV_HEADS, DIM)) * 2
    topic = rng.integers(topics, size=pages)
    noise = rng.normal(size=(pages, KV_HEADS, SIZE, DIM)) * 0.5
    return (centres[topic][:, :, None, :] + noise).astype(np.float32), centres


def about(rng, centres, topic):
    """Queries of all heads that ask for a topic; [Hq, D]."""
    wanted = np.repeat(centres[topic], HEADS // KV_HEADS, axis=0)
    return jnp.asarray(wanted + rng.normal(size=wanted.shape) * 0.1, jnp.float32)


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
    rng = np.random.default_rng(2)
    keys, centres = topical(rng, topics=8)
    index = Hierarchical(below, probe=0.25, segment=48)
    arrays = build(index, jnp.asarray(keys), jnp.int32(PAGES))
    kept = []
    for topic in range(8):
        queries = about(rng, centres, topic)
        mass = page_mass(index, arrays, queries, jnp.int32(PAGES))
        chosen = np.asarray(select(mass, jnp.int32(PAGES), room=6, kv_heads=KV_HEADS))
        true = plain.exact_mass(keys, np.asarray(queries)[None], [True], PAGES, SCALE)
        true = true.reshape(KV_HEADS, -1, PAGES).sum(axis=1)
        forced = true.copy()
        forced[:, [0, -1]] = 9
        best = np.argsort(-forced, axis=1)[:, :6]
        kept.append(
            np.take_along_axis(true, chosen, 1).sum() / np.take_along_axis(true, best, 1).sum()
        )
    assert np.mean(kept) > 0.95


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


def test_what_dead_pages_hold_has_no_effect(keys, queries):
    index, pages = Hierarchical(segment=16), jnp.int32(21)
    clean = page_mass(index, build(index, keys, pages), queries, pages)
    poisoned = index.build(keys.at[21:].set(jnp.nan), pages)
    np.testing.assert_allclose(page_mass(index, poisoned, queries, pages), clean, rtol=1e-6)
    with pytest.raises(KvjaxError, match="a sketch needs finite keys"):
        index.build(keys.at[20].set(jnp.nan), pages)


@pytest.mark.parametrize("pages", [PAGES, 13])
@pytest.mark.parametrize("case", ["nan queries", "one head of nan", "no queries", "equal keys"])
def test_all_pages_can_be_chosen_whatever_the_scores(keys, queries, pages, case):
    index = Hierarchical(MeanKeys(), segment=16)
    if case == "nan queries":
        queries = queries * jnp.nan
    elif case == "one head of nan":
        queries = queries.at[1].set(jnp.nan)
    elif case == "no queries":
        queries = queries * 0
    else:
        keys = jnp.ones_like(keys)
    mass = page_mass(index, build(index, keys, jnp.int32(pages)), queries, jnp.int32(pages))
    assert (np.asarray(mass)[:, pages:] == 0).all()
    chosen = select(mass, jnp.int32(pages), room=pages, kv_heads=KV_HEADS)
    np.testing.assert_array_equal(chosen, np.tile(np.arange(pages), (KV_HEADS, 1)))
    few = np.asarray(select(mass, jnp.int32(pages), room=5, kv_heads=KV_HEADS))
    assert (np.diff(few, axis=1) > 0).all()
    assert (few < pages).all()


def test_a_batch_is_a_vmap(keys, queries):
    index = Hierarchical(LowBitKeys(2), segment=16)
    batch = jnp.stack([keys, keys[::-1]])
    pages, new = jnp.array([20, 7], jnp.int32), jnp.array([20, PAGES], jnp.int32)
    arrays = jax.jit(jax.vmap(index.build))(batch, pages)
    fresh = jnp.stack([batch[0, 20], batch[1, 0]])
    arrays = jax.jit(jax.vmap(index.extend))(arrays, new, fresh)
    after = jnp.array([21, 7], jnp.int32)
    run = jax.jit(jax.vmap(functools.partial(index.page_mass, scale=SCALE)))
    mass = run(arrays, jnp.stack([queries, -queries]), after)
    for one, sign in ((0, 1), (1, -1)):
        alone = build(index, batch[one], pages[one])
        alone = extend(index, alone, new[one], fresh[one])
        wanted = page_mass(index, alone, sign * queries, after[one])
        np.testing.assert_allclose(mass[one], wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("below", BELOW, ids=repr)
def test_bytes_are_those_of_the_arrays(below):
    index = Hierarchical(below, segment=64)
    keys = jax.ShapeDtypeStruct((512, 2, 16, 32), jnp.bfloat16)
    arrays = jax.eval_shape(index.build, keys, jax.ShapeDtypeStruct((), jnp.int32))
    held = sum(a.size * a.dtype.itemsize for n, a in arrays.items() if n != "centre")
    assert index.bytes_per_page(2, 32, 16) == held / 512
    coarse = 2 * ((2 * 32 + 4) / 4 + 2)
    wanted = coarse + below.bytes_per_page(2, 32, 16) / 4
    assert index.scanned_bytes_per_page(2, 32, 16) == wanted


def test_growing_in_a_loop_copies_no_index():
    index = Hierarchical()
    keys = jax.ShapeDtypeStruct((2, 4096, 1, 16, 32), jnp.float32)
    arrays = jax.eval_shape(jax.vmap(index.build), keys, jax.ShapeDtypeStruct((2,), jnp.int32))

    def grow(arrays, first, new):
        def step(i, arrays):
            return jax.vmap(index.extend)(arrays, first + i, new)

        return jax.lax.fori_loop(0, 8, step, arrays)

    lowered = jax.jit(grow, donate_argnums=0).lower(
        arrays,
        jax.ShapeDtypeStruct((2,), jnp.int32),
        jax.ShapeDtypeStruct((2, 1, 16, 32), jnp.float32),
    )
    memory = lowered.compile().memory_analysis()
    held = sum(array.size * array.dtype.itemsize for array in arrays.values())
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < held / 8


def test_an_index_is_what_the_protocol_says():
    assert isinstance(Hierarchical(), PageIndex)
    assert hash(Hierarchical()) == hash(Hierarchical())


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
