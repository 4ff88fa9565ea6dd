"""A paged cache in plain Python, which the real one must equal, and a pool to start from."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import append, fork, gather, init, release, reserve
from kvjax.spec import KVSpec, LayerSpec

LAYERS = (LayerSpec.gqa(2, 4), LayerSpec.gqa(1, 6))
SPEC = KVSpec(LAYERS, "float32")
LATENTS = KVSpec((LayerSpec.mla(6, 2), LayerSpec.mla(4, 4)), "float32")

do_reserve = jax.jit(reserve)
do_append = jax.jit(append)
do_fork = jax.jit(fork)
do_release = jax.jit(release)
do_gather = jax.jit(gather, static_argnums=1)


def ceil_div(n, size):
    return -(-n // size)


def poisoned(cache):
    """The cache with NaN in every slot, as if something else had left it there."""
    return dataclasses.replace(
        cache,
        k_pages=jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), cache.k_pages),
        v_pages=jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), cache.v_pages),
        index_pages=jax.tree.map(
            lambda pool: jnp.full_like(pool, 255 if pool.dtype == jnp.uint8 else jnp.nan),
            cache.index_pages,
        ),
    )


def scattered(num_pages, batch, max_pages, page_size, *, blocked=(), spec=SPEC, **options):
    """A poisoned cache whose `blocked` pages the last sequence holds, so that free pages lie apart.

    The blocker holds reserved pages, no tokens.
    """
    sizes = {"batch": batch, "max_pages": max_pages, "page_size": page_size}
    cache = poisoned(init(spec, num_pages=num_pages, **sizes, **options))
    blocked = jnp.asarray(blocked, jnp.int32)
    return dataclasses.replace(
        cache,
        block_tables=cache.block_tables.at[batch - 1, : blocked.size].set(blocked),
        page_refs=cache.page_refs.at[blocked].set(1),
    )


def rows_of(token, layer, spec=SPEC):
    """The key and the value of a token (a positive number) in a layer; no two are alike."""
    shape = spec.layers[layer]
    count, key_dim, value_dim = shape.pool_dims
    heads = np.arange(count, dtype=np.float32)[:, None] / 8
    dims = np.arange(max(key_dim, value_dim), dtype=np.float32)[None, :] / 64
    base = np.float32(token) + heads + dims
    return base[:, :key_dim], -(base[:, :value_dim] + np.float32(layer) / 4)


def stacked(tokens, layer, spec=SPEC):
    """Keys [T, Hkv, D] and values [T, Hkv, Dv] of tokens; 0 is padding and made of NaN."""
    pairs = [rows_of(token, layer, spec) for token in tokens]
    pad = [token == 0 for token in tokens]
    keys, values = (np.stack(part) for part in zip(*pairs, strict=True))
    keys[pad], values[pad] = np.nan, np.nan
    return keys, values


def chunk(per_sequence, room, spec=SPEC):
    """Lists of tokens, one a sequence, as `append` takes them: keys, values, cu_lengths."""
    flat = [token for tokens in per_sequence for token in tokens]
    flat += [0] * (room - len(flat))
    cu = np.concatenate([[0], np.cumsum([len(tokens) for tokens in per_sequence])])
    pairs = [stacked(flat, layer, spec) for layer in range(len(spec.layers))]
    return (
        tuple(jnp.asarray(k) for k, _ in pairs),
        tuple(jnp.asarray(v) for _, v in pairs),
        jnp.asarray(cu, jnp.int32),
    )


def assert_holds(cache, sequences):
    """The pools hold these tokens where the tables say, and the poison everywhere else."""
    tables, size = np.asarray(cache.block_tables), cache.page_size
    np.testing.assert_array_equal(cache.lengths, [len(tokens) for tokens in sequences])
    for layer in range(len(cache.spec.layers)):
        pools = (np.asarray(cache.k_pages[layer]), np.asarray(cache.v_pages[layer]))
        expected = [np.full_like(pool, np.nan) for pool in pools]
        for row, tokens in enumerate(sequences):
            for slot, token in enumerate(tokens):
                page = tables[row, slot // size]
                for pool, new in zip(expected, rows_of(token, layer, cache.spec), strict=True):
                    pool[page, :, slot % size] = new
        for pool, want in zip(pools, expected, strict=True):
            np.testing.assert_array_equal(pool, want)


def assert_gathers(found, sequences, layer, spec=SPEC):
    """What `gather` returned is these tokens in order, and zeros."""
    keys, values, valid = map(np.asarray, found)
    want = [np.zeros_like(keys), np.zeros_like(values)]
    for row, tokens in enumerate(sequences):
        for slot, token in enumerate(tokens):
            want[0][row, slot], want[1][row, slot] = rows_of(token, layer, spec)
    np.testing.assert_array_equal(valid.sum(1), [len(tokens) for tokens in sequences])
    np.testing.assert_array_equal(keys, want[0])
    np.testing.assert_array_equal(values, want[1])


def assert_same(left, right):
    """Two caches are equal in every array, NaN included."""
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(a, b)
