"""Paged equals contiguous equals no cache: logits of every token, however they are stored."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.config import CacheConfig
from kvjax.decode import Sampling, score
from kvjax.decode.sampling import make_sampler
from kvjax.decode.step import RUNNING, Prompts, Rules, decode_step, prefill_chunk, start
from tests.kvjax.cache.plain import scattered
from tests.kvjax.decode.tiny import (
    CONFIGS,
    VOCAB,
    contiguous_logits,
    logprobs,
    model,
    no_cache_logits,
    prompt,
)

LENGTHS = (112, 71)  # two sequences; the first is the yardsticks'
PREFILLED = (99, 64)
NO_STOPS = jnp.full((8,), -1, jnp.int32)


@functools.cache
def made(name):
    return model(name)


@functools.cache
def expected(name):
    """float32 logits of both sequences without a cache."""
    return [no_cache_logits(made(name), prompt(n, seed)) for seed, n in enumerate(LENGTHS)]


@functools.partial(jax.jit, static_argnums=(0, 1))
def prefill(graphdef, chunk, params, state, prompts, index):
    decoder = nnx.merge(graphdef, params)
    state, hidden = prefill_chunk(decoder, state, prompts, index, chunk=chunk)
    return state, decoder.logits(hidden)


@functools.partial(jax.jit, static_argnums=0)
def step(graphdef, params, state, rules):
    """One decode step, and the logits its draw saw."""
    decoder = nnx.merge(graphdef, params)
    state = decode_step(decoder, state, rules)
    return state, decoder.logits(state.hidden)


def paged_logits(of, page_size, chunk):
    """Logits of both sequences: prompts in ragged chunks, then, a token a step, the rest as given.

    Pages come from a pool in which every other one is taken and all hold NaN.
    """
    ids = [prompt(n, seed) for seed, n in enumerate(LENGTHS)]
    width = -(-LENGTHS[0] // page_size)
    pages = 2 * (width + -(-LENGTHS[1] // page_size))
    taken = np.random.default_rng(page_size).permutation(pages)[: pages // 2]
    cache = scattered(pages, 3, pages, page_size, blocked=taken, spec=of.spec)
    limits = jnp.asarray([1000, 1000, 0], jnp.int32)
    state = start(cache, of.config.hidden_size, limits)

    flat = np.concatenate([row[:n] for row, n in zip(ids, PREFILLED, strict=True)])
    chunks = -(-flat.size // chunk)
    tokens = jnp.asarray(np.pad(flat, (0, chunks * chunk - flat.size)), jnp.int32)
    ends = list(itertools.accumulate((*PREFILLED, 0)))
    prompts = Prompts(tokens=tokens, cu_lengths=jnp.asarray([0, *ends], jnp.int32))
    found = []
    for index in range(chunks):
        state, logits = prefill(of.graphdef, chunk, of.params, state, prompts, jnp.int32(index))
        found.append(np.asarray(logits))
    found = np.concatenate(found)
    rows = [[found[: ends[0]]], [found[ends[0] : ends[1]]]]

    rules = Rules(make_sampler(Sampling(), VOCAB), jax.random.key(0), NO_STOPS, limits)
    for offset in range(LENGTHS[0] - PREFILLED[0]):
        places = [n + offset for n in PREFILLED]
        runs = [place < n for place, n in zip(places, LENGTHS, strict=True)]
        given = [
            row[place] if run else 0 for row, place, run in zip(ids, places, runs, strict=True)
        ]
        finished = [RUNNING if run else 1 for run in (*runs, False)]
        state = dataclasses.replace(
            state,
            tokens=jnp.asarray([*given, 0], jnp.int32),
            finished=jnp.asarray(finished, jnp.int32),
        )
        state, logits = step(of.graphdef, of.params, state, rules)
        for row in range(2):
            if runs[row]:
                rows[row].append(np.asarray(logits[row : row + 1]))
    assert state.cache.lengths.tolist() == [*LENGTHS, 0]
    assert int(state.cache.pages_free) == 0
    return [np.concatenate(part) for part in rows]


def assert_close(got, want):
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


CASES = [
    ("llama", 8, 16),
    ("llama", 128, 176),
    ("mistral", 16, 64),
    ("gemma", 16, 32),
    ("soft_caps", 24, 48),
    ("mha", 64, 80),
    ("groups_of_3", 128, 32),
]


@pytest.mark.parametrize(("name", "page_size", "chunk"), CASES)
def test_logits(name, page_size, chunk):
    """Windows, soft caps, QK norms and every grouping of heads, in chunks that begin and end
    anywhere (a mask that forgets a chunk's offset sees too little) and then a token at a time,
    on pages in no order."""
    got = paged_logits(made(name), page_size, chunk)
    for paged, want in zip(got, expected(name), strict=True):
        assert_close(paged, want)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_yardsticks_agree(name):
    ids = prompt(LENGTHS[0], 0)
    assert_close(contiguous_logits(made(name), ids, 28), expected(name)[0])


@pytest.mark.parametrize(
    ("name", "page_size", "chunk"),
    [("llama", 16, 16), ("mistral", 32, 48), ("gemma", 128, 112), ("soft_caps", 64, 512)],
)
def test_scores(name, page_size, chunk):
    ids = prompt(LENGTHS[0], 0)
    result = score(made(name), ids, cache=CacheConfig(page_size=page_size), prefill_chunk=chunk)
    want = logprobs(expected(name)[0], ids)
    assert result.tokens == ids
    assert result.logprobs[0] is result.top_tokens[0] is None
    assert_close(result.logprobs[1:], want)
    assert result.top_tokens[1:] == expected(name)[0][:-1].argmax(1).tolist()
    assert result.perplexity == pytest.approx(np.exp(-want.mean()), rel=1e-5)
    assert result.stats.pages_used == -(-LENGTHS[0] // page_size)
    assert result.stats.prompt_tokens == LENGTHS[0]


def test_scores_by_the_reference_implementation():
    ids = prompt(LENGTHS[0], 0)
    result = score(made("gemma"), ids, cache=CacheConfig(attention="reference"))
    assert_close(result.logprobs[1:], logprobs(expected("gemma")[0], ids))


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.05), ("float16", 0.005)])
def test_a_cache_of_fewer_bits_is_near(dtype, most):
    ids = prompt(LENGTHS[0], 0)
    result = score(made("llama"), ids, cache=CacheConfig(dtype=dtype))
    error = np.abs(np.asarray(result.logprobs[1:]) - logprobs(expected("llama")[0], ids))
    assert 0 < error.mean() < most
    assert list(result.stats.cache_bytes) == [dtype]
