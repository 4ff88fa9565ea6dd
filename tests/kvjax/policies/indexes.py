"""What every page index is tested with: programs, keys in topics, and what all must keep to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.policies import PageIndex, select
from tests.kvjax.policies import plain

PAGES, KV_HEADS, SIZE, DIM, HEADS = 48, 2, 8, 16, 6
SCALE = 0.5

build = jax.jit(lambda index, *args: index.build(*args), static_argnums=0)
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


def kept(index, room=6):
    """Share of the attention mass of the best pages that the index's best have, topic by topic."""
    rng = np.random.default_rng(2)
    keys, centres = topical(rng, topics=8)
    arrays, pages = build(index, jnp.asarray(keys), jnp.int32(PAGES)), jnp.int32(PAGES)
    shares = []
    for topic in range(8):
        queries = about(rng, centres, topic)
        mass = page_mass(index, arrays, queries, pages)
        chosen = np.asarray(select(mass, pages, room=room, kv_heads=KV_HEADS))
        true = plain.exact_mass(keys, np.asarray(queries)[None], [True], PAGES, SCALE)
        true = true.reshape(KV_HEADS, -1, PAGES).sum(axis=1)
        best = true.copy()
        best[:, [0, -1]] = HEADS + 1  # always in
        best = np.argsort(-best, axis=1)[:, :room]
        shares.append(true[[[0], [1]], chosen].sum() / true[[[0], [1]], best].sum())
    return np.array(shares)


def keeps_to_the_protocol(index):
    """Static, shaped as it says, indifferent to dead pages and to how many sequences there are."""
    assert isinstance(index, PageIndex)
    assert hash(index) == hash(type(index)(**vars(index)))
    rng = np.random.default_rng(0)
    keys = jnp.asarray(topical(rng)[0])
    queries = jnp.asarray(rng.normal(size=(HEADS, DIM)), jnp.float32)

    pages = jnp.int32(21)
    arrays = build(index, keys, pages)
    clean = page_mass(index, arrays, queries, pages)
    assert clean.shape == (HEADS, PAGES)
    assert clean.dtype == jnp.float32
    assert (np.asarray(clean)[:, 21:] == 0).all()
    assert (np.asarray(clean) >= 0).all()
    np.testing.assert_array_less(np.asarray(clean).sum(axis=1), 1 + 1e-4)
    dirty = build(index, keys.at[21:].set(jnp.nan), pages)
    np.testing.assert_array_equal(page_mass(index, dirty, queries, pages), clean)
    index.build(keys.at[21:].set(jnp.nan), pages)
    with pytest.raises(KvjaxError, match="a sketch needs finite keys"):
        index.build(keys.at[20].set(jnp.nan), pages)

    full = extend(index, arrays, jnp.int32(PAGES), keys[0])
    grown = extend(index, arrays, jnp.int32(21), keys[21])
    for name, array in arrays.items():
        np.testing.assert_array_equal(full[name], array, err_msg=f"{name}, no room")
        assert (grown[name].shape, grown[name].dtype) == (array.shape, array.dtype)

    stack = functools.partial(jax.tree.map, lambda *leaves: jnp.stack(leaves))
    numbers = jnp.array([21, PAGES], jnp.int32)
    both = jax.jit(jax.vmap(index.extend))(
        stack(arrays, arrays), numbers, jnp.stack([keys[21], keys[0]])
    )
    after = jnp.array([22, 21], jnp.int32)
    masses = jax.jit(jax.vmap(functools.partial(index.page_mass, scale=SCALE)))(
        both, jnp.stack([queries, queries]), after
    )
    np.testing.assert_allclose(masses[1], clean, rtol=1e-4, atol=1e-6)
    alone = page_mass(index, grown, queries, after[0])
    np.testing.assert_allclose(masses[0], alone, rtol=1e-4, atol=1e-6)


def chooses_whatever_the_scores(index):
    """All pages can be chosen, and a few are distinct and live, whatever queries and keys hold."""
    rng = np.random.default_rng(1)
    keys = jnp.asarray(topical(rng)[0])
    queries = jnp.asarray(rng.normal(size=(HEADS, DIM)), jnp.float32)
    cases = {
        "nan": (keys, queries * jnp.nan),
        "one head of nan": (keys, queries.at[1].set(jnp.nan)),
        "zero": (keys, queries * 0),
        "equal": (jnp.ones_like(keys), queries),
        "all zero": (jnp.zeros_like(keys), queries * 0),
    }
    for pages in (PAGES, 13, 1, 0):
        for case, (held, asked) in cases.items():
            arrays = build(index, held, jnp.int32(pages))
            mass = page_mass(index, arrays, asked, jnp.int32(pages))
            assert (np.asarray(mass)[:, pages:] == 0).all(), case
            room = max(pages, 2)
            chosen = np.asarray(select(mass, jnp.int32(pages), room=room, kv_heads=KV_HEADS))
            np.testing.assert_array_equal(chosen[:, :pages], [range(pages)] * KV_HEADS, case)
            if pages > 5:
                few = np.asarray(select(mass, jnp.int32(pages), room=5, kv_heads=KV_HEADS))
                assert (np.diff(few, axis=1) > 0).all(), case
                assert (few < pages).all(), case


def grows_in_place(index):
    """Donated, in a loop, over two sequences of 32,768 pages: a small part of it is scratch."""
    keys = jax.ShapeDtypeStruct((2, 32768, 1, 16, 32), jnp.float32)
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
    assert memory.temp_size_in_bytes < held / 8, memory.temp_size_in_bytes / held


def bytes_held(index, skip=()):
    """Bytes a page of the arrays of 512 pages: 16 tokens, 2 heads, 32 channels, in bfloat16."""
    keys = jax.ShapeDtypeStruct((512, 2, 16, 32), jnp.bfloat16)
    arrays = jax.eval_shape(index.build, keys, jax.ShapeDtypeStruct((), jnp.int32))
    return sum(a.size * a.dtype.itemsize for n, a in arrays.items() if n not in skip) / 512
