"""YOCO under a paged cache: one layer's pages for a cross-decoder, and rings under windows."""

import dataclasses
import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import kvjax
from kvjax import CacheConfig, KvjaxError, PrefixCache, PrefixConfig, Select
from kvjax.cache import fork, init, pool_bytes
from kvjax.convert.mla import check_convertible
from kvjax.decode import Sampling, calibrate_formats, distill_indexer, inputs
from kvjax.decode.opening import _prefill_chunk
from kvjax.decode.sampling import make_sampler
from kvjax.decode.shapes import plan
from kvjax.decode.step import (
    RUNNING,
    Prompts,
    Rules,
    decode_step,
    prefill_chunk,
    prefill_last,
    start,
)
from kvjax.decode.stream import _step
from kvjax.model import from_checkpoint
from kvjax.models import LayerConfig, ModelConfig, random_checkpoint
from kvjax.models.yoco_files import yoco_config
from kvjax.spec import KVSpec, LayerSpec
from tests.kvjax.cache.plain import scattered
from tests.kvjax.decode.test_tpu_compile import ABSTRACT_MESH, on, there  # noqa: F401
from tests.kvjax.decode.tiny import VOCAB, logprobs, prompt
from tests.models.yoco_oracle import ARGS, oracle_logits, released_weights

WINDOW, PAGE, CHUNK = ARGS["sliding_window"], 8, 16
SELF, CROSS = 2 * 2 * 16 * 4, 2 * 2 * 8 * 4  # bytes of a token in a layer of each decoder
RUNS = (prefill_chunk, prefill_last)
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
expected = functools.partial(oracle_logits, released_weights())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-yoco")
    (folder / "params.json").write_text(json.dumps(ARGS))
    safetensors.numpy.save_file(released_weights(), folder / "model.safetensors")
    return kvjax.load(folder, dtype="float32")


@functools.partial(quick, static_argnums=(0, 1))
def prefill(graphdef, run, params, state, prompts, index):
    decoder = nnx.merge(graphdef, params)
    return run(decoder, state, prompts, index, chunk=CHUNK)


@functools.partial(quick, static_argnums=0)
def logits(graphdef, params, hidden):
    return nnx.merge(graphdef, params).logits(hidden)


@functools.partial(quick, static_argnums=0)
def step(graphdef, params, state, rules):
    decoder = nnx.merge(graphdef, params)
    state = decode_step(decoder, state, rules)
    return state, decoder.logits(state.hidden)


def run(of, prompts, more, cache):
    """Logits of chunks [T, V], of what prompts' last tokens alone gave [B, V], and of steps.

    Two prompts and a fork of the second, each continued by tokens of its own.
    """
    limits = jnp.asarray([1000, 1000, 1000, 0], jnp.int32)
    state = start(cache, of.config.hidden_size, limits)
    flat, ends = np.concatenate(prompts), [*itertools.accumulate(map(len, prompts))]
    chunks = -(-flat.size // CHUNK)
    stream = Prompts(
        jnp.asarray(np.pad(flat, (0, chunks * CHUNK - flat.size)), jnp.int32),
        jnp.asarray([0, *ends, ends[-1], ends[-1]], jnp.int32),
    )
    whole, found = state, []
    for index in range(chunks):
        given = stream, jnp.int32(index)
        whole, hidden = prefill(of.graphdef, prefill_chunk, of.params, whole, *given)
        found.append(np.asarray(logits(of.graphdef, of.params, hidden)))
        state = prefill(of.graphdef, prefill_last, of.params, state, *given)
    last = np.asarray(logits(of.graphdef, of.params, state.hidden))
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
        state, drawn = step(of.graphdef, of.params, state, rules)
        steps.append(np.asarray(drawn))
    assert bool(state.sound)
    return np.concatenate(found)[: flat.size], last, np.stack(steps, axis=1)


def test_chunks_last_tokens_and_steps_equal_the_equations(model):
    """Every slot of the pools holds NaN before; rings of 5 pages go round twice."""
    prompts, more = [prompt(61), prompt(12, seed=1)], [prompt(40, seed=n) for n in (2, 3, 4)]
    blocked = np.random.default_rng(0).permutation(60)[:20]
    cache = scattered(60, 4, 20, PAGE, blocked=blocked, spec=model.spec, window_chunk=CHUNK)
    assert [cache.ring(layer) for layer in range(4)] == [5, 5, 0, 0]
    chunks, last, steps = run(model, prompts, more, cache)
    rows = [expected(ids + rest) for ids, rest in zip([*prompts, prompts[1]], more, strict=True)]
    close = functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-5)
    close(chunks[:61], rows[0][:61])
    close(chunks[61:], rows[1][:12])
    close(last[:2], [rows[0][60], rows[1][11]])
    for drawn, row, ids in zip(steps[:3], rows, [*prompts, prompts[1]], strict=True):
        close(drawn, row[len(ids) :])


@pytest.mark.slow
def test_a_batch_is_continued_as_the_equations_say(model):
    prompts = [prompt(n, seed=n) for n in (70, 5, 33)]
    result = kvjax.generate(
        model, prompts, max_new_tokens=12, prefill_chunk=CHUNK, cache=CacheConfig(page_size=PAGE)
    )
    for ids, tokens in zip(prompts, result.tokens, strict=True):
        assert len(tokens) == 12
        assert expected(ids + tokens)[len(ids) - 1 : -1].argmax(1).tolist() == tokens
    stats = result.stats
    assert stats.pages_total == 24
    assert stats.cache_bytes == {"float32": PAGE * (2 * 4 * 5 * SELF + 24 * CROSS)}
    assert stats.bytes_per_token == 2 * SELF + CROSS
    # A step reads each window, and the shared pages once in each of the two layers.
    read = sum(2 * SELF * min(n, WINDOW) + 2 * CROSS * n for n in (81, 16, 44))
    assert stats.bytes_read_per_step == read


@pytest.mark.slow
def test_a_stream_is_continued_as_the_equations_say(model):
    ids = prompt(70, seed=70)
    events = list(kvjax.stream(model, ids, max_new_tokens=12, prefill_chunk=CHUNK))
    tokens = [event.token for event in events]
    assert expected(ids + tokens)[len(ids) - 1 : -1].argmax(1).tolist() == tokens
    assert events[-1].stats.bytes_read_per_step == 2 * SELF * WINDOW + 2 * CROSS * 81


@pytest.mark.slow
def test_a_score_equals_the_equations(model):
    ids = prompt(60, seed=2)
    scored = kvjax.score(model, ids, prefill_chunk=32, cache=CacheConfig(page_size=PAGE))
    np.testing.assert_allclose(scored.logprobs[1:], logprobs(expected(ids), ids), atol=2e-5)


def test_capacity_grows_by_one_layer_and_reads_by_all(model):
    spec = model.spec
    assert [layer.shared for layer in spec.layers] == [None] * 3 + [2]
    assert spec.bytes_per_token == 2 * SELF + CROSS
    # Past the window a token adds one layer's bytes, and each cross-decoder layer reads them.
    assert spec.bytes_per_sequence(4096) - spec.bytes_per_sequence(2048) == 2048 * CROSS
    assert spec.bytes_read_per_step(4096) - spec.bytes_read_per_step(2048) == 2048 * 2 * CROSS
    assert spec.bytes_per_sequence(4096) == 2 * SELF * WINDOW + CROSS * 4096
    sizes = {"num_pages": 512, "batch": 2, "max_pages": 256, "page_size": PAGE}
    cache = jax.eval_shape(lambda: init(spec, **sizes, window_chunk=CHUNK))
    assert [pool is None for pool in cache.k_pages] == [False] * 3 + [True]
    assert {pool.shape[0] for pool in cache.k_pages[:2]} == {2 * 5}
    assert pool_bytes(cache) == {"float32": PAGE * (2 * 2 * 5 * SELF + 512 * CROSS)}


@pytest.mark.slow
def test_only_what_is_kept_must_be_small_enough_to_index(model):
    """Of a million tokens, pools of windows have a ring's pages; another layer has them all."""
    layers = (LayerSpec.gqa(24, 128, window=1024), LayerSpec.gqa(8, 128))
    sizes = {"num_pages": 2**16, "batch": 1, "max_pages": 2**16}
    cache = jax.eval_shape(lambda: init(KVSpec(layers), **sizes, window_chunk=512))
    assert [pool.shape[0] for pool in cache.k_pages] == [97, 2**16]
    with pytest.raises(
        KvjaxError, match="num_pages is 65536: layer 0's pool would have 3221225472"
    ):
        init(KVSpec(layers), **sizes)
    with pytest.raises(KvjaxError, match="use at most 131071 pages"):
        init(KVSpec(layers), num_pages=2**18, batch=1, max_pages=2**18, window_chunk=512)


def test_most_tokens_of_a_prompt_leave_after_the_self_decoder():
    """Counted in compiled programs: the cross-decoder's matrices meet one token, not a chunk's."""
    args = ARGS | {"dim": 64, "hidden_dim": 256}
    wide = from_checkpoint(random_checkpoint(yoco_config(args, "here")), name="wide")
    programs = {}
    for run, pages in ((prefill_chunk, 64), (prefill_last, 64), (prefill_last, 256)):
        sizes = {"num_pages": pages, "batch": 1, "max_pages": 8, "page_size": PAGE}
        cache = jax.eval_shape(lambda sizes=sizes: init(wide.spec, **sizes, window_chunk=CHUNK))
        state = jax.eval_shape(lambda c: start(c, 64, jnp.ones((1,), jnp.int32)), cache)
        prompts = Prompts(jnp.zeros((CHUNK,), jnp.int32), jnp.asarray([0, CHUNK], jnp.int32))

        def call(params, state, prompts, index, run=run):
            state = run(nnx.merge(wide.graphdef, params), state, prompts, index, chunk=CHUNK)
            return state if run is prefill_last else state[0]

        given = wide.params, state, prompts, jnp.int32(0)
        programs[run, pages] = jax.jit(call, donate_argnums=1).lower(*given).compile()
    whole, early = (programs[run, 64].cost_analysis()["flops"] for run in RUNS)
    matrices = [
        sum(x.size for x in jax.tree.leaves(layer) if x.ndim == 2)
        for layer in wide.params["layers"].values()
    ]
    made = 2 * 64 * 32  # of keys and values, which every token needs
    saved = 2 * (CHUNK - 1) * (sum(matrices[2:]) - made)
    assert whole - early == pytest.approx(saved, rel=0.25)
    assert early < 0.6 * whole
    # And the branch that most chunks skip reads the pools where they are.
    small, large = (programs[prefill_last, n].memory_analysis() for n in (64, 256))
    assert small.temp_size_in_bytes == large.temp_size_in_bytes
    assert large.alias_size_in_bytes - small.alias_size_in_bytes >= 192 * PAGE * 2 * 2 * 16 * 4


def test_what_needs_keys_of_every_layer_is_refused(model, tmp_path):
    ids = prompt(40)
    for given in ({"select": Select("50%")}, {"format": "int8"}):
        (name,) = given
        says = f"{name} is given and tiny-yoco.* has a cross-decoder, whose layers share the pages"
        with pytest.raises(KvjaxError, match=says):
            kvjax.generate(model, ids, cache=CacheConfig(page_size=PAGE, **given))
    says = r"model is 'tiny-yoco.*', whose layers 2 to 3 are a cross-decoder .* that one .* makes: "
    for refused, of, todo in (
        (lambda: calibrate_formats(model, []), "formats are calibrated for", "without a format"),
        (lambda: distill_indexer(model, []), "an indexer is learned for", "without select"),
        (lambda: check_convertible(model), "latents are made for", "convert a Llama"),
    ):
        with pytest.raises(KvjaxError, match=f"{says}{of} a model .* own; .*{todo}"):
            refused()
    for policy in ("auto", "load", "recompute"):
        prefixes = PrefixCache(tmp_path, config=PrefixConfig(load_policy=policy))
        for run in (prefixes.add, functools.partial(kvjax.stream, prefixes=prefixes)):
            match = f"{says}prefixes are stored for a model .* own; leave out prefixes"
            with pytest.raises(KvjaxError, match=match):
                run(model, ids, cache=CacheConfig(page_size=PAGE))


@pytest.mark.slow
def test_programs_for_a_tpu_read_and_write_pools_in_place(there):  # noqa: F811
    """Rings, shared pages, and those that the branch of a prompt's last token reads."""
    layers = (LayerConfig(8, 8, 128, window=128),) * 2 + (LayerConfig(8, 2, 128),) * 2
    made = ModelConfig("yoco", VOCAB, 64, 64, layers, 4096, cross_from=2)
    of = from_checkpoint(random_checkpoint(made), name="random", dtype="bfloat16")
    given = CacheConfig(num_pages=512)
    shapes = plan(made, of.spec, [600, 3], new_tokens=32, prefill_chunk=256, cache=given)
    limits = inputs.row_limits(2, 32, shapes.batch)
    rules = Rules(
        make_sampler(Sampling(), VOCAB), jax.random.key(0), inputs.padded_stops([]), limits
    )
    cache = jax.eval_shape(lambda: inputs.empty_cache(shapes))
    state = jax.eval_shape(lambda cache: start(cache, made.hidden_size, limits), cache)
    state = on(inputs.formats_between(state, there), state)
    prompts = inputs.flat_prompts([[1] * 600, [2] * 3], shapes)
    sizes = {pool.shape[0] for pool in cache.k_pages if pool is not None}
    assert sizes == {2 * 25, 512}
    for function, rest in ((_prefill_chunk, (prompts, jnp.int32(0))), (_step, (rules,))):
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
        pool = r"bf16\[(?:50,8|512,2),16,128\]"
        assert "tpu_custom_call" in text
        assert re.search(pool, text)
        assert not re.findall(rf"{pool}\S* (?:copy|copy-start|transpose)\(", text)
        total = sum(pool_bytes(cache).values())
        assert program.memory_analysis().alias_size_in_bytes >= total
