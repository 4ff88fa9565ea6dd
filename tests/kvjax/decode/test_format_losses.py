"""What bits of a layer cost: against a whole forward pass that encodes for itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.decode.calibrate_formats import LEAST_TOKENS
from kvjax.decode.format_losses import _windows, layer_losses
from kvjax.formats.mixed import MIXED_BITS, key_packing, value_packing
from kvjax.models import dense_attention
from tests.kvjax.decode.tiny import model, prompt

ENCODED, TOTAL, PAGE = 48, 56, 16


def logprobs(of, ids, layer=None, part=0, packing=None):
    """float32 [8, V], of the last tokens; one layer's keys (0) or values (1) are encoded."""

    def again(x):
        pages = x[:ENCODED].reshape(-1, PAGE, *x.shape[1:]).swapaxes(1, 2)
        first = jnp.arange(0, ENCODED, PAGE, dtype=jnp.int32)
        back = packing.encode(pages, first).values().swapaxes(1, 2).reshape(ENCODED, *x.shape[1:])
        return jnp.concatenate([x[:PAGE], back[PAGE:], x[ENCODED:]])

    def run(params, tokens):
        decoder = nnx.merge(of.graphdef, params)
        positions = jnp.arange(TOTAL, dtype=jnp.int32)
        one = jnp.zeros_like(positions)

        def attend(index, q, k, v, state):
            options = {
                "query_segments": one,
                "query_positions": positions,
                "key_segments": one,
                "key_positions": positions,
                "scale": of.config.scale(index),
            }
            exact = dense_attention(q, k, v, **options)
            if index != layer:
                return exact, state
            pair = (again(k), v) if part == 0 else (k, again(v))
            late = positions[:, None, None] >= ENCODED
            return jnp.where(late, dense_attention(q, *pair, **options), exact), state

        hidden, _ = decoder(tokens, positions, attend, None)
        return jax.nn.log_softmax(decoder.logits(hidden[ENCODED:]))

    program = jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})
    return np.asarray(program(of.params, jnp.asarray(ids, jnp.int32)), np.float64)


@pytest.mark.slow
def test_a_loss_is_the_divergence_that_codes_alone_cause():
    of, ids = model("llama"), prompt(TOTAL, 4)
    told = []
    losses = layer_losses(of, [ids], told.append)
    assert told == [0.5, 1.0]
    exact = logprobs(of, ids)
    for layer, part in ((0, 0), (1, 1)):
        packing = (key_packing, value_packing)[part](3)
        other = logprobs(of, ids, layer, part, packing)
        want = (np.exp(exact) * (exact - other)).sum(1).mean()
        assert want > 1e-6
        found = losses[layer][part][MIXED_BITS.index(3)]
        assert found == pytest.approx(want, rel=0.02)
    for loss in losses:
        for curve in loss:
            assert sorted(curve, reverse=True) == list(curve)  # fewer bits cost more


def test_the_shortest_text_has_a_page_that_is_encoded():
    """The first page stays as it is: were it the only one, no bits would seem to cost anything."""
    losses = layer_losses(model("llama"), [prompt(LEAST_TOKENS, 4)], lambda done: None)
    assert all(min(curve) > 0 for loss in losses for curve in loss)


@pytest.mark.slow
def test_layers_with_a_window_are_left_out():
    of = model("gemma")
    losses = layer_losses(of, [prompt(TOTAL, 5)], lambda done: None)
    windows = [layer.window is not None for layer in of.config.layers]
    assert any(windows)
    assert [loss is None for loss in losses] == windows


def test_texts_that_are_measured_are_of_one_length():
    rows = [list(range(40)), list(range(3000)), list(range(1200))]
    found = _windows(rows)
    assert [len(ids) for ids in found] == [1152, 1152]
    assert (found[0], found[1]) == (rows[1][:1152], rows[2][:1152])
    assert _windows([list(range(33))]) == [list(range(33))]
