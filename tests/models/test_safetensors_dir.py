"""Hugging Face folders: what is read (see test_decoder.py for values) and what is refused."""

import json
import pathlib
import shutil

import numpy as np
import pytest
import safetensors.numpy

from kvjax.models import build, read, read_safetensors
from kvjax.models.hf_config import model_config

DATA = pathlib.Path(__file__).resolve().parent / "data"


@pytest.fixture
def folder(tmp_path):
    """A function that copies a family's folder and rewrites its config.json."""

    def copy(family, **fields):
        where = tmp_path / family
        shutil.copytree(DATA / family, where)
        config = json.loads((where / "config.json").read_text()) | fields
        config = {key: value for key, value in config.items() if value != "absent"}
        (where / "config.json").write_text(json.dumps(config))
        return where

    return copy


def test_windows_of_each_family():
    windows = {
        family: [layer.window for layer in read_safetensors(DATA / family).config.layers]
        for family in ("llama", "mistral", "qwen2", "qwen3", "gemma3")
    }
    assert windows == {
        "llama": [None] * 3,
        "mistral": [7] * 3,
        "qwen2": [None, 9, 9],
        "qwen3": [None] * 3,
        "gemma3": [6, 6, 6, 6, 6, None, 6],
    }


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_older_files_say_the_same_otherwise(family, folder):
    """Before layer_types and rope_parameters."""
    older = {"layer_types": "absent", "rope_parameters": "absent", "rope_theta": 1e6}
    if family == "gemma3":
        older |= {
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"type": "linear", "factor": 8.0},
            "sliding_window_pattern": 6,
            "_sliding_window_pattern": "absent",
            "tie_word_embeddings": "absent",
        }
    new = read_safetensors(DATA / family).config
    assert read_safetensors(folder(family, **older)).config == new


def test_text_part_of_a_model_that_sees(folder):
    where = folder("gemma3")
    text = json.loads((where / "config.json").read_text())
    (where / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    weights = safetensors.numpy.load_file(where / "model.safetensors")
    plain = read_safetensors(DATA / "gemma3")
    for prefix in ("language_model.model.", "model.language_model."):
        renamed = {prefix + name.removeprefix("model."): w for name, w in weights.items()}
        renamed["vision_tower.patch.weight"] = np.ones((2, 2), np.float32)
        renamed["model.multi_modal_projector.norm.weight"] = np.ones(2, np.float32)
        safetensors.numpy.save_file(renamed, where / "model.safetensors")
        again = read_safetensors(where)
        assert again.config == plain.config
        assert set(again.weights) == set(plain.weights)


def test_llama_with_mscale_means_its_ratio():
    rope = {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    }
    fields = json.loads((DATA / "llama" / "config.json").read_text()) | {"rope_parameters": None}
    scaling = model_config(fields | {"rope_scaling": rope}, "x").layers[0].rope_scaling
    assert scaling.attention_factor == pytest.approx((0.1 * np.log(4) + 1) / (0.05 * np.log(4) + 1))


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'"),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide', not an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, not an integer"),
        ({"hidden_act": "relu"}, "activation 'relu' is not known"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.* use GGUF"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type 'dynamic' is not known"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope scaling: factor is missing"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention"]}, "layer_types is .* for each of 3 layers"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types is"),
        ({"num_key_value_heads": 3}, "multiple of num_kv_heads=3"),
    ],
)
def test_configurations_that_are_not_supported_are_named(folder, fields, fault):
    with pytest.raises(ValueError, match=rf"config\.json.*{fault}"):
        read_safetensors(folder("llama", **fields))


def test_damaged_folders_are_told(folder):
    where = folder("qwen3")
    shard = where / "model-00002-of-00003.safetensors"
    whole = shard.read_bytes()
    for content in (whole[:-7], whole[:9], b"", b"PK\x03\x04" + whole):
        shard.write_bytes(content)
        with pytest.raises(ValueError, match=r"model-00002-of-00003.*not a whole safetensors"):
            read(where)
    shard.unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00003\.safetensors is missing, which"):
        read(where)
    index = where / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../x.safetensors"}}))
    with pytest.raises(ValueError, match="not a file in this folder"):
        read(where)
    index.write_text("[1]")
    with pytest.raises(ValueError, match="a JSON object is expected, not list"):
        read(where)
    index.unlink()
    with pytest.raises(
        ValueError, match=r"neither model\.safetensors nor model\.safetensors\.index"
    ):
        read(where)
    (where / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not a JSON file"):
        read(where)


def test_wrong_tensors_are_named(folder):
    where = folder("llama")
    path = where / "model.safetensors"
    weights = safetensors.numpy.load_file(path)

    def refused(fault, **change):
        changed = {**weights, **{k.replace("__", "."): v for k, v in change.items()}}
        safetensors.numpy.save_file(
            {name: value for name, value in changed.items() if value is not None}, path
        )
        with pytest.raises(ValueError, match=fault):
            build(read_safetensors(where))

    refused(r"weight norm\.weight \[32\] is missing", model__norm__weight=None)
    refused(r"head\.weight \[128, 32\] is missing", lm_head__weight=None)
    refused(
        r"model\.layers\.0\.adapter\.weight has no place",
        **{"model.layers.0.adapter.weight": np.ones(2, np.float32)},
    )
    refused("dtype int8; float32", model__norm__weight=np.ones(32, np.int8))
    refused(r"norm\.weight has shape \[31\]", model__norm__weight=np.ones(31, np.float32))
    refused(r"norm\.weight holds NaN", model__norm__weight=np.full(32, np.nan, np.float32))


def test_paths_that_are_no_checkpoint_are_told(tmp_path):
    accepted = r"config\.json or, for YOCO, params\.json and \*\.safetensors, or .* save_orbax"
    with pytest.raises(ValueError, match=f"holds no checkpoint kvjax reads: .* {accepted}"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is nothing"):
        read(tmp_path / "nowhere")
    (tmp_path / "text").write_text("Call me Ishmael.")
    with pytest.raises(ValueError, match="not a GGUF file"):
        read(tmp_path / "text")
