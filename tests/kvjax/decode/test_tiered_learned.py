"""Decoding over pages that a distilled indexer chooses."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.config import CacheConfig
from kvjax.decode import distill_indexer, generate
from kvjax.decode.tiered_index import build_index, page_mass
from kvjax.errors import KvjaxError
from kvjax.policies import Place, Select, Window
from tests.kvjax.decode.forced import forced_logits
from tests.kvjax.decode.tiny import model, no_cache_logits, prompt

LENGTHS, TOKENS = (85, 64, 30), 19  # pages begin, end, and fill while decoding


@functools.cache
def indexer(name):
    return distill_indexer(model(name), prompt(256), tokens=256, heads=2, dim=8, steps=3)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_all_pages_are_exact(name):
    """Of "gemma" one layer has a sliding window, and no indexer."""
    ids = [prompt(n + TOKENS, row) for row, n in enumerate(LENGTHS)]
    prompts = [row[:n] for row, n in zip(ids, LENGTHS, strict=True)]
    given = [row[n:] for row, n in zip(ids, LENGTHS, strict=True)]
    cache = CacheConfig(
        page_size=8, select=Select("100%", indexer(name)), window=Window(1), place=Place()
    )
    got = forced_logits(model(name), prompts, given, cache).logits
    for row, n in enumerate(LENGTHS):
        want = no_cache_logits(model(name), ids[row])[n - 1 :][: len(got[row])]
        np.testing.assert_allclose(got[row], want, atol=1e-5, rtol=1e-5)


def test_it_is_told_where_the_token_is():
    of, layer = model(), indexer("llama").layers[1]
    rng = np.random.default_rng(0)
    keys = jnp.asarray(rng.normal(size=(6, 2, 8, 8)), jnp.float32)
    queries = jnp.asarray(rng.normal(size=(4, 8)), jnp.float32)
    full = jnp.int32(6)
    arrays = build_index(layer, keys, keys, full)
    masses = [
        page_mass(layer, of.config, 1, queries, arrays, jnp.int32(length), full)
        for length in (48, 53)
    ]
    for length, mass in zip((48, 53), masses, strict=True):
        wanted = layer.page_mass(arrays, queries, full, 1.0, position=jnp.int32(length))
        np.testing.assert_array_equal(mass, wanted)
    assert np.abs(masses[0] - masses[1]).max() > 1e-3


def test_an_indexer_of_another_model_is_refused():
    cache = CacheConfig(select=Select("25%", indexer("llama")))
    with pytest.raises(KvjaxError, match=r"by is an indexer of model .* and mha is"):
        generate(model("mha"), prompt(40), max_new_tokens=2, cache=cache)
