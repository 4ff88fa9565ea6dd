"""DeepSeek's folders: configurations, tensors that are stacked and split, and what is refused."""

import itertools
import json
import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from kvjax.models import (
    Experts,
    Indexer,
    Latent,
    LayerConfig,
    ModelConfig,
    build,
    read,
    read_safetensors,
    save_orbax,
)
from kvjax.models.config import RopeScaling
from kvjax.models.hf_config import model_config
from kvjax.models.rope import rotations

DATA = pathlib.Path(__file__).resolve().parent / "data"
KINDS = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")
V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "hidden_act": "silu",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "num_nextn_predict_layers": 1,
}


def test_the_released_configuration_of_v3():
    config = model_config(V3, "x")
    layer = config.layers[0]
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (128, 128, 192)
    assert layer.latent == Latent(512, 64, 128, 1536, True)
    sharpening = 0.1 * np.log(40) + 1
    assert config.scale(0) == pytest.approx(192**-0.5 * sharpening**2)
    assert layer.rope_scaling == RopeScaling(
        "yarn", 40.0, 4096, beta_fast=32.0, beta_slow=1.0, attention_factor=1.0
    )
    assert config.experts == Experts(
        layers=tuple(range(3, 61)),
        count=256,
        chosen=8,
        size=2048,
        shared_size=2048,
        scores="sigmoid",
        routing="noaux_tc",
        groups=8,
        chosen_groups=4,
        normalize=True,
        scale=2.5,
    )


def test_the_released_configurations_with_an_indexer():
    fields = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    config = model_config({**V3, "model_type": "deepseek_v32", **fields}, "x")
    assert {layer.indexer for layer in config.layers} == {Indexer(64, 128, 2048)}
    assert config.layers[0].indexer.scale == pytest.approx(64**-0.5 * 128**-0.5)
    assert config.layers[0].latent == model_config(V3, "x").layers[0].latent
    glm = {**V3, "model_type": "glm_moe_dsa", "index_topk_freq": 4}  # arXiv:2603.12201
    shares = [layer.indexer.shares for layer in model_config(glm, "x").layers]
    assert shares[:10] == [False, False, True, True, True, False, True, True, True, False]
    assert model_config(glm, "x").layers[0].indexer.interleaved


@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_survives_json(kind):
    config = read_safetensors(DATA / kind).config
    again = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert hash(again) == hash(config)


def test_which_layers_have_experts():
    for first, every in itertools.product((0, 2, 61), (1, 3)):
        fields = {**V3, "first_k_dense_replace": first, "moe_layer_freq": every}
        experts = model_config(fields, "x").experts
        expected = [index for index in range(first, 61) if index % every == 0]
        assert ([] if experts is None else list(experts.layers)) == expected
    assert model_config({**V3, "n_routed_experts": None}, "x").experts is None


def test_yarn_without_mscale_sharpens_cosines():
    fields = {key: value for key, value in V3["rope_scaling"].items() if "mscale" not in key}
    config = model_config({**V3, "rope_scaling": fields}, "x")
    assert config.scale(0) == pytest.approx(192**-0.5)
    cosines, _ = rotations(config.layers[0], jnp.zeros(1, jnp.int32))
    np.testing.assert_allclose(cosines, 0.1 * np.log(40) + 1, rtol=1e-6)
    assert model_config({**V3, "rope_scaling": None}, "x").scale(0) == pytest.approx(192**-0.5)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"index_topk": 2048}, "'deepseek_v3' with index_topk=2048: .* have no lightning indexer"),
        ({"model_type": "deepseek_v32", "q_lora_rank": None}, "indexer: query_rank=None must be a"),
        ({"model_type": "deepseek_v32", "index_topk": -1}, "indexer: top_k=-1 must be at least 1"),
        (
            {"model_type": "deepseek_v32", "index_head_dim": 32},
            "indexer: head_dim=32 must be at least rope_dim=64",
        ),
        (
            {"model_type": "glm_moe_dsa", "index_topk_pattern": "S" + "F" * 60},
            "layer 0 shares a choice of tokens, and no layer before it has one",
        ),
        ({"model_type": "glm_moe_dsa", "index_topk_freq": 0}, "index_topk_freq=0 must be at least"),
        ({"model_type": "glm_moe_dsa", "indexer_types": ["full"]}, "for each of 61 layers"),
        ({"model_type": "deepseek_v32", "mlp_layer_types": ["dense"]}, "mlp_layer_types is"),
        ({"model_type": "deepseek_v4"}, "model_type is 'deepseek_v4'; kvjax reads .*deepseek_v3"),
        ({"kv_lora_rank": "absent"}, "kv_lora_rank is missing"),
        ({"kv_lora_rank": 0}, "latent: rank=0 must be at least 1"),
        ({"q_lora_rank": "absent"}, "q_lora_rank is missing: null says"),
        ({"q_lora_rank": True}, "q_lora_rank is True, not an integer"),
        ({"qk_nope_head_dim": None}, "qk_nope_head_dim is missing"),
        ({"qk_nope_head_dim": 0}, "rope_dim=64 must be below head_dim=64"),
        ({"qk_rope_head_dim": 63}, "rope_dim=63 must be even"),
        ({"v_head_dim": "128"}, "v_head_dim is '128', not an integer"),
        ({"num_key_value_heads": 8}, "num_key_value_heads=8 must be num_attention_heads=128"),
        ({"rope_interleave": 1}, "rope_interleave is 1, not true or false"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config=.* is not supported",
        ),
        ({"hidden_act": "relu"}, "activation 'relu' is not known"),
        ({"n_routed_experts": "absent"}, "n_routed_experts is missing"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ({"num_experts_per_tok": 129}, "chosen=129 is above the 128 a token may choose from"),
        ({"moe_intermediate_size": "absent"}, "moe_intermediate_size is missing"),
        ({"n_shared_experts": -1}, "shared_size=-2048 must be at least 0"),
        ({"n_group": 7}, "count=256 must be a multiple of groups=7"),
        ({"n_group": 256}, "groups=256 must be at most half of count=256"),
        ({"topk_group": 9}, "chosen_groups=9 is above groups=8"),
        ({"scoring_func": "tanh"}, "scoring_func is 'tanh', not one of softmax, sigmoid"),
        ({"topk_method": "best"}, "topk_method is 'best', not one of greedy, group_limited"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes', not true or false"),
        ({"routed_scaling_factor": 0}, "scale=0.0 must be a positive number"),
        ({"moe_layer_freq": 0}, "moe_layer_freq=0 must be at least 1"),
        ({"model_type": "deepseek_v2"}, "norm_topk_prob=True with routed_scaling_factor=2.5"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "mscale": 1}}, "give both or neither"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_type 'dynamic' is not known"),
    ],
)
def test_configurations_that_are_not_supported_are_named(change, fault):
    fields = {key: value for key, value in {**V3, **change}.items() if value != "absent"}
    with pytest.raises(ValueError, match=f"^some/config.json: .*{fault}"):
        model_config(fields, "some/config.json")


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ({"num_kv_heads": 2}, "num_kv_heads=2 must be num_heads=4"),
        ({"head_dim": 8}, "rope_dim=8 must be below head_dim=8"),
    ],
)
def test_a_layer_that_cannot_be_is_refused(how, fault):
    fields = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 16, "latent": Latent(16, 8, 12), **how}
    with pytest.raises(ValueError, match=fault):
        LayerConfig(**fields)


def test_what_layers_with_a_latent_lack_is_refused():
    layer = LayerConfig(4, 4, 16, latent=Latent(16, 8, 12))
    with pytest.raises(ValueError, match="qkv_bias=False and qk_norm=True must be False"):
        ModelConfig("x", 16, 32, 48, (layer,), max_context=64, qk_norm=True)
    experts = Experts(layers=(1,), count=4, chosen=2, size=8)
    with pytest.raises(ValueError, match=r"layers=\(1,\) must be among 0\.\.0"):
        ModelConfig("x", 16, 32, 48, (layer,), max_context=64, experts=experts)
    with pytest.raises(ValueError, match="groups=2 must be 1: greedy"):
        Experts(layers=(1,), count=4, chosen=2, size=8, groups=2)


@pytest.fixture
def folder(tmp_path):
    """A function that copies DeepSeek V3's folder with other tensors (None: without) and fields."""

    def copy(change=(), **fields):
        where = tmp_path / "copy"
        shutil.rmtree(where, ignore_errors=True)
        shutil.copytree(DATA / "deepseek_v3", where)
        config = json.loads((where / "config.json").read_text()) | fields
        (where / "config.json").write_text(json.dumps(config))
        path = where / "model.safetensors"
        weights = {**safetensors.numpy.load_file(path), **dict(change)}
        kept = {name: value for name, value in weights.items() if value is not None}
        safetensors.numpy.save_file(kept, path)
        return where

    return copy


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
UP = "model.layers.0.self_attn.kv_b_proj.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
BELOW = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"


@pytest.mark.parametrize(
    ("tensor", "shape", "fault"),
    [
        (EXPERT, None, rf"tensor {EXPERT} \[8, 32\] is missing"),
        (EXPERT, (8, 31), rf"{EXPERT} has shape \[8, 31\], the configuration calls for \[8, 32\]"),
        (
            EXPERT.replace("3", "8"),
            (8, 32),
            r"experts\.8\.up_proj\.weight has no place in a deepseek",
        ),
        (EXPERT.replace("1", "0"), (8, 32), r"layers\.0\.mlp\.experts\.3\.\S+ has no place"),
        (UP, None, rf"tensor {UP} \[80, 16\] is missing"),
        (UP, (80, 17), rf"{UP} has shape \[80, 17\]"),
        (BIAS, None, rf"tensor {BIAS} \[8\] is missing"),
        (BELOW, None, r"layers\.1\.attention\.kv_down\.weight \[24, 32\] is missing"),
        ("model.layers.1.mlp.gate.weight", None, r"layers\.1\.mlp\.router\.weight \[8, 32\] is mi"),
        ("model.layers.1.self_attn.q_proj.weight", (64, 32), r"attention\.q\.weight has no place"),
        ("model.layers.1.mlp.adapter.weight", (2,), r"mlp\.adapter\.weight has no place"),
        ("model.layers.4.mlp.up_proj.weight", (2,), r"layers\.4\.mlp\.up\.weight has no place"),
    ],
)
def test_wrong_tensors_are_named(folder, tensor, shape, fault):
    values = None if shape is None else np.ones(shape, np.float32)
    with pytest.raises(ValueError, match=fault):
        build(read_safetensors(folder({tensor: values})))


def test_experts_that_are_not_finite_are_named(folder):
    bad = np.full((8, 32), np.nan, np.float32)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.up holds NaN"):
        build(read_safetensors(folder({EXPERT: bad})))


def test_layers_that_predict_further_tokens_are_left_out(folder):
    further = {"model.layers.2.eh_proj.weight": np.ones((2, 2), np.float32)}
    assert set(read(folder(further)).weights) == set(read(DATA / "deepseek_v3").weights)
    where = folder(further, num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match=r"model\.layers\.2\.eh_proj\.weight has no place"):
        build(read(where))
    with pytest.raises(ValueError, match="num_nextn_predict_layers is 'one', not an integer"):
        read(folder(further, num_nextn_predict_layers="one"))


def test_a_model_without_shared_experts_may_have_empty_ones(folder):
    names = [
        f"model.layers.1.mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")
    ]
    empty = {
        name: np.ones((0, 32) if "down" not in name else (32, 0), np.float32) for name in names
    }
    for change in (empty, dict.fromkeys(names)):
        checkpoint = read(folder(change, n_shared_experts=0))
        assert not any("shared" in name for name in checkpoint.weights)
        build(checkpoint)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.shared\.\w+\.weight has no place"):
        build(read(folder(n_shared_experts=0)))


def test_tensors_are_split_and_stacked_as_they_were():
    stored = safetensors.numpy.load_file(DATA / "deepseek_v3" / "model.safetensors")
    weights = read(DATA / "deepseek_v3").weights
    heads = stored[UP].reshape(4, 20, 16)
    np.testing.assert_array_equal(
        weights["layers.0.attention.k_up.weight"], heads[:, :8].reshape(32, 16)
    )
    np.testing.assert_array_equal(
        weights["layers.0.attention.v_up.weight"], heads[:, 8:].reshape(48, 16)
    )
    np.testing.assert_array_equal(weights["layers.1.mlp.experts.up"][3], stored[EXPERT])
    np.testing.assert_array_equal(weights["layers.1.mlp.router.bias"], stored[BIAS])


def test_an_orbax_checkpoint_comes_back(tmp_path):
    first = read(DATA / "deepseek_v3")
    save_orbax(tmp_path / "saved", first)
    again = read(tmp_path / "saved")
    assert again.config == first.config
    assert set(again.weights) == set(first.weights)
    for name, values in first.weights.items():
        np.testing.assert_array_equal(again.weights[name], values, err_msg=name)


def test_routers_stay_float32():
    _, params = build(read(DATA / "deepseek_v3"), "bfloat16")
    mlp = params["layers"][1]["mlp"]
    assert mlp["router"]["weight"].dtype == mlp["router"]["bias"].dtype == jnp.float32
    assert mlp["experts"]["gate"].dtype == mlp["shared"]["up"]["weight"].dtype == jnp.bfloat16
