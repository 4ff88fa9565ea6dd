"""Tiny random models of every family against transformers' logits (see make_references.py)."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.models import (
    build,
    causal_attend,
    check_tokens,
    contiguous_attend,
    contiguous_cache,
    random_checkpoint,
    read_safetensors,
)
from kvjax.models.linear import activate, project, project_heads

DATA = pathlib.Path(__file__).resolve().parent / "data"
FAMILIES = sorted(path.name for path in DATA.iterdir())


def runner(checkpoint, dtype=jnp.float32):
    """A jitted function from a flat stream to logits, with no cache."""
    graphdef, params = build(checkpoint, dtype)

    @jax.jit
    def run(params, tokens, segments, positions):
        model = nnx.merge(graphdef, params)
        attend = causal_attend(checkpoint.config, segments, positions)
        return model.logits(model(tokens, positions, attend, None)[0])

    def logits(tokens, segments=None, positions=None):
        zeros = np.zeros(len(tokens), np.int32)
        places = np.arange(len(tokens), dtype=np.int32) if positions is None else positions
        return run(params, tokens, zeros if segments is None else segments, places)

    return logits


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    folder = DATA / request.param
    checkpoint = read_safetensors(folder)
    with np.load(folder / "expected.npz") as expected:
        return checkpoint, runner(checkpoint), expected["tokens"], expected["logits"]


def test_logits_equal_the_reference(family):
    _, logits, tokens, expected = family
    np.testing.assert_allclose(logits(tokens), expected, atol=1e-4, rtol=0)


def test_bfloat16_weights_are_near_the_reference(family):
    # The stored weights are bfloat16 already: only activations are rounded.
    checkpoint, _, tokens, expected = family
    near = runner(checkpoint, jnp.bfloat16)(tokens)
    assert near.dtype == np.float32
    squares = np.mean((near - expected) ** 2, axis=1)
    # What is rounded decides between experts, too: a token may go through others at a near tie.
    middle = np.mean if checkpoint.config.experts is None else np.median
    assert np.sqrt(middle(squares)) < 0.05


def test_contiguous_cache_in_chunks_equals_no_cache(family):
    checkpoint, logits, tokens, expected = family
    config = checkpoint.config
    graphdef, params = build(checkpoint)
    chooses = config.layers[0].indexer is not None

    @jax.jit
    def step(params, tokens, segments, positions, cache):
        model = nnx.merge(graphdef, params)
        attend = contiguous_attend(config, segments, positions)
        hidden, cache = model(tokens, positions, attend, cache)
        return model.logits(hidden), cache

    # Two sequences advance by 8 and 4 tokens a step, rows of one flat stream, then padding.
    backwards = tokens[::-1].copy()
    other = logits(backwards)
    cache = contiguous_cache(config, batch=2, capacity=48)
    for turn in range(6):
        first, second = np.arange(8) + 8 * turn, np.arange(4) + 4 * turn
        stream = np.concatenate([tokens[first], backwards[second], [7, 7]]).astype(np.int32)
        segments = np.repeat([0, 1, 2, -1], [8, 4, 1, 1]).astype(np.int32)
        positions = np.concatenate([first, second, [0, 0]]).astype(np.int32)
        if chooses:  # that cache keeps no index keys, so it must not be taken for one that does
            with pytest.raises(ValueError, match="layer 0 attends to tokens that an indexer"):
                step(params, stream, segments, positions, cache)
            return
        out, cache = step(params, stream, segments, positions, cache)
        np.testing.assert_allclose(out[:8], expected[first], atol=1e-4, rtol=0)
        np.testing.assert_allclose(out[8:12], other[second], atol=5e-5, rtol=0)


def test_segments_do_not_see_each_other(family):
    _, logits, tokens, _ = family
    segments = np.repeat([4, 9, 2], 16).astype(np.int32)
    positions = np.tile(np.arange(16, dtype=np.int32), 3)
    together = logits(tokens, segments, positions)
    for start in (0, 16, 32):
        moved = logits(np.roll(tokens, -start), np.roll(segments, -start), positions)
        alone = logits(np.concatenate([tokens[start : start + 16], tokens[:32]]))
        np.testing.assert_allclose(together[start : start + 16], alone[:16], atol=5e-5, rtol=0)
        np.testing.assert_allclose(together[start : start + 16], moved[:16], atol=5e-5, rtol=0)


def test_attend_is_called_once_a_layer_in_order_with_state():
    checkpoint = random_checkpoint(read_safetensors(DATA / "mistral").config)
    graphdef, params = build(checkpoint)
    calls = []

    def attend(layer, q, k, v, state):
        calls.append((layer, q.shape, k.shape, v.shape, q.dtype))
        return jnp.zeros(q.shape, jnp.bfloat16), state + 1

    tokens = jnp.zeros(5, jnp.int32)
    run = jax.eval_shape(lambda: nnx.merge(graphdef, params)(tokens, tokens, attend, jnp.int32(0)))
    assert calls == [(i, (5, 4, 16), (5, 2, 16), (5, 2, 16), jnp.float32) for i in range(3)]
    assert [(x.shape, x.dtype) for x in run] == [((5, 32), jnp.float32), ((), jnp.int32)]


def test_equal_configurations_make_equal_graph_definitions():
    config = read_safetensors(DATA / "llama").config
    first, _ = build(random_checkpoint(config, 0))
    again, _ = build(random_checkpoint(dataclasses.replace(config), 1))
    assert first == again
    assert hash(first) == hash(again)


@pytest.mark.parametrize("rows", [(), (1,), (2,), (3, 1), (5,)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_project_is_a_matrix_product_for_any_number_of_rows(rows, dtype):
    generator = np.random.default_rng(0)
    x = jnp.asarray(generator.standard_normal((*rows, 24)), dtype)
    weight = jnp.asarray(generator.standard_normal((7, 24)), dtype)
    got = jax.jit(project)(x.astype(jnp.float32), weight)
    assert got.shape == (*rows, 7)
    assert got.dtype == jnp.float32
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(got, exact, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 16, 48])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_project_heads_multiplies_each_head_by_its_matrix(rows, dtype):
    """Also in bfloat16 on a CPU, whose products of batches XLA refuses once the program runs."""
    generator = np.random.default_rng(0)
    x = jnp.asarray(generator.standard_normal((rows, 4, 8)), dtype)
    weight = jnp.asarray(generator.standard_normal((4, 8, 16)), dtype)
    multiply = jax.jit(lambda x, weight: project_heads("thn,hnr->thr", x, weight))
    got = multiply(x.astype(jnp.float32), weight)
    assert got.dtype == jnp.float32
    exact = np.einsum("thn,hnr->thr", np.asarray(x, np.float64), np.asarray(weight, np.float64))
    np.testing.assert_allclose(got, exact, atol=1e-5)


def test_activation_names():
    x = jnp.linspace(-3, 3, 9)
    np.testing.assert_allclose(activate("silu", x), x / (1 + np.exp(-x)), atol=1e-6)
    tanh = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    np.testing.assert_allclose(activate("gelu_tanh", x), tanh, atol=1e-6)


@pytest.mark.parametrize(
    ("ids", "fault"),
    [([0, 5, 10], "token id 10 at index 2"), ([-1], "token id -1 at index 0"), ([0.5], "integers")],
)
def test_token_ids_outside_the_vocabulary_are_refused(ids, fault):
    with pytest.raises(ValueError, match=fault):
        check_tokens(ids, 10)


def test_token_ids_within_the_vocabulary_are_not():
    check_tokens([0, 9], 10)
    check_tokens(np.arange(10, dtype=np.int32), 10)
    check_tokens([], 10)
