"""Text through packed pages: equal to attention that packs and unpacks for itself."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.cache import init, put_chunk
from kvjax.config import CacheConfig
from kvjax.decode import generate, score, stream
from kvjax.decode.attend_recent import Chunk, attend_chunk
from kvjax.errors import KvjaxError
from kvjax.formats import Format, LayerFormat, Packing, float8, int4, int8
from kvjax.pallas_kernels import encoded_before, float8_paged_attention
from tests.kvjax.decode.tiny import model, prompt

PAGE, TOKENS = 16, 150
CASES = {
    "int4, the first 20 tokens as they are": ("llama", int4(sinks=20)),
    "a window, a soft cap, the first page": (
        "gemma",
        dataclasses.replace(int8(), skip_windows=False, sinks=1),
    ),
    "newest 35 tokens, a layer skipped": (
        "groups_of_3",
        dataclasses.replace(float8(), residual=35, skip_layers=(0,)),
    ),
}


def oracle(of, format, ids):
    """float32 [T, V]: every query sees, of what stands before it, what was packed when it came."""

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def logits(params, tokens):
        decoder = nnx.merge(of.graphdef, params)
        positions = jnp.arange(len(ids), dtype=jnp.int32)
        first = jnp.arange(0, len(ids), PAGE, dtype=jnp.int32)
        limit = encoded_before(positions, format.recent(PAGE), PAGE)
        sinks = format.sink_tokens(PAGE)
        seen = positions[None] <= positions[:, None]

        def unpacked(packing, x):
            pages = x.reshape(-1, PAGE, *x.shape[1:]).swapaxes(1, 2)
            return packing.encode(pages, first).values().swapaxes(1, 2).reshape(x.shape)

        def attend(layer, q, k, v, state):
            chosen, window = format.layer(of.spec, layer), of.config.layers[layer].window
            old = (k, v)
            if chosen is not None:
                old = unpacked(chosen.keys, k), unpacked(chosen.values, v)
            packed = (positions[None] < limit[:, None]) & (positions[None] >= sinks)
            packed = packed[None, None]
            visible = seen
            if window is not None:
                visible = seen & (positions[None] > positions[:, None] - window)
            grouped = q.reshape(len(ids), k.shape[1], -1, q.shape[2])
            scores = [jnp.einsum("thgd,shd->hgts", grouped, x) for x in (old[0], k)]
            scores = jnp.where(packed, *scores) * of.config.scale(layer)
            weights = jax.nn.softmax(jnp.where(visible[None, None], scores, -jnp.inf), axis=-1)
            parts = [jnp.where(packed, weights, 0.0), jnp.where(packed, 0.0, weights)]
            out = sum(
                jnp.einsum("hgts,shd->thgd", part, x)
                for part, x in zip(parts, (old[1], v), strict=True)
            )
            return out.reshape(*q.shape[:2], -1), state

        return decoder.logits(decoder(tokens, positions, attend, None)[0])

    return np.asarray(logits(of.params, jnp.asarray(ids, jnp.int32)))


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_attention_that_packs_for_itself(case):
    name, format = CASES[case]
    of, ids = model(name), prompt(160)
    got = score(
        of, ids[:TOKENS], cache=CacheConfig(page_size=PAGE, format=format), prefill_chunk=64
    )
    want = oracle(of, format, ids)[:TOKENS].astype(np.float64)
    want = want - np.log(np.exp(want).sum(1, keepdims=True))
    want = want[np.arange(TOKENS - 1), ids[1:TOKENS]]
    np.testing.assert_allclose(got.logprobs[1:], want, atol=2e-5)
    exact = score(of, ids[:TOKENS], cache=CacheConfig(page_size=PAGE), prefill_chunk=64)
    assert np.abs(np.subtract(exact.logprobs[1:], want)).max() > 1e-3


@pytest.mark.slow
def test_tokens_do_not_depend_on_chunks_or_on_the_batch():
    of, cache = model("llama"), CacheConfig(format=int4())
    prompts = [prompt(70, 1), prompt(33, 2), prompt(5, 3)]
    options = {"max_new_tokens": 40, "cache": cache, "stop_at_eos": False}
    together = generate(of, prompts, prefill_chunk=32, **options)
    (alone,) = generate(of, prompts[0], prefill_chunk=64, **options).tokens
    assert together.tokens[0] == alone
    for ids, drawn in zip(prompts, together.tokens, strict=True):
        told = score(of, [*ids, *drawn], cache=cache, prefill_chunk=64)
        assert told.top_tokens[len(ids) :] == drawn
    assert together.stats.bytes_per_token == int4().bytes_per_token(of.spec, 16)
    assert together.stats.bytes_per_token < of.spec.bytes_per_token / 5


@pytest.mark.slow
def test_products_of_float8_are_near_those_of_float32(monkeypatch):
    """Prefill reads the codes in float32 either way: the first token is the same."""
    of, ids = model("llama"), prompt(70, 1)
    rows, calls = {}, []

    def counted(*arguments, **options):
        calls.append(options)
        return float8_paged_attention(*arguments, **options)

    monkeypatch.setattr("kvjax.decode.attend.float8_paged_attention", counted)
    for name in ("fp8", "fp8-products"):
        cache = CacheConfig(format=name)
        rows[name] = generate(of, ids, max_new_tokens=24, cache=cache, stop_at_eos=False).tokens[0]
        assert bool(calls) == (name == "fp8-products")
    same = sum(x == y for x, y in zip(*rows.values(), strict=True))
    assert rows["fp8"][0] == rows["fp8-products"][0]
    assert same >= 12
    by_token = CacheConfig(format=float8(per="token", products="float8"))
    with pytest.raises(KvjaxError, match="a page's head must have one scale"):
        generate(of, ids, cache=by_token)
    with pytest.raises(KvjaxError, match="the model caps its scores"):
        generate(model("soft_caps"), ids, cache=CacheConfig(format="fp8-products"))


@pytest.mark.slow
@pytest.mark.parametrize("sinks", [0, 1])
def test_what_is_not_finite_stays_in_its_sequence(sinks):
    """One chunk holds two prompts; the first has a value that is infinite."""
    of, format = model("llama"), int4(sinks=sinks)
    cache = init(of.spec, num_pages=4, batch=2, max_pages=2, page_size=PAGE, format=format)
    cu_lengths = jnp.asarray([0, 4, 8], jnp.int32)
    sequences = jnp.asarray([0] * 4 + [1] * 4, jnp.int32)
    slots = jnp.asarray([0, 1, 2, 3] * 2, jnp.int32)
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.normal(size=(8, n, 8)), jnp.float32) for n in (4, 2, 2))

    def attended(v):
        stored = put_chunk(cache, 0, k, v, cu_lengths)
        return attend_chunk(of.config, cache, stored, 0, q, Chunk(sequences, slots, k, v)).out

    clean, out = attended(v), attended(v.at[1, 0, 3].set(jnp.inf))
    np.testing.assert_array_equal(out[4:], clean[4:])
    np.testing.assert_array_equal(out[0], clean[0])
    assert np.isnan(out[1:4, :2]).all()  # heads of the first KV head
    np.testing.assert_array_equal(out[1:4, 2:], clean[1:4, 2:])


@pytest.mark.parametrize("layers", [((0, 3),), ((-1, Packing()),), 5])
def test_layers_are_pairs(layers):
    with pytest.raises(KvjaxError, match="LayerFormat"):
        Format(Packing(), Packing(), layers=layers)


def test_a_layer_has_one_packing():
    one = LayerFormat(int8().keys, int8().values)
    format = dataclasses.replace(int4(), layers=((1, one), (-1, one)))
    with pytest.raises(KvjaxError, match=r"layers has layer 1 more than once \(of 2;"):
        generate(model("llama"), prompt(20), cache=CacheConfig(format=format))


def test_a_layer_has_a_packing_of_its_own():
    of, other = model("llama").spec, LayerFormat(int8().keys, int8().values)
    format = dataclasses.replace(int4(), layers=((-1, other),))
    assert format.layer(of, 1) == other
    assert format.layer(of, 0) == LayerFormat(int4().keys, int4().values)


@pytest.mark.slow
@pytest.mark.parametrize("length", [5, 40])
def test_a_stream_is_what_one_program_draws(length):
    """Prompts shorter than the newest tokens that stay, too."""
    of, ids = model("llama"), prompt(length, 1)
    for format in (
        dataclasses.replace(int4(), sinks=20),
        dataclasses.replace(int8(), residual=200),
    ):
        options = {"max_new_tokens": 5, "cache": CacheConfig(format=format), "stop_at_eos": False}
        events = list(stream(of, ids, **options))
        assert [event.token for event in events] == generate(of, ids, **options).tokens[0]


def test_a_format_that_packs_nothing_is_refused():
    with pytest.raises(KvjaxError, match="format packs no layer"):
        generate(model("mistral"), prompt(20), cache=CacheConfig(format="int4"))


def test_a_format_is_found_by_its_name_and_refused_by_it():
    assert CacheConfig(format="int8").format == int8()
    with pytest.raises(KvjaxError, match=r"format is 'int5': must be one of fp8, "):
        CacheConfig(format="int5")
    with pytest.raises(KvjaxError, match="format is 4: must be a kvjax"):
        CacheConfig(format=4)
    with pytest.raises(KvjaxError, match=r"page_size is 16: groups of 32 tokens of keys"):
        generate(model("llama"), prompt(20), cache=CacheConfig(format="kivi2"))
