"""Sketches against plain NumPy: mass in blocks and at once, padding, what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import KvjaxError
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


@functools.partial(jax.jit, static_argnums=0)
def build(sketch, keys):
    """The sketch, built in one program."""
    return sketch.build(keys)


@functools.partial(jax.jit, static_argnums=(0, 5))
def page_mass(sketch, arrays, queries, valid, pages, soft_cap):
    """The mass, a program for each sketch."""
    return sketch.page_mass(arrays, queries, valid, pages, SCALE, soft_cap=soft_cap)


def masses(sketch, arrays, queries, valid, pages, soft_cap=None):
    """The mass under jit, from what NumPy holds."""
    queries, valid = jnp.asarray(queries), jnp.asarray(valid)
    return np.asarray(page_mass(sketch, arrays, queries, valid, jnp.int32(pages), soft_cap))


def expected(sketch, keys, queries, valid, pages, soft_cap=None):
    """The same by NumPy, from the definition in the sketch's paper."""
    rounded = jnp.asarray
    if isinstance(sketch, LowBitKeys):
        restored = sketch.keys(build(sketch, jnp.asarray(keys)))
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
    mass = masses(sketch, build(sketch, jnp.asarray(keys)), queries, valid, pages)
    np.testing.assert_allclose(
        mass, expected(sketch, keys, queries, valid, pages), rtol=2e-4, atol=2e-5
    )
    assert (mass[:, pages:] == 0).all()


@EVERY
def test_a_soft_cap_caps_scores(data, sketch):
    keys, queries, valid = data
    mass = masses(sketch, build(sketch, jnp.asarray(keys)), queries, valid, PAGES, soft_cap=2.0)
    wanted = expected(sketch, keys, queries, valid, PAGES, soft_cap=2.0)
    np.testing.assert_allclose(mass, wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("block_tokens", [1, 8, 24, 32, 64, 10**6])
@pytest.mark.parametrize("pages", [PAGES, 6, 0])
def test_blocks_do_not_change_the_mass(data, block_tokens, pages):
    keys, queries, valid = data
    blocked, whole = ExactKeys(block_tokens), ExactKeys(PAGES * SIZE)
    arrays = build(whole, jnp.asarray(keys))
    np.testing.assert_allclose(
        masses(blocked, arrays, queries, valid, pages),
        masses(whole, arrays, queries, valid, pages),
        rtol=1e-5,
        atol=1e-30,
    )


@pytest.mark.parametrize("sketch", [ExactKeys(8), ExactKeys(), LowBitKeys()], ids=repr)
def test_scores_far_apart_neither_overflow_nor_vanish(sketch):
    """One page's scores are hundreds above all others', and the next best count in their block."""
    keys = np.zeros((6, 1, 8, 4), np.float32)
    keys[:, 0, :, 0] = np.array([-900, 0, 700, 700, -900, 0])[:, None]
    queries = np.zeros((1, 1, 4), np.float32)
    queries[..., 0] = 1
    arrays = build(sketch, jnp.asarray(keys))
    run = jax.jit(functools.partial(sketch.page_mass, scale=1.0))
    mass = run(arrays, jnp.asarray(queries), jnp.ones(1, bool), jnp.int32(6))
    assert np.isfinite(mass).all()
    np.testing.assert_allclose(mass.sum(), 1, rtol=1e-6)
    np.testing.assert_allclose(mass[0, [0, 1, 4, 5]], 0, atol=1e-30)


@EVERY
@pytest.mark.parametrize("pages", [PAGES, 5])
def test_padding_has_no_effect_whatever_it_holds(data, sketch, pages):
    keys, queries, valid = data
    arrays = build(sketch, jnp.asarray(keys))
    clean = masses(sketch, arrays, queries, valid, pages)

    def poisoned(array):
        padding = [(0, 0)] * array.ndim
        padding[1] = (0, 6)
        if array.dtype == jnp.uint8:
            return jnp.pad(array[:, :pages], padding, constant_values=255)
        return jnp.pad(array[:, :pages], padding, constant_values=jnp.array(jnp.nan, array.dtype))

    queries = np.where(valid[:, None, None], queries, np.nan)
    arrays = {name: poisoned(array) for name, array in arrays.items()}
    mass = masses(sketch, arrays, queries, valid, pages)
    np.testing.assert_allclose(mass[:, :pages], clean[:, :pages], rtol=1e-5, atol=1e-30)
    assert (mass[:, pages:] == 0).all()


@EVERY
def test_no_query_that_counts_gives_no_mass(data, sketch):
    keys, queries, _ = data
    arrays = build(sketch, jnp.asarray(keys))
    assert (masses(sketch, arrays, queries, np.zeros(QUERIES, bool), PAGES) == 0).all()


@EVERY
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_keys_and_queries_of_16_bits_are_scored_with_float32_sums(data, sketch, dtype):
    keys, queries, valid = data
    keys, queries = jnp.asarray(keys, dtype), jnp.asarray(queries, dtype)
    mass = masses(sketch, build(sketch, keys), queries, valid, PAGES)
    assert mass.dtype == np.float32
    keys, queries = (np.asarray(x, np.float32) for x in (keys, queries))
    wanted = expected(sketch, keys, queries, valid, PAGES)
    assert np.abs(mass - wanted).sum() / wanted.sum() < 0.03


def test_the_mass_of_pages_is_the_mass_of_their_tokens(data):
    keys, queries, valid = data
    sketch = ExactKeys(block_tokens=24)
    arrays = build(sketch, jnp.asarray(keys))
    run = jax.jit(functools.partial(sketch.token_mass, scale=SCALE))
    by_token = run(arrays, jnp.asarray(queries), jnp.asarray(valid), jnp.int32(7 * SIZE))
    assert by_token.shape == (HEADS, PAGES * SIZE)
    assert (by_token[:, 7 * SIZE :] == 0).all()
    by_page = np.asarray(by_token).reshape(HEADS, PAGES, SIZE).sum(axis=2)
    np.testing.assert_allclose(by_page, masses(sketch, arrays, queries, valid, 7), rtol=1e-5)


@EVERY
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_keys_that_are_not_finite_are_refused(data, sketch, bad):
    keys, _, _ = data
    keys[3, 1, 2, 5] = bad
    with pytest.raises(KvjaxError, match=r"keys\[3, 1, 2, 5\] is .*: a sketch needs finite keys"):
        sketch.build(jnp.asarray(keys))
    with pytest.raises(KvjaxError, match="keys have shape"):
        sketch.build(jnp.zeros((2, 8, 16)))


@EVERY
@pytest.mark.parametrize(
    ("heads", "dim", "flags", "message"),
    [
        (5, DIM, QUERIES, "multiple of the sketch's 2 KV heads"),
        (HEADS, DIM + 1, QUERIES, f"its head_dim {DIM}"),
        (HEADS, DIM, QUERIES + 1, "one flag a query"),
    ],
)
def test_queries_that_do_not_fit_are_refused(data, sketch, heads, dim, flags, message):
    arrays = build(sketch, jnp.asarray(data[0]))
    queries = jnp.zeros((QUERIES, heads, dim))
    with pytest.raises(KvjaxError, match=message):
        sketch.page_mass(arrays, queries, jnp.ones(flags, bool), jnp.int32(1), SCALE)


def test_blocks_of_no_tokens_are_refused():
    with pytest.raises(KvjaxError, match="block_tokens is 0"):
        ExactKeys(block_tokens=0)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_memory_does_not_grow_with_tokens_times_queries(bits):
    """131,072 tokens and 96 query rows: scores of all would be 48 MiB, unpacked keys 16 MiB."""
    pages, rows = 8192, 96
    sketch = LowBitKeys(bits)
    keys = jax.ShapeDtypeStruct((pages, 1, 16, 32), jnp.float32)
    arrays = jax.eval_shape(sketch.build, keys)
    run = jax.jit(functools.partial(sketch.page_mass, scale=SCALE))
    program = run.lower(
        arrays,
        jax.ShapeDtypeStruct((rows, 1, 32), jnp.float32),
        jax.ShapeDtypeStruct((rows,), jnp.bool_),
        jax.ShapeDtypeStruct((), jnp.int32),
    ).compile()
    by_page = pages * rows * 4
    assert program.memory_analysis().temp_size_in_bytes < 2.5 * by_page + 2**22


@EVERY
def test_sketches_are_static_arguments(data, sketch):
    """Equal sketches share a program."""
    assert hash(sketch) == hash(dataclasses.replace(sketch))
    assert sketch == dataclasses.replace(sketch)
