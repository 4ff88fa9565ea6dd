"""Models that choose tokens by an indexer, by the public functions: DeepSeek V3.2 and GLM-5."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import CacheConfig, KvjaxError, Place, PrefixCache, Select
from kvjax.cache import append, init, kept_index_keys, pool_bytes
from kvjax.model import from_checkpoint, kv_spec
from kvjax.models import Indexer, Latent, LayerConfig, random_checkpoint
from kvjax.spec import INDEX_BITS, INDEX_FLOAT4, INDEX_FLOAT8
from tests.kvjax.decode.test_latent_pages import paged_logits
from tests.kvjax.decode.tiny import config, logprobs, no_cache_logits, prompt

DATA = pathlib.Path(__file__).resolve().parents[2] / "models" / "data"
CACHE = CacheConfig(page_size=8)


@functools.cache
def checkpoint():
    """Two layers without experts, of which the second shares the first one's choice."""
    chooses = Indexer(num_heads=12, head_dim=6, top_k=9)
    latent = Latent(rank=16, rope_dim=4, value_dim=6, query_rank=12)
    layers = [
        LayerConfig(3, 3, 10, latent=latent, indexer=dataclasses.replace(chooses, shares=shares))
        for shares in (False, True)
    ]
    made = random_checkpoint(config(*layers), seed=7)
    for name, value in made.weights.items():
        if "norm" not in name:
            value *= 2
    return made


@pytest.fixture(scope="module")
def model():
    return from_checkpoint(checkpoint(), name="tiny")


def with_layers(**changed):
    """The model with other indexers, or none."""
    layers = []
    for layer in checkpoint().config.layers:
        indexer = dataclasses.replace(layer.indexer, **changed) if changed else None
        layers.append(dataclasses.replace(layer, indexer=indexer))
    weights = {k: v for k, v in checkpoint().weights.items() if changed or "indexer" not in k}
    other = dataclasses.replace(checkpoint().config, layers=tuple(layers))
    made = dataclasses.replace(checkpoint(), config=other, weights=weights)
    return from_checkpoint(made, name="x")


def assert_greedy(model, ids, tokens):
    """Each token is the likeliest after those before it, by one forward over all of them."""
    logits = no_cache_logits(model, [*ids, *tokens])
    assert logits[len(ids) - 1 : -1].argmax(axis=1).tolist() == tokens


@pytest.mark.slow
def test_a_batch_and_scores_equal_one_forward(model):
    """Nine tokens of forty: what is not chosen must not be seen, in chunks, steps and batches."""
    prompts, cache = [prompt(37), prompt(5, seed=1)], CacheConfig(page_size=24)
    result = kvjax.generate(model, prompts, max_new_tokens=12, stop_tokens=(), cache=cache)
    for ids, tokens in zip(prompts, result.tokens, strict=True):
        assert len(tokens) == 12
        assert_greedy(model, ids, tokens)
    scored = kvjax.score(model, [*prompts[0], *result.tokens[0]], prefill_chunk=16, cache=CACHE)
    expected = logprobs(no_cache_logits(model, scored.tokens), scored.tokens)
    np.testing.assert_allclose(scored.logprobs[1:], expected, atol=1e-4)
    stats = result.stats
    assert stats.bytes_per_token == model.spec.bytes_per_token == 4 * (2 * (16 + 4) + 6)
    assert stats.cache_bytes == {"float32": stats.pages_total * 24 * stats.bytes_per_token}


@pytest.mark.slow
def test_a_stream_equals_one_forward(model):
    ids = prompt(37)
    events = kvjax.stream(model, ids, max_new_tokens=8, stop_tokens=(), cache=CACHE)
    assert_greedy(model, ids, [event.token for event in events])


@pytest.mark.slow
def test_a_fork_has_the_index_keys_too(model):
    """Of full pages, which are shared, and of the open one, which is copied."""
    prompts, more = [prompt(37), prompt(28, seed=1)], [prompt(6, seed=n) for n in (2, 3, 4)]
    spec = kv_spec(model.config, "float32")
    got = paged_logits(model, prompts, more, spec)
    for logits, ids, rest in zip(got, [*prompts, prompts[1]], more, strict=True):
        np.testing.assert_allclose(logits, no_cache_logits(model, ids + rest), atol=1e-4)


def test_a_choice_of_all_is_dense():
    """Of as many tokens as pages have room for, and of as many as the context has."""
    dense, ids = with_layers(), prompt(45)
    expected = no_cache_logits(dense, ids)
    of = with_layers(top_k=47)
    (got, *_) = paged_logits(of, [ids[:40], ids[:3]], [ids[40:], ids[:5], ids[:5]])
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)
    scored = kvjax.score(with_layers(top_k=1000), ids, prefill_chunk=16, cache=CACHE)
    np.testing.assert_allclose(scored.logprobs[1:], logprobs(expected, ids), atol=1e-5, rtol=1e-5)
    assert np.abs(no_cache_logits(with_layers(top_k=9), ids) - expected).max() > 0.1


@pytest.mark.parametrize(
    ("index_dtype", "bits"),
    [pytest.param(INDEX_FLOAT8, 8, marks=pytest.mark.slow), (INDEX_FLOAT4, 4)],
)
def test_index_keys_of_few_bits_are_the_same_in_chunks_and_steps(model, index_dtype, bits):
    """What a token's key is rounded to depends on nothing else, and decides alike everywhere."""
    spec = kv_spec(model.config, "float32", index_dtype=index_dtype)
    ids = prompt(48, seed=4)
    early, late = (
        paged_logits(model, [ids[:at], ids[:3]], [ids[at:], ids[: 48 - at], ids[: 48 - at]], spec)[
            0
        ]
        for at in (16, 40)
    )
    np.testing.assert_allclose(early, late, atol=1e-5)
    exact = no_cache_logits(model, ids)
    assert np.abs(early - exact).max() > 1e-3  # some choices differ
    assert np.mean(early.argmax(axis=1) == exact.argmax(axis=1)) > 0.3
    assert spec.bytes_per_token == 2 * (16 + 4) * 4 + 6 * bits // 8 + 4
    cache = init(spec, num_pages=6, batch=1, max_pages=6, page_size=8)
    assert sum(pool_bytes(cache).values()) == 6 * spec.bytes_per_page(8)


def kept(model, index_dtype, keys):
    """Index keys as pages hold them: scales and values in float64."""
    spec = kv_spec(model.config, "float32", index_dtype=index_dtype)
    cache = init(spec, num_pages=2, batch=1, max_pages=2, page_size=8)
    new = kept_index_keys(cache, 0, jnp.asarray(keys, jnp.float32))
    return np.asarray(new.scales, np.float64), np.asarray(new.values, np.float64)


def test_kept_keys_are_near_and_float8_scales_powers_of_two(model):
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(64, 6)) * np.exp2(rng.integers(-20, 20, (64, 1)))
    keys[0], keys[1, 3], keys[2, 0], keys[3] = 0, np.nan, np.inf, 448.0
    whole = np.isfinite(keys).all(axis=1)
    greatest = np.maximum(np.abs(keys[whole]).max(axis=1, keepdims=True), 1e-4)
    for index_dtype in INDEX_BITS:
        scales, values = kept(model, index_dtype, keys)
        assert not np.isfinite(values[1:3]).any()
        assert set(values[0]) == {0.0}
        np.testing.assert_allclose(values[3], 448.0, rtol=1e-6)
        error, unit = np.abs(values - keys)[whole], scales[whole][:, None]
        if index_dtype == INDEX_FLOAT4:
            np.testing.assert_allclose(unit, greatest / 6, rtol=1e-6)
            assert (error <= unit * 1.0001).all()  # half of the way from 4 to 6
            continue
        assert set(np.frexp(unit)[0].reshape(-1)) == {0.5}
        assert (greatest <= 448 * unit).all()
        assert (greatest > 224 * unit).all()
        # Three bits of fraction: half a step is a sixteenth, and of subnormal numbers 2**-10.
        assert (error <= np.maximum(np.abs(keys[whole]) / 16, 2.0**-10 * unit) * 1.0001).all()


def test_a_score_that_is_no_number_ends_its_row(model):
    """An index key that is not finite would otherwise only never be chosen."""
    params = jax.tree.map(lambda x: x, model.params)  # of which the next line changes a dict
    norm = params["layers"][0]["attention"]["indexer"]["k_norm"]
    norm["weight"] = norm["weight"] * 1e5
    of = dataclasses.replace(model, params=params)
    with pytest.raises(KvjaxError, match="not finite"):
        kvjax.score(of, prompt(40), cache=CacheConfig(page_size=8, dtype="float16"))


def test_what_a_model_with_an_indexer_has_not_is_refused(model, tmp_path):
    ids = prompt(20)

    def refused(message, **options):
        with pytest.raises(KvjaxError, match=message):
            kvjax.generate(model, ids, max_new_tokens=4, cache=CacheConfig(page_size=8, **options))

    refused("select is given and tiny chooses tokens by an indexer", select=Select("50%"))
    refused("tiny chooses tokens by", select=Select("50%"), place=Place())
    refused("format packs layer 0, which chooses tokens by an indexer", format="int8")
    refused("attention='gpu' cannot run: it needs an NVIDIA GPU", attention="gpu")
    with pytest.raises(
        KvjaxError, match=r"tiny chooses tokens by an indexer, .* run it without prefixes"
    ):
        PrefixCache(tmp_path).add(model, ids, cache=CACHE)
    with pytest.raises(KvjaxError, match="index_dtype is 'int8': must be one of fp8, fp4, float8"):
        CacheConfig(index_dtype="int8")
    plain = kvjax.load(DATA / "deepseek_v3", dtype="float32")
    with pytest.raises(KvjaxError, match="index_dtype is 'float8_e4m3fn' and deepseek_v3 has no"):
        kvjax.generate(plain, ids, cache=CacheConfig(index_dtype="fp8"))
    spec = kv_spec(model.config, "float32", index_dtype=INDEX_FLOAT4)
    with pytest.raises(
        KvjaxError, match="page_size is 7: must be even, as two tokens share a byte"
    ):
        init(spec, num_pages=2, batch=1, max_pages=2, page_size=7)
    cache = init(model.spec, num_pages=2, batch=1, max_pages=2, page_size=8)
    with pytest.raises(KvjaxError, match="the cache keeps index keys, and append is given none"):
        append(cache, (), ())
