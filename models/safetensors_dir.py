"""A folder of Hugging Face files (config.json, *.safetensors, tokenizer.json) as a checkpoint."""

import json
import pathlib
import re
from typing import Any

import numpy as np
import safetensors

from kvjax.models.checkpoint import Checkpoint
from kvjax.models.config import ModelConfig
from kvjax.models.deepseek_names import DEEPSEEK_LAYER, arranged, predicting_layers
from kvjax.models.hf_config import OWN_TYPE, model_config
from kvjax.models.tokenizer_dir import read_tokenizer
from kvjax.models.yoco_files import YOCO_SETTINGS, YOCO_TYPE, in_halves, yoco_weight_name

_FLOATS = ("float32", "float16", "bfloat16")
_WHOLE = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
_LAYER = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.o",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
_GEMMA_LAYER = _LAYER | {
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}
_NOT_TEXT = ("vision_tower.", "multi_modal_projector.")


def read_safetensors(folder: str | pathlib.Path) -> Checkpoint:
    """Reads a folder as the transformers library saves it; weights keep their dtype.

    In a folder that kvjax wrote, tensors have this package's names. A released YOCO has a
    `params.json` in the place of a `config.json`, and its own names.

    Raises:
        ValueError: a file is missing or damaged, or holds a model kvjax does not run; it is named.
    """
    folder = pathlib.Path(folder)
    fields, where = _settings(folder)
    config = model_config(fields, where)
    left_out = predicting_layers(fields, config, where)
    weights: dict[str, np.ndarray] = {}
    for path, names in _shards(folder).items():
        weights.update(_read_shard(path, names, config, left_out))
    if config.layers[0].latent is not None and fields["model_type"] != OWN_TYPE:
        weights = arranged(weights, config, str(folder))
    if fields["model_type"] == YOCO_TYPE:
        weights = {name: in_halves(values, name, config) for name, values in weights.items()}
    return Checkpoint(config, weights, read_tokenizer(folder), str(folder))


def _settings(folder: pathlib.Path) -> tuple[dict[str, Any], str]:
    """A model's configuration and the path of the file that it stands in."""
    path, released = folder / "config.json", folder / YOCO_SETTINGS
    if path.is_file() or not released.is_file():
        return read_json(path), str(path)
    fields = read_json(released)
    if "n_self_heads" not in fields:
        raise ValueError(
            f"{released}: n_self_heads is missing, which YOCO's settings have; other models are "
            f"read with a config.json"
        )
    return {**fields, "model_type": YOCO_TYPE}, str(released)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    if not path.is_file():
        raise ValueError(f"{path.parent}: {path.name} is missing")
    try:
        fields = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not a JSON file: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: a JSON object is expected, not {type(fields).__name__}")
    return fields


def _shards(folder: pathlib.Path) -> dict[pathlib.Path, set[str] | None]:
    """The files that hold weights, and the tensors each must have (None: whatever it has)."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        whole = folder / "model.safetensors"
        if not whole.is_file():
            raise ValueError(f"{folder}: neither {whole.name} nor {index.name} is there")
        return {whole: None}
    shards: dict[pathlib.Path, set[str] | None] = {}
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(v, str) for v in placed.values()):
        raise ValueError(f"{index}: weight_map must map tensor names to file names")
    for file in sorted(set(placed.values())):
        if pathlib.PurePath(file).name != file:
            raise ValueError(f"{index}: weight_map names {file!r}, not a file in this folder")
        if not (folder / file).is_file():
            raise ValueError(f"{folder}: {file} is missing, which {index.name} names")
        shards[folder / file] = {name for name, where in placed.items() if where == file}
    return shards


def _read_shard(
    path: pathlib.Path, names: set[str] | None, config: ModelConfig, left_out: tuple[str, ...]
) -> dict[str, np.ndarray]:
    weights = {}
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            here = set(file.keys())
            if names is not None and names - here:
                raise ValueError(f"{path}: tensor {min(names - here)} is missing")
            for tensor in sorted(here if names is None else names):
                name = weight_name(tensor, config)
                if name is None or tensor.startswith(left_out):
                    continue
                weights[name] = _checked(file.get_tensor(tensor), name, path, tensor, config)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error}): get it again") from error
    return weights


def _checked(
    values: np.ndarray, name: str, path: pathlib.Path, tensor: str, config: ModelConfig
) -> np.ndarray:
    if values.dtype.name not in _FLOATS:
        raise ValueError(
            f"{path}: tensor {tensor} has dtype {values.dtype.name}; {', '.join(_FLOATS)} are read"
        )
    if config.architecture == "gemma3" and name.endswith("norm.weight"):
        return values.astype(np.float32) + np.float32(1)  # stored less one
    return values


def weight_name(tensor: str, config: ModelConfig) -> str | None:
    """This package's name of a tensor; None for one a text model of this configuration leaves out.

    A name of no known kind is returned as it is, and refused when the model is built.
    """
    if config.architecture == YOCO_TYPE:
        return yoco_weight_name(tensor, config)
    if tensor.startswith(_NOT_TEXT) or tensor.removeprefix("model.").startswith(_NOT_TEXT):
        return None
    if tensor.endswith("rotary_emb.inv_freq"):
        return None  # a computed buffer, which older files carry
    if tensor.startswith("language_model."):
        tensor = tensor.removeprefix("language_model.")
    elif tensor.startswith("model.language_model."):
        tensor = "model." + tensor.removeprefix("model.language_model.")
    if tensor == "lm_head.weight" and config.tie_embeddings:
        return None
    if tensor in _WHOLE:
        return _WHOLE[tensor]
    match = re.fullmatch(r"model\.layers\.(\d+)\.([\w.]+)\.(weight|bias)", tensor)
    layer = _GEMMA_LAYER if config.post_norms else _LAYER
    layer = layer if config.layers[0].latent is None else DEEPSEEK_LAYER
    if match is None or match[2] not in layer:
        return tensor
    return f"layers.{match[1]}.{layer[match[2]]}.{match[3]}"
