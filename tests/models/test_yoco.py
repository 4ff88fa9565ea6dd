"""YOCO against its equations in NumPy, read from files under the release's names."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from kvjax.models import (
    LayerConfig,
    ModelConfig,
    build,
    causal_attend,
    contiguous_attend,
    contiguous_cache,
    parameters,
    random_checkpoint,
    read,
    save_orbax,
)
from tests.models.yoco_oracle import ARGS, RETENTION, oracle_logits, released_weights


def released(folder, *, weights=None, settings="params.json", **changed):
    """A folder as the release has it, its state dict as safetensors."""
    folder.mkdir(exist_ok=True)
    fields = {key: value for key, value in (ARGS | changed).items() if value is not None}
    (folder / settings).write_text(json.dumps(fields))
    stored = released_weights() if weights is None else weights
    safetensors.numpy.save_file(stored, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return read(released(tmp_path_factory.mktemp("yoco")))


def logits_of(checkpoint, tokens):
    """float32 [T, V] of one text, without a cache."""
    graphdef, params = build(checkpoint)

    @jax.jit
    def run(params, tokens):
        decoder = nnx.merge(graphdef, params)
        positions = jnp.arange(tokens.size, dtype=jnp.int32)
        attend = causal_attend(checkpoint.config, jnp.zeros_like(tokens), positions)
        return decoder.logits(decoder(tokens, positions, attend, None)[0])

    options = {"xla_backend_optimization_level": 0}
    given = (params, jnp.asarray(tokens, jnp.int32))
    return np.asarray(run.lower(*given).compile(options)(*given))


def test_logits_equal_the_equations(checkpoint):
    tokens = np.random.default_rng(1).integers(0, 64, 40)
    expected = oracle_logits(released_weights(), tokens)
    assert np.abs(expected).max() > 5  # so that 1e-5 says something
    np.testing.assert_allclose(logits_of(checkpoint, tokens), expected, atol=1e-5, rtol=1e-5)


def test_gated_retention_equals_the_equations(tmp_path):
    weights = released_weights(RETENTION)
    checkpoint = read(released(tmp_path / "folder", weights=weights, sliding_window=None))
    assert [layer.retention for layer in checkpoint.config.layers] == [True, True, False, False]
    tokens = np.random.default_rng(1).integers(0, 64, 40)
    expected = oracle_logits(weights, tokens, RETENTION)
    assert np.abs(expected).max() > 5
    np.testing.assert_allclose(logits_of(checkpoint, tokens), expected, atol=1e-5, rtol=1e-5)
    save_orbax(tmp_path / "saved", checkpoint)
    assert read(tmp_path / "saved").config == checkpoint.config


def test_a_layer_of_the_cross_decoder_makes_no_keys(checkpoint):
    assert checkpoint.config.cross_from == 2
    names = {name for name in parameters(checkpoint.config) if name.startswith("layers.")}
    made = sorted(name for name in names if ".k." in name or ".v." in name)
    own = [f"layers.{n}.attention.{part}.weight" for n in range(2) for part in "kv"]
    assert made == [*own, *(f"layers.2.attention.source.{part}.weight" for part in "kv")]


def test_it_is_written_and_read_again(checkpoint, tmp_path):
    save_orbax(tmp_path / "saved", checkpoint)
    again = read(tmp_path / "saved")
    assert again.config == checkpoint.config
    for name, value in checkpoint.weights.items():
        np.testing.assert_array_equal(again.weights[name], value)
    named = read(released(tmp_path / "named", settings="config.json", model_type="yoco"))
    assert named.config == checkpoint.config


def test_random_weights_fill_any_configuration(checkpoint):
    made = random_checkpoint(checkpoint.config)
    assert made.weights["layers.2.attention.source.norm.weight"].mean() == pytest.approx(1, abs=0.1)
    build(made)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sliding_window": False}, "sliding_window=False must be a number of tokens; leave it"),
        ({"sliding_window": 0}, "window=0 must be at least 1 token"),
        ({"sliding_window": 0.5}, "sliding_window is 0.5, not an integer"),
        ({"n_layers": 5}, "n_layers=5 must be even"),
        ({"max_seq_len": None}, "max_seq_len=-1 must be the tokens"),
        ({"n_attn_heads": 5}, "n_attn_heads=5 must divide dim=32"),
        ({"n_attn_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"n_self_heads": None}, "n_self_heads is missing, which YOCO's settings have"),
    ],
)
def test_settings_that_are_no_model_are_refused(tmp_path, changed, message):
    with pytest.raises(ValueError, match=rf"params.json.*{message}"):
        read(released(tmp_path / "folder", **changed))


def test_a_tensor_that_has_no_place_is_named(tmp_path):
    wrong = released_weights()
    wrong["cross_decoder.layers.0.mixer.k_proj.weight"] = np.ones((32, 32), np.float32)
    checkpoint = read(released(tmp_path / "folder", weights=wrong))
    with pytest.raises(ValueError, match=r"layers\.2\.attention\.k\.weight has no place"):
        build(checkpoint)
    del wrong["cross_decoder.layers.0.mixer.k_proj.weight"], wrong["cross_decoder.k_proj.weight"]
    checkpoint = read(released(tmp_path / "folder", weights=wrong))
    with pytest.raises(ValueError, match=r"layers\.2\.attention\.source\.k\.weight .* is missing"):
        build(checkpoint)


SELF, CROSS = LayerConfig(2, 2, 16, window=11), LayerConfig(4, 2, 8)
RETAINS = LayerConfig(2, 2, 16, retention=True)


def config(*layers, **options):
    return ModelConfig("yoco", 64, 32, 48, layers, 256, **options)


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [
        ((SELF, CROSS), {"cross_from": 0}, "cross_from=0 must be 1..1"),
        ((SELF, CROSS), {"cross_from": 2}, "cross_from=2 must be 1..1"),
        ((SELF, SELF), {"cross_from": 1}, "layer 1: window=11 must be None"),
        ((SELF, CROSS, SELF), {"cross_from": 1}, "layer 2: window=11 must be None"),
        (
            (SELF, CROSS, dataclasses.replace(CROSS, num_kv_heads=4)),
            {"cross_from": 1},
            r"layer 2 is .*num_kv_heads=4.* from cross_from=1 on, keys and values are those",
        ),
        ((SELF, CROSS), {"cross_from": 1, "qk_norm": True}, "qk_norm=True and attn_soft_cap=None"),
        ((RETAINS, SELF), {}, "layer 0 is of gated retention and cross_from=None: only layers of"),
        ((RETAINS, RETAINS), {"cross_from": 1}, "layer 1 is of gated retention and cross_from=1"),
    ],
)
def test_layers_that_cannot_share_are_refused(layers, options, message):
    with pytest.raises(ValueError, match=message):
        config(*layers, **options)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_kv_heads": 1}, "num_kv_heads=1 must be num_heads=2: each head .* a state of its"),
        ({"window": 11}, "window=11 must be None: gated retention has none"),
    ],
)
def test_layers_that_cannot_retain_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(RETAINS, **changed)


def test_retention_needs_an_attend_that_keeps_its_state():
    of = config(RETAINS, CROSS, cross_from=1)
    graphdef, params = build(random_checkpoint(of))
    ids = jnp.zeros((3,), jnp.int32)
    attend = contiguous_attend(of, ids, ids)
    with pytest.raises(ValueError, match="layer 0 is of gated retention, so it must have retained"):
        nnx.merge(graphdef, params)(ids, ids, attend, contiguous_cache(of, 1, 3))


def test_query_heads_may_differ_where_keys_do_not():
    wide = dataclasses.replace(CROSS, num_heads=8)
    assert config(SELF, CROSS, wide, cross_from=1).layers[2].num_heads == 8
