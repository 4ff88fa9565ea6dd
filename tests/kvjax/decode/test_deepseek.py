"""DeepSeek by the public functions: pages of latents, or of keys and values made from them."""

import pathlib

import numpy as np
import pytest

import kvjax
from kvjax import CacheConfig, KvjaxError, Place, Select
from kvjax.decode import calibrate_formats
from tests.kvjax.decode.tiny import logprobs, no_cache_logits, prompt

DATA = pathlib.Path(__file__).resolve().parents[2] / "models" / "data"
CACHE = CacheConfig(page_size=8)


@pytest.fixture(scope="module")
def model():
    return kvjax.load(DATA / "deepseek_v3", dtype="float32")


def assert_greedy(model, ids, tokens):
    """Each token is the likeliest after those before it, by one forward over all of them."""
    logits = no_cache_logits(model, [*ids, *tokens])
    assert logits[len(ids) - 1 : -1].argmax(axis=1).tolist() == tokens


def test_prefill_and_decoding_of_a_batch_equal_one_forward(model):
    prompts = [prompt(37), prompt(5, seed=1)]
    result = kvjax.generate(model, prompts, max_new_tokens=12, stop_tokens=(), cache=CACHE)
    for ids, tokens in zip(prompts, result.tokens, strict=True):
        assert len(tokens) == 12
        assert_greedy(model, ids, tokens)
    stats = result.stats
    assert stats.bytes_per_token == model.spec.bytes_per_token == 2 * (16 + 8) * 4
    assert stats.cache_bytes == {"float32": stats.pages_total * 8 * stats.bytes_per_token}


def test_scores_in_chunks_equal_one_forward(model):
    ids = prompt(60, seed=2)
    scored = kvjax.score(model, ids, prefill_chunk=32, cache=CACHE)
    expected = logprobs(no_cache_logits(model, ids), ids)
    np.testing.assert_allclose(scored.logprobs[1:], expected, atol=1e-4)


@pytest.mark.slow
def test_decoding_from_all_pages_selected_equals_one_forward(model):
    ids = prompt(42, seed=3)
    every = CacheConfig(page_size=8, select=Select("100%", by="low-rank"), place=Place())
    result = kvjax.generate(model, ids, max_new_tokens=6, stop_tokens=(), cache=every)
    assert_greedy(model, ids, result.tokens[0])
    assert result.stats.bytes_per_token == 2 * (16 + 8) * 4


def test_what_needs_keys_and_values_is_refused(model):
    with pytest.raises(KvjaxError, match="deepseek_v3 makes keys from latents"):
        calibrate_formats(model, prompt(20))
