"""Rotary embedding by its defining properties; the scalings also against transformers' logits."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models.config import LayerConfig, RopeScaling
from kvjax.models.rope import frequencies, rotate, rotations, unrotated

LAYER = LayerConfig(num_heads=1, num_kv_heads=1, head_dim=64, rope_theta=10_000.0)
PLAIN = 10_000.0 ** (-np.arange(32) / 32)


def scaled(kind, **how):
    return frequencies(dataclasses.replace(LAYER, rope_scaling=RopeScaling(kind, **how)))


def test_plain_frequencies():
    radians, sharpen = frequencies(LAYER)
    np.testing.assert_allclose(radians, PLAIN, rtol=1e-7)
    assert sharpen == 1


def test_linear_and_factors_divide():
    np.testing.assert_allclose(scaled("linear", factor=4.0)[0], PLAIN / 4, rtol=1e-7)
    factors = tuple(np.linspace(1, 8, 32))
    np.testing.assert_allclose(scaled("factors", factors=factors)[0], PLAIN / factors, rtol=1e-7)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_stretchings_keep_fast_pairs_and_divide_slow_ones(kind):
    radians, sharpen = scaled(kind, factor=8.0, original_context=2048)
    ratio = PLAIN / radians
    np.testing.assert_allclose(ratio[0], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[-1], 8, rtol=1e-6)
    assert (np.diff(ratio) >= -1e-6).all()
    assert sharpen == pytest.approx(1 if kind == "llama3" else 0.1 * np.log(8) + 1)


def test_yarn_takes_a_given_attention_factor():
    assert scaled("yarn", factor=8.0, original_context=64, attention_factor=1.5)[1] == 1.5
    assert scaled("yarn", factor=0.5, original_context=64)[1] == 1


def test_scores_depend_on_distance_only():
    generator = np.random.default_rng(0)
    q, k = (jnp.asarray(generator.standard_normal((1, 1, 64)), jnp.float32) for _ in range(2))

    def score(i, j):
        at = [rotations(LAYER, jnp.asarray([place], jnp.int32)) for place in (i, j)]
        return float(jnp.sum(rotate(q, *at[0]) * rotate(k, *at[1])))

    assert score(7, 3) == pytest.approx(score(1004, 1000), abs=1e-3)
    assert score(5, 5) == pytest.approx(float(jnp.sum(q * k)), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(3, 7), abs=1e-2)


def test_position_zero_turns_nothing():
    x = jnp.ones((1, 2, 64))
    np.testing.assert_array_equal(rotate(x, *rotations(LAYER, jnp.zeros(1, jnp.int32))), x)


def test_unrotated_undoes_what_sharpens_too():
    yarn = RopeScaling("yarn", factor=8.0, original_context=2048)
    layer = dataclasses.replace(LAYER, rope_scaling=yarn)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 64)), jnp.float32)
    positions = jnp.asarray([0, 5, 900], jnp.int32)
    turned = rotate(x, *rotations(layer, positions))
    assert np.abs(turned - x).max() > 1
    np.testing.assert_allclose(unrotated(turned, layer, positions), x, atol=1e-5)
