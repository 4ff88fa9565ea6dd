"""Page indexes of one entry a page: growth, what dead pages hold, batches, and copies not made."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.policies import ExactKeys, LowBitKeys, MeanKeys, PageIndex, PerPage, QuestBounds, select
from tests.kvjax.policies import indexes, plain

PAGES, KV_HEADS, SIZE, DIM, HEADS = 9, 2, 8, 16, 6
SCALE = 0.3

INDEXES = [PerPage(s) for s in (MeanKeys(), QuestBounds(), LowBitKeys(3), ExactKeys())]
EVERY = pytest.mark.parametrize("index", INDEXES, ids=repr)

build = jax.jit(lambda index, keys, pages: index.build(keys, pages), static_argnums=0)
extend = jax.jit(lambda index, *args: index.extend(*args), static_argnums=0)
page_mass = jax.jit(lambda index, *args: index.page_mass(*args, scale=SCALE), static_argnums=0)


@pytest.fixture
def keys():
    rng = np.random.default_rng(0)
    return jnp.asarray(plain.keys_with_outliers(rng, PAGES, KV_HEADS, SIZE, DIM))


@pytest.fixture
def queries():
    return jnp.asarray(np.random.default_rng(1).normal(size=(HEADS, DIM)), jnp.float32)


@pytest.mark.parametrize("pages", [PAGES, 4, 1, 0])
def test_the_mass_of_exact_keys_is_that_of_attention(keys, queries, pages):
    index = PerPage(ExactKeys())
    mass = page_mass(index, build(index, keys, jnp.int32(pages)), queries, jnp.int32(pages))
    wanted = plain.exact_mass(keys, np.asarray(queries)[None], [True], pages, SCALE)
    np.testing.assert_allclose(mass, wanted, rtol=2e-4, atol=2e-6)


@EVERY
def test_an_index_is_what_the_protocol_says(index):
    assert isinstance(index, PageIndex)
    assert hash(index) == hash(PerPage(index.sketch))
    held = jax.eval_shape(index.build, jnp.zeros((4, KV_HEADS, SIZE, DIM), jnp.bfloat16), 4)
    size = sum(array.size * array.dtype.itemsize for array in held.values())
    assert index.bytes_per_page(KV_HEADS, DIM, SIZE) == size / 4
    assert index.scanned_bytes_per_page(KV_HEADS, DIM, SIZE) == size / 4


@EVERY
def test_growing_equals_building(keys, index):
    arrays = build(index, keys, jnp.int32(3))
    for page in range(3, PAGES):
        arrays = extend(index, arrays, jnp.int32(page), keys[page])
    wanted = build(index, keys, jnp.int32(PAGES))
    for name, array in wanted.items():
        np.testing.assert_array_equal(arrays[name], array, err_msg=name)


@EVERY
def test_a_page_without_room_changes_nothing(keys, index):
    arrays = build(index, keys, jnp.int32(PAGES))
    after = extend(index, arrays, jnp.int32(PAGES), jnp.full_like(keys[0], 7))
    for name, array in arrays.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)


@EVERY
def test_what_dead_pages_hold_has_no_effect(keys, queries, index):
    pages = jnp.int32(5)
    clean = page_mass(index, build(index, keys, pages), queries, pages)
    poisoned = index.build(keys.at[5:].set(jnp.nan), pages)
    np.testing.assert_allclose(page_mass(index, poisoned, queries, pages), clean, rtol=1e-6)
    assert (np.asarray(clean)[:, 5:] == 0).all()
    with pytest.raises(KvjaxError, match="a sketch needs finite keys"):
        index.build(keys.at[4].set(jnp.nan), pages)


@EVERY
def test_a_query_of_nan_still_chooses_live_pages(keys, queries, index):
    pages = jnp.int32(6)
    mass = page_mass(index, build(index, keys, pages), queries * jnp.nan, pages)
    assert (np.asarray(mass)[:, 6:] == 0).all()
    chosen = np.asarray(select(mass, pages, room=4, kv_heads=KV_HEADS))
    assert (np.diff(chosen, axis=1) > 0).all()
    assert (chosen < 6).all()


@EVERY
def test_a_batch_is_a_vmap(keys, queries, index):
    """Each of three sequences at its own length, one of which has no page that filled."""
    keys = jnp.stack([keys, keys[::-1], keys * 2])
    queries = jnp.stack([queries, queries, -queries])
    pages = jnp.array([5, 2, 7], jnp.int32)
    new = jnp.array([5, PAGES, 7], jnp.int32)
    arrays = jax.jit(jax.vmap(index.build))(keys, pages)
    fresh = keys[jnp.arange(3), jnp.minimum(new, PAGES - 1)]
    arrays = jax.jit(jax.vmap(index.extend))(arrays, new, fresh)
    after = jnp.array([6, 2, 8], jnp.int32)
    mass = jax.jit(jax.vmap(functools.partial(index.page_mass, scale=SCALE)))(
        arrays, queries, after
    )
    for sequence in range(3):
        alone = build(index, keys[sequence], after[sequence])
        wanted = page_mass(index, alone, queries[sequence], after[sequence])
        np.testing.assert_allclose(mass[sequence], wanted, rtol=2e-5, atol=1e-30)


@EVERY
def test_many_queries_of_a_sequence_are_a_vmap(keys, queries, index):
    asked, pages = jnp.stack([queries, -queries, queries * 2]), jnp.int32(7)
    arrays = build(index, keys, pages)
    one = functools.partial(index.page_mass, scale=SCALE)
    mass = jax.jit(jax.vmap(one, in_axes=(None, 0, None)))(arrays, asked, pages)
    for row, alone in zip(mass, asked, strict=True):
        wanted = page_mass(index, arrays, alone, pages)
        np.testing.assert_allclose(row, wanted, rtol=2e-5, atol=1e-30)


@EVERY
def test_a_query_of_nan_is_its_own_sequences_business(keys, queries, index):
    """Rows that are scored side by side do not see each other."""
    arrays = jax.jit(jax.vmap(index.build))(jnp.stack([keys] * 3), jnp.array([5, 6, 7]))
    masses = jax.jit(jax.vmap(functools.partial(index.page_mass, scale=SCALE)))
    asked, pages = jnp.stack([queries] * 3), jnp.array([5, 6, 7], jnp.int32)
    clean = np.asarray(masses(arrays, asked, pages))
    for bad in (jnp.nan, jnp.inf):
        mass = np.asarray(masses(arrays, asked.at[1].set(bad), pages))
        np.testing.assert_array_equal(mass[[0, 2]], clean[[0, 2]])


@EVERY
def test_it_chooses_whatever_the_scores(index):
    indexes.chooses_whatever_the_scores(index)


@EVERY
def test_growing_in_a_loop_copies_no_index(index):
    """Donated, and vmapped over 2 sequences of 4,096 pages: only a few pages' worth is scratch."""
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
