"""Pages in fewer bits: what stands where, however tokens came, and what it takes."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import (
    advance,
    append,
    copy_pages,
    encode_due,
    encoded_lengths,
    fork,
    gather,
    init,
    pool_bytes,
    put_token,
    reserve,
)
from kvjax.errors import KvjaxError
from kvjax.formats import Format, Packing, float8, int4, int8, kivi
from kvjax.pallas_kernels import PackedPages, encoded_before
from kvjax.spec import KVSpec, LayerSpec

SPEC = KVSpec(
    (
        LayerSpec.gqa(2, 8),
        LayerSpec.gqa(1, 8, 16),
        LayerSpec.mla(36, 6),
        LayerSpec.gqa(2, 8, window=9),
    )
)
PACKED = (0, 1, 2)
"""Layers that formats pack."""

PAGE = 16
FORMATS = {
    "int4": int4(),
    "fp8": float8(),
    "int8, newest 19 tokens, first 17": dataclasses.replace(
        int8(), residual=PAGE + 3, sinks=PAGE + 1
    ),
}
CHUNK = 48
"""Tokens of a chunk, padding included, so that one program serves all."""

# Compiling is most of what these tests take.
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
do_gather = quick(gather, static_argnums=1)


@quick
def appended(cache, keys, values, cu_lengths):
    return append(cache, keys, values, cu_lengths)


def do_append(cache, keys, values, cu_lengths):
    missing = CHUNK - len(keys[0])
    keys, values = (
        [jnp.pad(x, ((0, missing), (0, 0), (0, 0))) for x in xs] for xs in (keys, values)
    )
    return appended(cache, keys, values, cu_lengths)


@quick
def do_step(cache, keys, values):
    """One token a sequence, as a decode step stores it."""
    cache, reservation = reserve(cache, jnp.ones(cache.batch, jnp.int32), max_count=1)
    active = jnp.ones(cache.batch, bool) & reservation.ok
    cache = encode_due(cache, active)
    for layer, recent in enumerate(cache.recent):
        if recent is not None:
            cache = put_token(cache, layer, keys[layer], values[layer], active)
    return advance(cache, active.astype(jnp.int32)), reservation


def rows(tokens, seed=0):
    """Random keys and values of every layer, [tokens, Hkv, D] each, in the cache's dtype."""
    random = np.random.default_rng(seed)
    keys, values = [], []
    for layer in SPEC.layers:
        heads, *dims = layer.pool_dims
        for out, dim in zip((keys, values), dims, strict=True):
            drawn = random.normal(size=(tokens, heads, dim)) * random.gamma(1, size=dim)
            out.append(jnp.asarray(drawn, jnp.bfloat16))
    return keys, values


def _pools(cache):
    """Both pools of each layer that is packed."""
    return [pools[layer] for layer in PACKED for pools in (cache.k_pages, cache.v_pages)]


def starts(*counts):
    return jnp.asarray(np.cumsum([0, *counts]), jnp.int32)


def cut(rows, begin, end):
    return [x[begin:end] for x in rows[0]], [x[begin:end] for x in rows[1]]


def empty(format, batch=1, num_pages=24):
    return init(SPEC, num_pages=num_pages, batch=batch, max_pages=8, page_size=PAGE, format=format)


def sequence(cache, layer, row=0):
    keys, values, _ = do_gather(cache, layer)
    length = int(cache.lengths[row])
    return np.asarray(keys[row, :length], np.float32), np.asarray(values[row, :length], np.float32)


def expected(format, layer, rows, tokens):
    """Whole pages out of the newest tokens packed and unpacked, the others as they are."""
    encoded = encoded_before(tokens, format.recent(PAGE), PAGE)
    chosen = format.layer(SPEC, layer)
    out = []
    for x, packing in zip(
        (rows[0][layer], rows[1][layer]), (chosen.keys, chosen.values), strict=True
    ):
        pages = x[:encoded].reshape(-1, PAGE, *x.shape[1:]).swapaxes(1, 2)
        first = jnp.arange(len(pages), dtype=jnp.int32) * PAGE
        old = packing.encode(pages, first).values() if encoded else pages
        old = np.asarray(old, np.float32).swapaxes(1, 2).reshape(encoded, *x.shape[1:])
        sinks = min(format.sink_tokens(PAGE), encoded)
        old = np.concatenate([np.asarray(x[:sinks], np.float32), old[sinks:]])
        out.append(np.concatenate([old, np.asarray(x[encoded:tokens], np.float32)]))
    return out


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.slow] if x in ("fp8", "int4") else []) for x in FORMATS],
)
def test_what_a_sequence_holds_does_not_depend_on_how_it_came(name):
    format, tokens = FORMATS[name], 77
    given = rows(tokens)
    caches = []
    for cuts in ((0, 48, 77), (0, 5, 37, 38, 77), (0, 16, 32, 48, 64, 77)):
        cache = empty(format)
        for begin, end in itertools.pairwise(cuts):
            cache, reservation = do_append(cache, *cut(given, begin, end), starts(end - begin))
            assert bool(reservation.ok)
        caches.append(cache)
    cache, _ = do_append(empty(format), *cut(given, 0, 30), starts(30))
    for token in range(30, tokens):
        cache, _ = do_step(cache, *cut(given, token, token + 1))
    for layer in PACKED:
        want = expected(format, layer, given, tokens)
        for got in caches:
            for x, y in zip(sequence(got, layer), want, strict=True):
                np.testing.assert_array_equal(x, y)
        for x, y in zip(sequence(cache, layer), want, strict=True):
            np.testing.assert_array_equal(x, y)
    # Byte for byte, wherever pages are in use.
    for got in (*caches[1:], cache):
        assert int(encoded_lengths(got)[0]) == encoded_before(tokens, format.recent(PAGE), PAGE)
        for old, new in zip(_pools(caches[0]), _pools(got), strict=True):
            jax.tree.map(np.testing.assert_array_equal, old, new)


@pytest.mark.slow
def test_a_ragged_batch_has_the_bytes_of_its_sequences_alone():
    format, lengths = int4(), (46, 0, 17, 33)
    alone = []
    for row, tokens in enumerate(lengths):
        cache, _ = do_append(empty(format), *cut(rows(64, row), 0, tokens), starts(tokens))
        alone.append(cache)
    cache = empty(format, batch=4)
    for begin, end in ((0, 12), (12, 24), (24, 36), (36, 48)):
        counts = [max(min(end, n) - begin, 0) for n in lengths]
        parts = [cut(rows(64, row), begin, begin + n) for row, n in enumerate(counts)]
        each = range(len(SPEC.layers))
        keys = [jnp.concatenate([p[0][i] for p in parts]) for i in each]
        values = [jnp.concatenate([p[1][i] for p in parts]) for i in each]
        cache, _ = do_append(cache, keys, values, starts(*counts))
    for row in range(4):
        for layer in range(len(SPEC.layers)):
            for x, y in zip(sequence(cache, layer, row), sequence(alone[row], layer), strict=True):
                np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_a_layer_with_a_window_stays_as_it_is_unless_asked():
    assert [recent is None for recent in empty(int4()).recent] == [False, False, False, True]
    every = dataclasses.replace(int4(), skip_windows=False, skip_layers=(-3,))
    assert [recent is None for recent in empty(every).recent] == [False, True, False, False]


def test_no_more_tokens_stay_than_a_sequence_can_have():
    format = dataclasses.replace(int4(), sinks=40, residual=40)
    for pages in (1, 2, 3, 4, 8):
        cache = jax.eval_shape(
            lambda n=pages: init(
                SPEC, num_pages=9, batch=1, max_pages=n, page_size=PAGE, format=format
            )
        )
        assert cache.recent[0].keys.shape[1] == min(pages, 6) * PAGE
        assert cache.recent_tokens >= PAGE


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_those_of_the_arrays(name):
    format = FORMATS[name]
    two, three = (jax.eval_shape(lambda n=n: empty(format, num_pages=n)) for n in (2, 3))
    per_page = sum(pool_bytes(three).values()) - sum(pool_bytes(two).values())
    assert format.bytes_per_page(SPEC, PAGE) == per_page
    assert format.bytes_per_token(SPEC, PAGE) == per_page / PAGE
    assert format.bytes_per_token(SPEC, PAGE) < SPEC.bytes_per_token


def test_kivi_takes_what_its_paper_says():
    spec = KVSpec((LayerSpec.gqa(8, 128),))
    assert kivi(2).bytes_per_token(spec, 32) == 0.375 * 2 * 8 * 128
    tokens, residual = 8192, 128
    old = (tokens - residual) * kivi(2).bytes_per_token(spec, 32)
    share = (old + residual * spec.bytes_per_token) / (tokens * spec.bytes_per_token)
    assert f"{share:.1%}" == "20.0%"


@pytest.mark.slow
def test_a_fork_shares_codes_and_copies_what_is_newest():
    format, given = dataclasses.replace(int4(), sinks=1), rows(60)
    cache, _ = do_append(empty(format, batch=2), *cut(given, 0, 41), starts(41, 0))
    forked, reservation = quick(fork)(cache, 0, 1)
    assert bool(reservation.ok)
    assert int(forked.page_refs.max()) == 2
    other = rows(60, 7)
    both = (
        [jnp.concatenate([a[41:60], b[41:60]]) for a, b in zip(given[0], other[0], strict=True)],
        [jnp.concatenate([a[41:60], b[41:60]]) for a, b in zip(given[1], other[1], strict=True)],
    )
    forked, _ = do_append(forked, *both, starts(19, 19))
    mixed = tuple(
        [jnp.concatenate([a[:41], b[41:60]]) for a, b in zip(*p, strict=True)]
        for p in zip(given, other, strict=True)
    )
    for layer in PACKED:
        for row, whole in enumerate((given, mixed)):
            for x, y in zip(
                sequence(forked, layer, row), expected(format, layer, whole, 60), strict=True
            ):
                np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_pages_are_copied_with_their_scales():
    cache, _ = do_append(empty(int4()), *cut(rows(60), 0, 44), starts(44))
    source, target = cache.block_tables[0, :2], jnp.asarray([20, 24], jnp.int32)
    copied = quick(copy_pages)(cache, source, target)
    for old, new in zip(_pools(cache), _pools(copied), strict=True):
        assert isinstance(new, PackedPages)
        np.testing.assert_array_equal(new.values()[20], old.values()[source[0]])
        np.testing.assert_array_equal(new.values()[:20], old.values()[:20])


@pytest.mark.slow
def test_what_does_not_fit_changes_nothing():
    cache, _ = do_append(empty(int4(), num_pages=3), *rows(40), starts(40))
    after, reservation = do_append(cache, *rows(40, 3), starts(40))
    assert not bool(reservation.ok)
    jax.tree.map(np.testing.assert_array_equal, cache, after)
    full, _ = do_append(cache, *cut(rows(48), 40, 48), starts(8))
    after, reservation = do_step(full, *cut(rows(49), 48, 49))
    assert not bool(reservation.ok)
    jax.tree.map(np.testing.assert_array_equal, full, after)


@pytest.mark.parametrize(
    ("format", "page_size", "message"),
    [
        (kivi(2), 16, "page_size is 16: groups of 32 tokens"),
        (
            dataclasses.replace(kivi(2), latents=None),
            32,
            "latents have 36 elements a head: groups of 32",
        ),
        (Format(Packing(channels=3), Packing()), 16, "keys have 8 elements a head"),
        (Format(Packing(bits=3), Packing()), 12, "need a multiple of 8"),
        (
            dataclasses.replace(int4(), skip_layers=(5,)),
            16,
            "skip_layers has layer 5: the model has 4",
        ),
    ],
)
def test_what_cannot_be_packed_is_refused(format, page_size, message):
    with pytest.raises(KvjaxError, match=message):
        init(SPEC, num_pages=2, batch=1, max_pages=2, page_size=page_size, format=format)
