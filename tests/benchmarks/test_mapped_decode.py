"""Decoding over a prompt that every step reads from disk is decoding over all pages."""

import dataclasses
import os
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.mapped_decode import MappedPrompt
from benchmarks.needles import Needle
from benchmarks.tiered_measure import STEPS, decoded
from kvjax.cache import init
from kvjax.config import CacheConfig
from tests.kvjax.decode import tiny


class Bytes:
    """A tokenizer with few tokens."""

    def encode(self, text, add_bos=True):
        return [byte % tiny.VOCAB for byte in text.encode()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["soft_caps", "gemma"])
def test_nothing_but_the_place_of_the_prompt_differs(kind, tmp_path):
    model = dataclasses.replace(tiny.model(kind), tokenizer=Bytes())
    asked = [Needle("here", "code", 0.5, "what is it?")]
    given = (model, tiny.prompt(37), asked, CacheConfig())
    exact = decoded(*given, None, lambda text: None)
    forced = [answer.tokens for answer in exact.answers]
    path = tmp_path / "prompt"
    mapped = decoded(*given, forced, lambda text: None, mapped=path)
    assert path.stat().st_size == model.spec.bytes_per_token * 37
    (ours,), (theirs,) = exact.answers, mapped.answers
    assert ours.logprobs.shape == (STEPS + 1, tiny.VOCAB)
    np.testing.assert_allclose(theirs.logprobs, ours.logprobs, atol=2e-5)
    assert theirs.tokens == ours.tokens


def test_a_layer_is_read_anew(tmp_path):
    spec = tiny.model().spec
    cache = init(spec, batch=1, num_pages=3, max_pages=2)
    rng = np.random.default_rng(0)
    pools = [jnp.asarray(rng.normal(size=pool.shape), pool.dtype) for pool in cache.k_pages]
    cache = dataclasses.replace(
        cache, k_pages=tuple(pools), block_tables=jnp.asarray([[2, 0]], jnp.int32)
    )
    prompt = MappedPrompt(tmp_path / "prompt", cache, 18)
    keys = np.asarray(pools[1])
    expected = np.concatenate([keys[2], keys[0][:, :2]], axis=1).swapaxes(0, 1)
    np.testing.assert_array_equal(prompt.layer(1)[0], expected)
    (tmp_path / "prompt").write_bytes(bytes(len(pools) * prompt.layer_bytes))
    np.testing.assert_array_equal(prompt.layer(1), np.zeros_like(prompt.layer(1)))


def test_a_layer_that_was_read_is_dropped_from_memory(tmp_path, monkeypatch):
    """The kernel keeps pages that are mapped, so the advice must come after the map is gone."""
    cache = init(tiny.model().spec, batch=1, num_pages=3, max_pages=2)
    cache = dataclasses.replace(cache, block_tables=jnp.asarray([[2, 0]], jnp.int32))
    prompt = MappedPrompt(tmp_path / "prompt", cache, 18)
    advised = []

    def advise(file, begin, size, advice):
        assert os.path.samestat(os.fstat(file), prompt.path.stat())
        assert str(prompt.path) not in pathlib.Path("/proc/self/maps").read_text()
        advised.append((begin, size, advice))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    for layer in (1, 0):
        prompt.layer(layer)
    size = prompt.layer_bytes
    assert advised == [(begin, size, os.POSIX_FADV_DONTNEED) for begin in (size, 0)]
