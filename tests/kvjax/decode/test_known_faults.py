"""Faults that paged decoding is known for; each test's docstring says the fault and the rule."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax import cache as paged
from kvjax.cache import gather, init
from kvjax.config import CacheConfig
from kvjax.decode import Sampling, generate, score, stream
from kvjax.decode.attend import chunk_attend
from kvjax.decode.sampling import make_sampler
from kvjax.decode.step import BROKEN, FULL, RUNNING, DecodeState, Rules, decode_step, start
from kvjax.errors import KvjaxError
from kvjax.model import from_checkpoint
from kvjax.models import random_checkpoint
from tests.kvjax.cache.plain import assert_same, poisoned
from tests.kvjax.decode.tiny import CONFIGS, VOCAB, model, no_cache_logits, prompt

SIZE = 16


@functools.cache
def tiny():
    return model("mistral")


@functools.cache
def runs():
    """The two programs of this file: a ragged chunk of 80 rows, and a decode step."""
    of = tiny()

    @jax.jit
    def chunk(params, cache, tokens, cu):
        decoder = nnx.merge(of.graphdef, params)
        cache, _ = paged.reserve(cache, jnp.diff(cu), max_count=80)
        owner, offset = paged.ragged_rows(cu, 80)
        positions = offset + cache.lengths.at[owner].get(mode="clip")
        attend = chunk_attend(of.config, cache, owner, positions, cu, None)
        hidden, cache = decoder(tokens, positions, attend, cache)
        return paged.advance(cache, jnp.diff(cu)), decoder.logits(hidden)

    @jax.jit
    def step(params, state):
        decoder = nnx.merge(of.graphdef, params)
        state = decode_step(decoder, state, rules())
        return state, decoder.logits(state.hidden)

    return chunk, step


def rules():
    return Rules(
        sampler=make_sampler(Sampling(), VOCAB),
        key=jax.random.key(0),
        stop_tokens=jnp.full((8,), -1, jnp.int32),
        limits=jnp.full((5,), 100, jnp.int32),
    )


def fill(rows, num_pages=20):
    """A poisoned cache of 5 sequences with these tokens in it, and the logits of them all."""
    of = tiny()
    cache = poisoned(init(of.spec, num_pages=num_pages, batch=5, max_pages=4, page_size=SIZE))
    return advance(cache, rows)


def advance(cache, rows):
    flat = [token for row in rows for token in row]
    tokens = jnp.asarray(flat + [0] * (80 - len(flat)), jnp.int32)
    cu = jnp.asarray(np.concatenate([[0], np.cumsum([len(row) for row in rows])]), jnp.int32)
    cache, logits = runs()[0](tiny().params, cache, tokens, cu)
    return cache, np.asarray(logits)


def decoding(cache, tokens, active) -> DecodeState:
    state = start(cache, tiny().config.hidden_size, rules().limits)
    finished = jnp.where(jnp.asarray(active), RUNNING, FULL).astype(jnp.int32)
    return dataclasses.replace(state, tokens=jnp.asarray(tokens, jnp.int32), finished=finished)


def close(got, want):
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


def test_prefills_and_decodes_in_one_ragged_batch():
    """Lengths padded to page multiples in one place and not in another shift every later row: the
    starts of the rows are the one truth. A row without tokens, and padding, stay finite."""
    rows = [prompt(n, n) for n in (1, 17, 16, 0, 33)]
    cache, logits = fill(rows)
    assert np.isfinite(logits).all()
    more = [prompt(n, 50 + n) for n in (1, 1, 20, 0, 3)]
    cache, later = advance(cache, more)
    assert np.isfinite(later).all()
    assert cache.lengths.tolist() == [2, 18, 36, 0, 36]
    first = second = 0
    for row, new in zip(rows, more, strict=True):
        if row:
            want = no_cache_logits(tiny(), row + new)
            close(logits[first : first + len(row)], want[: len(row)])
            close(later[second : second + len(new)], want[len(row) :])
        first, second = first + len(row), second + len(new)


def test_lengths_on_page_boundaries():
    """Where a prompt just fills its pages, subtracting one twice for the last token's place, or
    not at all, reads the wrong page."""
    rows = [prompt(n, n) for n in (SIZE - 1, SIZE, SIZE + 1, 2 * SIZE)]
    result = generate(tiny(), rows, max_new_tokens=SIZE + 2)
    for row, tokens in zip(rows, result.tokens, strict=True):
        logits = no_cache_logits(tiny(), row + tokens)[len(row) - 1 : -1]
        best = np.sort(logits, axis=1)
        clear = best[:, -1] - best[:, -2] > 1e-3
        np.testing.assert_array_equal(logits.argmax(1)[clear], np.asarray(tokens)[clear])


def test_rows_that_do_not_run_write_nothing():
    """A warm-up or a padded batch that writes through stale rows of the block table destroys a
    live sequence: a step in which no row runs changes no page, table or length."""
    rows = [prompt(n, n) for n in (1, 17, 16, 2, 30)]
    cache, _ = fill(rows)
    state, _ = runs()[1](tiny().params, decoding(cache, [1] * 5, [False] * 5))
    assert_same(state.cache, cache)
    state, logits = runs()[1](tiny().params, decoding(cache, [7] * 5, [False, True] + [False] * 3))
    assert state.cache.lengths.tolist() == [1, 18, 16, 2, 30]
    close(logits[1], no_cache_logits(tiny(), [*rows[1], 7])[-1])
    before, after = gather(cache, 1), gather(state.cache, 1)
    others = jnp.asarray([0, 2, 3, 4])
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old[others], new[others])


def test_a_damaged_sequence_stays_alone():
    """NaN in one sequence's pages must not reach the others through a product with zero."""
    rows = [prompt(n, n) for n in (5, 17, 16, 2, 30)]
    cache, _ = fill(rows)
    mine = cache.block_tables[1]
    pools = [p.at[mine].set(jnp.nan, mode="drop") for p in (*cache.k_pages, *cache.v_pages)]
    damaged = dataclasses.replace(cache, k_pages=tuple(pools[:2]), v_pages=tuple(pools[2:]))
    _, whole = runs()[1](tiny().params, decoding(cache, [7] * 5, [True] * 5))
    state, torn = runs()[1](tiny().params, decoding(damaged, [7] * 5, [True] * 5))
    assert state.finite.tolist() == [True, False, True, True, True]
    assert state.finished.tolist() == [RUNNING, BROKEN, RUNNING, RUNNING, RUNNING]
    others = np.asarray([0, 2, 3, 4])
    close(np.asarray(torn)[others], np.asarray(whole)[others])
    assert np.isnan(torn[1]).all()


@pytest.mark.slow
def test_a_step_without_a_free_page_loses_nothing():
    """Running out is a value: nobody's tokens, tables or lengths change, whoever lacked a page."""
    rows = [prompt(n, n) for n in (5, 16, 17, 2, 1)]
    cache, _ = fill(rows, num_pages=6)
    assert int(cache.pages_free) == 0
    state, _ = runs()[1](tiny().params, decoding(cache, [7] * 5, [True] * 5))
    reservation = state.reservation
    assert (bool(reservation.ok), int(reservation.needed), int(reservation.free)) == (False, 1, 0)
    for name in ("block_tables", "lengths", "page_refs"):
        np.testing.assert_array_equal(getattr(state.cache, name), getattr(cache, name))
    for layer in range(2):
        for old, new in zip(gather(cache, layer), gather(state.cache, layer), strict=True):
            np.testing.assert_array_equal(old, new)
    state, logits = runs()[1](tiny().params, decoding(cache, [7] * 5, [True, False] + [True] * 3))
    assert bool(state.reservation.ok)  # all who run have an open page
    for row in (0, 2, 3, 4):
        close(logits[row], no_cache_logits(tiny(), [*rows[row], 7])[-1])


@pytest.mark.slow
def test_keys_that_overflow_the_cache_are_an_error_and_no_text():
    """The likeliest of NaN logits is token 0, and so are all that follow: a fluent-looking nothing.
    Every entry says which prompt it was; with a wider cache the same model runs."""
    checkpoint = random_checkpoint(CONFIGS["llama"], seed=7)
    for name, weight in checkpoint.weights.items():
        if ".attention.k." in name:
            weight *= 1e6
    hot, half = from_checkpoint(checkpoint, name="hot"), CacheConfig(dtype="float16")
    ids = prompt(20)
    for where, call in {
        "prompt 0": lambda: generate(hot, [ids, ids[:3]], max_new_tokens=16, cache=half),
        "prompt": lambda: list(stream(hot, ids, max_new_tokens=16, cache=half)),
        "text, after token 0": lambda: score(hot, ids, cache=half),
    }.items():
        message = f"^{where}: the logits of hot are not finite.*float16.*CacheConfig"
        with pytest.raises(KvjaxError, match=message):
            call()
    assert len(generate(hot, ids, max_new_tokens=16).tokens[0]) == 16
