"""Configurations are checked, hashable and survive JSON."""

import dataclasses
import json

import pytest

from kvjax.models import LayerConfig, ModelConfig, RopeScaling

FACTORS = RopeScaling("factors", factors=(1.0, 2.0))
LAYER = LayerConfig(num_heads=4, num_kv_heads=2, head_dim=4, window=3, rope_scaling=FACTORS)
CONFIG = ModelConfig("llama", 16, 32, 48, (LAYER,), max_context=64, attn_soft_cap=2.0)


def test_a_configuration_survives_json():
    again = ModelConfig.from_dict(json.loads(json.dumps(CONFIG.to_dict())))
    assert again == CONFIG
    assert hash(again) == hash(CONFIG)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"layers": ()}, "at least one layer"),
        ({"norm_eps": 0.0}, "norm_eps=0.0"),
        ({"attn_scale": -1.0}, "attn_scale=-1.0"),
        ({"final_soft_cap": float("nan")}, "final_soft_cap=nan"),
        ({"activation": "relu"}, "activation='relu'"),
    ],
)
def test_a_model_that_cannot_be_is_refused(change, fault):
    with pytest.raises(ValueError, match=fault):
        dataclasses.replace(CONFIG, **change)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"num_heads": 3}, "num_heads=3 must be a multiple of num_kv_heads=2"),
        ({"num_kv_heads": 0}, "num_kv_heads=0"),
        ({"head_dim": 5}, "head_dim=5 must be even"),
        ({"window": 0}, "window=0"),
        ({"rope_theta": 0.0}, "rope_theta=0.0"),
        ({"head_dim": 8}, "rope factors hold 2 numbers, head_dim=8 needs 4"),
    ],
)
def test_a_layer_that_cannot_be_is_refused(change, fault):
    with pytest.raises(ValueError, match=fault):
        dataclasses.replace(LAYER, **change)


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ({"kind": "dynamic"}, "kind='dynamic'"),
        ({"kind": "linear", "factor": 0.0}, "factor=0.0"),
        ({"kind": "yarn", "factor": 2.0}, "original_context >= 1"),
        ({"kind": "factors", "factors": (1.0, 0.0)}, "rope factors must be positive"),
    ],
)
def test_a_rope_scaling_that_cannot_be_is_refused(how, fault):
    with pytest.raises(ValueError, match=fault):
        RopeScaling(**how)


@pytest.mark.parametrize("change", [{"layers": 3}, {"colour": "red"}, {"layers": [{"window": 1}]}])
def test_a_stored_configuration_that_is_none_is_refused(change):
    with pytest.raises(ValueError, match="not a stored ModelConfig"):
        ModelConfig.from_dict({**CONFIG.to_dict(), **change})


def test_scale_defaults_to_the_head_dim():
    assert CONFIG.scale(0) == 0.5
    assert dataclasses.replace(CONFIG, attn_scale=0.25).scale(0) == 0.25
