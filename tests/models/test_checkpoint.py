"""What `build` refuses, and what it makes of what it takes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.models import Checkpoint, Decoder, build, check_weights, parameters, random_checkpoint


def changed(tiny, **weights):
    everything = {**tiny.weights, **{k.replace("__", "."): v for k, v in weights.items()}}
    kept = {name: value for name, value in everything.items() if value is not None}
    return dataclasses.replace(tiny, weights=kept, source="some/file")


@pytest.mark.parametrize(
    ("weights", "fault"),
    [
        ({"norm__weight": None}, r"some/file: weight norm.weight \[32\] is missing"),
        ({"norm__weight": np.ones((3,), np.float32)}, r"norm.weight has shape \[3\].*\[32\]"),
        ({"norm__weight": np.ones((32,), np.int32)}, "norm.weight has dtype int32"),
        ({"extra__weight": np.ones((2,), np.float32)}, "extra.weight has no place in a llama"),
    ],
)
def test_wrong_weights_are_named(tiny, weights, fault):
    for check in (check_weights, build):
        with pytest.raises(ValueError, match=fault):
            check(changed(tiny, **weights))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
@pytest.mark.parametrize("where", [np.asarray, jnp.asarray])
def test_weights_that_are_not_finite_are_named(tiny, bad, dtype, where):
    weight = tiny.weights["layers.1.mlp.up.weight"].astype(dtype)
    weight[3, 7] = bad
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up\.weight holds NaN or infinity"):
        build(changed(tiny, layers__1__mlp__up__weight=where(weight)))


def test_large_finite_weights_pass(tiny):
    # Their sum overflows; none of them does.
    weight = np.full((32,), 3e38, np.float32)
    check_weights(changed(tiny, norm__weight=weight))


@pytest.mark.parametrize("dtype", ["int8", "float16", "float64"])
def test_other_dtypes_are_refused(tiny, dtype):
    with pytest.raises(ValueError, match=f"dtype={dtype} is not supported"):
        build(tiny, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matrices_get_the_dtype_and_norms_stay_float32(tiny, dtype):
    graphdef, params = build(tiny, dtype)
    model = nnx.merge(graphdef, params)
    assert isinstance(model, Decoder)
    assert model.layers[0].attention.q.weight[...].dtype == dtype
    assert model.embed.weight[...].dtype == dtype
    assert model.norm.weight[...].dtype == jnp.float32
    expected = tiny.weights["layers.1.mlp.down.weight"].astype(dtype)
    np.testing.assert_array_equal(model.layers[1].mlp.down.weight[...], expected)


def test_parameters_are_plain_nested_dicts(tiny):
    _, params = build(tiny)
    leaves = jax.tree.leaves(params)
    assert len(leaves) == len(parameters(tiny.config)) == len(tiny.weights)
    assert type(params["layers"][0]["attention"]) is dict
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)


def test_random_weights_are_reproducible(tiny):
    again = random_checkpoint(tiny.config, seed=3)
    other = random_checkpoint(tiny.config, seed=4)
    assert isinstance(again, Checkpoint)
    name = "layers.0.attention.q.weight"
    np.testing.assert_array_equal(again.weights[name], tiny.weights[name])
    assert (other.weights[name] != tiny.weights[name]).any()
