"""Calibrating formats on a tiny model: what is captured, what errors cost, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.config import CacheConfig
from kvjax.decode import calibrate_formats, score
from kvjax.decode.captured import captured
from kvjax.decode.identity import fingerprint
from kvjax.errors import KvjaxError
from kvjax.formats import CALIBRATED
from kvjax.models import causal_attend
from kvjax.models.rope import rotate, rotations
from tests.kvjax.decode.tiny import model, prompt

TOKENS = 48


@functools.cache
def seen():
    """Of the tiny model, and a text of tokens."""
    ids = jnp.asarray(prompt(TOKENS), jnp.int32)
    return ids, jax.jit(functools.partial(captured, model().graphdef))(model().params, ids)


@functools.cache
def program():
    """The loss, with layers' keys (before their rotation) and values moved."""
    of = model()
    positions = jnp.arange(TOKENS, dtype=jnp.int32)

    @jax.jit
    def loss(ids, move_k, move_v):
        decoder = nnx.merge(of.graphdef, of.params)
        plain = causal_attend(of.config, jnp.zeros_like(ids), positions)

        def attend(index, q, k, v, state):
            turn = rotations(of.config.layers[index], positions)
            k, v = k + rotate(move_k[index], *turn), v + move_v[index]
            return plain(index, q, k, v, state)

        logits = decoder.logits(decoder(ids, positions, attend, None)[0])
        logprobs = jax.nn.log_softmax(logits[:-1])
        return -jnp.take_along_axis(logprobs, ids[1:, None], axis=1).sum()

    return loss


def test_what_an_error_costs_is_the_squared_slope_of_the_loss():
    ids, layers = seen()
    still, step = jnp.zeros((2, *layers[0].keys.shape)), 0.03
    for place in ((0, 3, 0, 1), (0, 20, 1, 6), (1, 20, 1, 6), (1, 40, 0, 0)):
        at = still.at[place].set(step)
        up = program()(ids, at, still), program()(ids, still, at)
        down = program()(ids, -at, still), program()(ids, still, -at)
        slopes = [(float(u) - float(d)) / (2 * step) for u, d in zip(up, down, strict=True)]
        of = layers[place[0]]
        found = [float(weight[place[1:]]) for weight in (of.key_weights, of.value_weights)]
        np.testing.assert_allclose(np.sqrt(found), np.abs(slopes), rtol=0.02, atol=2e-3)


def test_keys_are_captured_without_their_rotation():
    of = model()
    ids, layers = seen()
    decoder = nnx.merge(of.graphdef, of.params)
    rows = decoder.layers[0].attention_norm(decoder.embed(ids))
    wanted = decoder.layers[0].attention.k(rows).reshape(layers[0].keys.shape)
    np.testing.assert_allclose(layers[0].keys, wanted, atol=1e-4)


@pytest.mark.slow
def test_a_calibration_is_of_all_layers_and_tells_its_progress():
    said = []
    texts = [prompt(50, 1), prompt(70, 2)]
    found = calibrate_formats(model(), texts, tokens=96, progress=lambda *told: said.append(told))
    assert found.model == fingerprint(model())
    assert found.tokens == 48 + 48  # whole pages of each
    assert len(found.layers) == 2
    assert [phase for phase, _ in said] == ["calibrate"] * len(said)
    assert [said[0][1], said[-1][1]] == [0.0, 1.0]
    for name in CALIBRATED:
        made = found.format(name)
        made.check(model().spec, 16)
        assert [index for index, _ in made.layers] == [0, 1]
    assert found == calibrate_formats(model(), texts, tokens=96)


@pytest.mark.slow
def test_a_calibrated_format_serves_its_own_model_only():
    found = calibrate_formats(model(), prompt(64), tokens=64).format("kvquant3")
    told = score(model(), prompt(64), cache=CacheConfig(format=found))
    exact = score(model(), prompt(64))
    assert told.logprobs[1:17] == pytest.approx(exact.logprobs[1:17], abs=1e-4)
    assert told.logprobs[40:] != exact.logprobs[40:]
    assert abs(told.perplexity / exact.perplexity - 1) < 0.2
    other = dataclasses.replace(found, model="0" * 64)
    with pytest.raises(KvjaxError, match="format was calibrated for model 000000000000, and llama"):
        score(model(), prompt(64), cache=CacheConfig(format=other))


@pytest.mark.slow
def test_one_text_of_ids_is_a_list_of_one():
    texts = prompt(50, 1)
    found = calibrate_formats(model(), texts, tokens=48)
    assert found == calibrate_formats(model(), [np.array(texts)], tokens=48)


def test_what_cannot_be_measured_is_refused(monkeypatch):
    with pytest.raises(KvjaxError, match="text 1 has 47 tokens: at least 48"):
        calibrate_formats(model(), [prompt(48), prompt(47)])
    with pytest.raises(KvjaxError, match="texts is empty"):
        calibrate_formats(model(), [])
    with pytest.raises(KvjaxError, match="tokens is 8: must be an integer of at least 48"):
        calibrate_formats(model(), prompt(48), tokens=8)
    with pytest.raises(KvjaxError, match="came without a tokenizer"):
        calibrate_formats(model(), "a text")
    small = dataclasses.make_dataclass("Memory", [("available", int)])(1000)
    monkeypatch.setattr("psutil.virtual_memory", lambda: small)
    with pytest.raises(KvjaxError, match="this machine has 1000 bytes of memory free"):
        calibrate_formats(model(), prompt(48))
