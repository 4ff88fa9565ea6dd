"""Pages of latents under a model: absorbed attention over them equals one expanded forward."""

import dataclasses
import functools
import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax import CacheConfig, KvjaxError
from kvjax.cache import fork, init
from kvjax.decode import Sampling, attend_latents, inputs
from kvjax.decode.opening import _prefill_chunk
from kvjax.decode.sampling import make_sampler
from kvjax.decode.shapes import plan
from kvjax.decode.step import RUNNING, Prompts, Rules, decode_step, prefill_chunk, start
from kvjax.decode.stream import _step
from kvjax.model import from_checkpoint, kv_spec
from kvjax.models import Indexer, Latent, LayerConfig, RopeScaling, random_checkpoint
from kvjax.pallas_kernels import expanded_latent_attention
from kvjax.pallas_kernels.mosaic.layout import pool_format
from tests.kvjax.cache.plain import scattered
from tests.kvjax.decode.test_tpu_compile import ABSTRACT_MESH, on, there  # noqa: F401
from tests.kvjax.decode.tiny import VOCAB, config, logprobs, no_cache_logits, prompt

DATA = pathlib.Path(__file__).resolve().parents[2] / "models" / "data"
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def latent_layer(heads, nope, rope, rank, value, **options):
    return LayerConfig(heads, heads, nope + rope, latent=Latent(rank, rope, value), **options)


@functools.cache
def model(name):
    if name != "yarn":
        return kvjax.load(DATA / name, dtype="float32")
    yarn = RopeScaling("yarn", factor=4.0, original_context=64, attention_factor=1.0)
    layer = latent_layer(3, 6, 4, 10, 14, rope_scaling=yarn)
    made = config(layer, layer, attn_scale=10**-0.5 * 1.3)
    return from_checkpoint(random_checkpoint(made, seed=3), name=name)


@functools.partial(quick, static_argnums=(0, 1))
def prefill(graphdef, chunk, params, state, prompts, index):
    decoder = nnx.merge(graphdef, params)
    state, hidden = prefill_chunk(decoder, state, prompts, index, chunk=chunk)
    return state, decoder.logits(hidden)


@functools.partial(quick, static_argnums=0)
def step(graphdef, params, state, rules):
    decoder = nnx.merge(graphdef, params)
    state = decode_step(decoder, state, rules)
    return state, decoder.logits(state.hidden)


def paged_logits(of, prompts, more, spec=None, **options):
    """float32 [T, V] of each row: two prompts and a fork of the second, continued by other tokens.

    Prompts come in chunks that cut them anywhere. Every second page is taken, and all hold NaN.
    """
    blocked, chunk = np.random.default_rng(0).permutation(40)[:20], 16
    cache = scattered(40, 4, 20, 8, blocked=blocked, spec=spec or of.spec, **options)
    limits = jnp.asarray([1000, 1000, 1000, 0], jnp.int32)
    state = start(cache, of.config.hidden_size, limits)
    flat = np.concatenate(prompts)
    chunks = -(-flat.size // chunk)
    ends = [*itertools.accumulate(map(len, prompts))]
    stream = Prompts(
        jnp.asarray(np.pad(flat, (0, chunks * chunk - flat.size)), jnp.int32),
        jnp.asarray([0, *ends, ends[-1], ends[-1]], jnp.int32),
    )
    found = []
    for index in range(chunks):
        state, logits = prefill(of.graphdef, chunk, of.params, state, stream, jnp.int32(index))
        found.append(np.asarray(logits))
    prefilled = np.split(np.concatenate(found)[: flat.size], ends[:1])
    cache, reservation = quick(fork)(state.cache, jnp.int32(1), jnp.int32(2))
    assert bool(reservation.ok)
    state = dataclasses.replace(state, cache=cache)
    stops = jnp.full((8,), -1, jnp.int32)
    rules = Rules(make_sampler(Sampling(), VOCAB), jax.random.key(0), stops, limits)
    steps = []
    for tokens in zip(*more, strict=True):
        state = dataclasses.replace(
            state,
            tokens=jnp.asarray([*tokens, 0], jnp.int32),
            finished=jnp.asarray([RUNNING] * 3 + [1], jnp.int32),
        )
        state, logits = step(of.graphdef, of.params, state, rules)
        steps.append(np.asarray(logits))
    assert bool(state.sound)
    rows = zip((0, 1, 1), np.stack(steps, axis=1), strict=False)
    return [np.concatenate([prefilled[source], drawn]) for source, drawn in rows]


@pytest.mark.parametrize(
    "name", ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"]
)
def test_logits_of_chunks_and_steps_equal_the_reference(name):
    """transformers' logits of one text, of which both prompts are beginnings."""
    with np.load(DATA / name / "expected.npz") as expected:
        tokens, logits = expected["tokens"], expected["logits"]
    got = paged_logits(
        model(name), [tokens[:37], tokens[:6]], [tokens[37:], tokens[6:17], prompt(11)]
    )
    np.testing.assert_allclose(got[0], logits, atol=1e-4)
    np.testing.assert_allclose(got[1], logits[:17], atol=1e-4)


@pytest.mark.slow
def test_forks_equal_one_expanded_forward():
    """Of a model whose scores have another scale than that of its heads."""
    prompts, more = [prompt(37), prompt(12, seed=1)], [prompt(6, seed=n) for n in (2, 3, 4)]
    of = model("yarn")
    got = paged_logits(of, prompts, more)
    for logits, ids, rest in zip(got, [*prompts, prompts[1]], more, strict=True):
        np.testing.assert_allclose(logits, no_cache_logits(of, ids + rest), atol=1e-4)


@pytest.mark.slow
def test_large_chunks_make_keys_and_values_of_latents(monkeypatch):
    """Where that costs less; a chunk holds several prompts, and a part of one after another."""
    made = config(latent_layer(2, 6, 4, 300, 8), latent_layer(2, 6, 4, 300, 8))
    of = from_checkpoint(random_checkpoint(made, seed=3), name="wide", dtype="float32")
    prompts, calls = [prompt(150), prompt(30, seed=1)], []

    def attend(q, *args, **options):
        calls.append(q.shape)
        return expanded_latent_attention(q, *args, **options)

    cache = CacheConfig(page_size=8)
    monkeypatch.setattr(attend_latents, "expanded_latent_attention", attend)
    scored = kvjax.score(of, prompts[0], prefill_chunk=64, cache=cache)
    expected = logprobs(no_cache_logits(of, prompts[0]), prompts[0])
    np.testing.assert_allclose(scored.logprobs[1:], expected, atol=1e-5, rtol=1e-5)
    assert calls == [(64, 2, 10)] * 2  # of both layers
    pages = init(of.spec, num_pages=20, batch=1, max_pages=20, page_size=8)
    wins = [attend_latents.expands_latents(of.config, 0, n, pages, None) for n in (1, 64)]
    assert wins == [False, True]
    result = kvjax.generate(of, prompts, max_new_tokens=4, stop_tokens=(), cache=cache)
    for ids, tokens in zip(prompts, result.tokens, strict=True):
        logits = no_cache_logits(of, [*ids, *tokens])
        assert logits[len(ids) - 1 : -1].argmax(axis=1).tolist() == tokens


def test_what_a_token_costs_is_what_pages_take():
    spec = model("deepseek_v3").spec
    assert spec.bytes_per_token == 2 * (16 + 8) * 4
    cache = scattered(6, 2, 3, 8, spec=spec)
    pools = (*cache.k_pages, *cache.v_pages)
    assert [pool.shape for pool in pools] == [(6, 1, 8, 8)] * 2 + [(6, 1, 8, 16)] * 2
    assert sum(pool.nbytes for pool in pools) == 6 * spec.bytes_per_page(8)


def test_what_pages_of_latents_have_not_is_refused():
    of, ids = model("deepseek_v3"), prompt(20)
    with pytest.raises(KvjaxError, match="attention='tpu' cannot run: it needs a TPU"):
        kvjax.score(of, ids, cache=CacheConfig(page_size=8, attention="tpu"))
    with pytest.raises(ValueError, match="window=5 must be None: a layer with a latent sees all"):
        latent_layer(3, 6, 4, 10, 14, window=5)
    with pytest.raises(ValueError, match=r"attn_soft_cap=2.0 must be None: layers with a latent"):
        config(latent_layer(3, 6, 4, 10, 14), attn_soft_cap=2.0)


@pytest.mark.slow
@pytest.mark.parametrize("function", [_prefill_chunk, _step])
@pytest.mark.parametrize("index_dtype", [None, "float4_e2m1fn"])
def test_programs_for_a_tpu_read_and_write_pools_in_place(there, function, index_dtype):  # noqa: F811
    """DeepSeek-V3's widths, of which position keys need the layout of kernels, and V3.2's."""
    layer, pages = latent_layer(16, 128, 64, 512, 128), 512
    if index_dtype is not None:
        latent = dataclasses.replace(layer.latent, query_rank=128)
        layer = dataclasses.replace(layer, latent=latent, indexer=Indexer(64, 128, 256))
    made = config(layer, layer, max_context=4096)
    of = from_checkpoint(random_checkpoint(made), name="random", dtype="bfloat16")
    given = CacheConfig(page_size=64, num_pages=pages)
    spec = kv_spec(made, "bfloat16", index_dtype=index_dtype)
    shapes = plan(made, spec, [600, 3], new_tokens=32, prefill_chunk=256, cache=given)
    limits = inputs.row_limits(2, 32, shapes.batch)
    rules = Rules(
        make_sampler(Sampling(), VOCAB), jax.random.key(0), inputs.padded_stops([]), limits
    )
    cache = jax.eval_shape(lambda: inputs.empty_cache(shapes))
    state = jax.eval_shape(lambda cache: start(cache, made.hidden_size, limits), cache)
    state = on(inputs.formats_between(state, there), state)
    prompts = inputs.flat_prompts([[1] * 600, [2] * 3], shapes)
    rest = (rules,) if function is _step else (prompts, jnp.int32(0))
    assert state.cache.k_pages[0].format == pool_format(there)
    with jax.sharding.use_abstract_mesh(ABSTRACT_MESH):
        program, _ = inputs.compiled(
            function,
            (of.graphdef, shapes),
            on(there, of.params),
            state,
            *on(there, rest),
            donate=(1,),
            result_as=1,
        )
    text = program.as_text()
    assert "tpu_custom_call" in text
    widths = "64|512" if index_dtype is None else "64|128|512"
    pool = rf"(?:bf16|u8)\[{pages},(?:1,)?(?:32|64),(?:{widths})\]"
    assert re.search(pool, text)
    assert not re.findall(rf"{pool}\S* (?:copy|copy-start|transpose)\(", text)
    pools = jax.tree.leaves((cache.k_pages, cache.v_pages, cache.index_pages))
    total = sum(x.size * x.dtype.itemsize for x in pools)
    assert program.memory_analysis().alias_size_in_bytes >= total
