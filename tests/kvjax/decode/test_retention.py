"""Gated retention under a cache: states of sequences in place of pages."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import kvjax
from kvjax import CacheConfig, KvjaxError, PrefixCache, Select
from kvjax.cache import append, fork, init, pool_bytes, release, reserve
from kvjax.decode.attend_retention import BLOCK, retain_chunk, retain_token
from kvjax.formats import named_format
from kvjax.spec import KVSpec, LayerSpec
from tests.kvjax.cache.plain import scattered
from tests.kvjax.decode.test_yoco import CHUNK, CROSS, PAGE, run
from tests.kvjax.decode.tiny import logprobs, prompt
from tests.models.yoco_oracle import RETENTION, oracle_logits, released_weights, retention

STATES = 2 * 2 * 16 * 16 * 4  # bytes of a sequence: layers, heads, a matrix of float32
expected = functools.partial(oracle_logits, released_weights(RETENTION), args=RETENTION)
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-retention")
    (folder / "params.json").write_text(json.dumps(RETENTION))
    weights = released_weights(RETENTION)
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    return kvjax.load(folder, dtype="float32")


def drawn(count, heads=3, dim=8, value_dim=5, hardest=0.05, seed=0):
    """Queries, keys, values and gates of one sequence; gates go down to `hardest`."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, count, heads, dim))
    v = rng.standard_normal((count, heads, value_dim))
    return q, k, v, hardest ** rng.uniform(0, 1, (count, heads))  # as many of each magnitude


def float32(*arrays):
    return [jnp.asarray(x, jnp.float32) for x in arrays]


@pytest.mark.parametrize("hardest", [1e-40, 0.9], ids=["forgets at once", "forgets little"])
def test_chunks_and_tokens_equal_the_recurrence(hardest):
    """Sequences of several blocks, of none, and of one token; what is padding holds NaN."""
    counts, more = (2 * BLOCK + 11, 0, 1, BLOCK), 3
    texts = [drawn(n + more, hardest=hardest, seed=n) for n in counts]
    assert min(text[3].min() for text in texts) < hardest**0.95
    want = [retention(*text) * np.sqrt(8) for text in texts]  # whose keys are not yet scaled
    flat = [np.concatenate([text[i][: len(text[i]) - more] for text in texts]) for i in range(4)]
    flat[3] = np.log(flat[3])
    flat = [np.concatenate([x, np.full((9, *x.shape[1:]), np.nan)]) for x in flat]
    starts = jnp.asarray(np.cumsum([0, *counts]), jnp.int32)
    states = jnp.zeros((4, 3, 8, 5), jnp.float32)
    out, states = quick(retain_chunk)(states, *float32(*flat), starts)
    close = functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5)
    for row, n in enumerate(counts):
        close(out[starts[row] : starts[row + 1]], want[row][:n])
    for step in range(more):
        given = [
            np.stack([text[i][n + step] for n, text in zip(counts, texts, strict=True)])
            for i in range(4)
        ]
        given[3] = np.log(given[3])
        before, stores = states, jnp.asarray([True, True, step != 1, True])
        out, states = quick(retain_token)(states, *float32(*given), stores)
        rows = [0, 1, 3] if step else range(4)  # the third row missed a token
        close(out[jnp.asarray(rows)], np.stack([want[row][counts[row] + step] for row in rows]))
        if step == 1:
            np.testing.assert_array_equal(states[2], before[2])


def test_a_chunk_in_pieces_leaves_the_same_state():
    q, k, v, gates = drawn(150)
    given = float32(q, k, v, np.log(gates))
    starts = jnp.asarray([0, 150], jnp.int32)
    empty = jnp.zeros((1, 3, 8, 5), jnp.float32)
    whole, end = quick(retain_chunk)(empty, *given, starts)
    state, parts = empty, []
    for begin in range(0, 150, 50):
        piece = [x[begin : begin + 50] for x in given]
        out, state = quick(retain_chunk)(state, *piece, jnp.asarray([0, 50], jnp.int32))
        parts.append(out)
    np.testing.assert_allclose(jnp.concatenate(parts), whole, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(state, end, atol=1e-5, rtol=1e-5)


def test_chunks_last_tokens_forks_and_steps_equal_the_equations(model):
    """A fork's state is a copy: both go on with tokens of their own."""
    prompts, more = [prompt(61), prompt(12, seed=1)], [prompt(40, seed=n) for n in (2, 3, 4)]
    cache = scattered(60, 4, 20, PAGE, spec=model.spec)
    chunks, last, steps = run(model, prompts, more, cache)
    rows = [expected(ids + rest) for ids, rest in zip([*prompts, prompts[1]], more, strict=True)]
    close = functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-5)
    close(chunks[:61], rows[0][:61])
    close(chunks[61:], rows[1][:12])
    close(last[:2], [rows[0][60], rows[1][11]])
    for found, row, ids in zip(steps[:3], rows, [*prompts, prompts[1]], strict=True):
        close(found, row[len(ids) :])


def test_a_batch_is_continued_as_the_equations_say(model):
    prompts = [prompt(n, seed=n) for n in (70, 5, 33)]
    result = kvjax.generate(
        model, prompts, max_new_tokens=12, prefill_chunk=CHUNK, cache=CacheConfig(page_size=PAGE)
    )
    for ids, tokens in zip(prompts, result.tokens, strict=True):
        assert expected(ids + tokens)[len(ids) - 1 : -1].argmax(1).tolist() == tokens
    stats = result.stats
    # Four rows have a state each; pages are of one layer.
    assert stats.cache_bytes == {"float32": 4 * STATES + PAGE * 24 * CROSS}
    assert (stats.bytes_per_token, stats.state_bytes) == (CROSS, STATES)
    assert stats.bytes_read_per_step == sum(STATES + 2 * CROSS * n for n in (81, 16, 44))


@pytest.mark.slow
def test_a_stream_and_a_score_equal_the_equations(model):
    ids = prompt(70, seed=70)
    tokens = [event.token for event in kvjax.stream(model, ids, max_new_tokens=12)]
    assert expected(ids + tokens)[len(ids) - 1 : -1].argmax(1).tolist() == tokens
    scored = kvjax.score(model, ids, prefill_chunk=32)
    np.testing.assert_allclose(scored.logprobs[1:], logprobs(expected(ids), ids), atol=2e-5)


SPEC = KVSpec((LayerSpec.retention(2, 4, 3), LayerSpec.gqa(2, 4)), "float32")


def held(*, num_pages=6):
    """A cache of three sequences, of which the first has 5 tokens in pages of 4."""
    cache = init(SPEC, num_pages=num_pages, batch=3, max_pages=4, page_size=4)
    cache, _ = reserve(cache, [5, 0, 0])
    states = (jnp.arange(72, dtype=jnp.float32).reshape(3, 2, 4, 3), None)
    return dataclasses.replace(cache, lengths=jnp.asarray([5, 0, 0], jnp.int32), states=states)


def test_a_fork_has_a_state_of_its_own_and_a_released_row_none():
    cache = held()
    forked, reservation = fork(cache, 0, 2)
    assert bool(reservation.ok)
    np.testing.assert_array_equal(forked.states[0], cache.states[0][jnp.asarray([0, 1, 0])])
    freed = release(forked, [True, False, False])
    want = np.array(forked.states[0])
    want[0] = 0
    np.testing.assert_array_equal(freed.states[0], want)
    poisoned = dataclasses.replace(cache, states=(jnp.full((3, 2, 4, 3), jnp.nan), None))
    assert not np.asarray(release(poisoned, [True] * 3).states[0]).any()


def test_a_fork_that_fails_leaves_states():
    cache = held(num_pages=2)  # none is left for the open page's copy
    failed, reservation = fork(cache, 0, 1)
    assert not bool(reservation.ok)
    np.testing.assert_array_equal(failed.states[0], cache.states[0])


def test_what_a_sequence_takes_does_not_grow_where_a_state_is_kept():
    assert (SPEC.state_bytes, SPEC.bytes_per_token) == (2 * 4 * 3 * 4, 2 * 8 * 4)
    assert SPEC.bytes_per_sequence(5, 4) == 96 + 8 * 64
    assert SPEC.bytes_read_per_step(5) == 96 + 5 * 64
    assert SPEC.bytes_shared_prefix(4, [1, 2], 4) == 2 * 96 + 3 * 4 * 64
    assert SPEC.shard(2).state_bytes == 48
    sizes = {"num_pages": 6, "batch": 3, "max_pages": 4, "page_size": 4}
    cache = init(SPEC, **sizes, window_chunk=8)
    assert [pool is None for pool in cache.k_pages] == [True, False]
    assert pool_bytes(cache) == {"float32": 3 * 96 + 6 * 4 * 64}
    assert (cache.page_size, cache.ring(0), cache.most_at_once) == (4, 0, None)


def test_what_needs_tokens_of_every_layer_is_refused(model, tmp_path):
    ids = prompt(40)
    for given in ({"select": Select("50%")}, {"format": "int8"}):
        (name,) = given
        with pytest.raises(KvjaxError, match=rf"{name} is given and tiny-retention.* has a cross"):
            kvjax.generate(model, ids, cache=CacheConfig(page_size=PAGE, **given))
    with pytest.raises(KvjaxError, match=r"prefixes are stored for a model .* leave out prefixes"):
        PrefixCache(tmp_path).add(model, ids, cache=CacheConfig(page_size=PAGE))
    with pytest.raises(KvjaxError, match="format is given and layer 0 is a state"):
        init(SPEC, num_pages=6, batch=3, max_pages=4, page_size=16, format=named_format("int8"))
    cache, rows = held(), [jnp.zeros((3, 2, 4))] * 2
    with pytest.raises(KvjaxError, match="the cache keeps states, and append is given none"):
        append(cache, rows, rows)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerSpec.retention(0, 8), "kv_heads is 0"),
        (lambda: LayerSpec("retention", 1, 8, window=4), "window is 4 and shared is None: must be"),
        (lambda: LayerSpec("retention", 1, 8, latent_dim=4), "latent_dim is 4: a layer of kind"),
        (lambda: KVSpec((LayerSpec.retention(1, 8),)), "layers keep states only"),
        (
            lambda: KVSpec((LayerSpec.retention(1, 8), LayerSpec.shared_with(0))),
            r"layers\[1\].shared is 0, a layer that keeps a state",
        ),
    ],
)
def test_layers_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
