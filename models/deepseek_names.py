"""DeepSeek's tensors in Hugging Face files: their names, and how this package stacks and splits."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvjax.models.config import LayerConfig, ModelConfig
from kvjax.models.deepseek import Experts
from kvjax.models.hf_fields import Fields

DEEPSEEK_LAYER = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.q",
    "self_attn.q_a_proj": "attention.q.down",
    "self_attn.q_a_layernorm": "attention.q.norm",
    "self_attn.q_b_proj": "attention.q.up",
    "self_attn.kv_a_proj_with_mqa": "attention.kv_down",
    "self_attn.kv_a_layernorm": "attention.kv_norm",
    "self_attn.o_proj": "attention.o",
    "self_attn.indexer.wq_b": "attention.indexer.q",
    "self_attn.indexer.wk": "attention.indexer.k",
    "self_attn.indexer.k_norm": "attention.indexer.k_norm",
    "self_attn.indexer.weights_proj": "attention.indexer.weights",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
    "mlp.gate": "mlp.router",
    "mlp.shared_experts.gate_proj": "mlp.shared.gate",
    "mlp.shared_experts.up_proj": "mlp.shared.up",
    "mlp.shared_experts.down_proj": "mlp.shared.down",
}
"""A layer's parts that are one tensor in the files and here."""


def predicting_layers(
    fields: Mapping[str, Any], config: ModelConfig, source: str
) -> tuple[str, ...]:
    """What the names of tensors that predict tokens after the next begin with; none of them is run.

    Args:
        fields: the parsed `config.json`.
        config: what it was translated to. The layers in question lie behind its last.
        source: the file's path, for error messages.

    Raises:
        ValueError: their number is no integer.
    """
    if config.layers[0].latent is None:
        return ()
    count = Fields(source, fields, {}).count("num_nextn_predict_layers", 0)
    depth = len(config.layers)
    return tuple(f"model.layers.{index}." for index in range(depth, depth + count))


def arranged(
    read: Mapping[str, np.ndarray], config: ModelConfig, source: str
) -> dict[str, np.ndarray]:
    """Stacks experts and splits what keys and values are made with.

    Args:
        read: weights as they were read; tensors that `DEEPSEEK_LAYER` does not name have the files'
            names.
        config: the model's.
        source: the folder, for error messages.

    Raises:
        ValueError: a tensor is missing or misshapen; it is named.
    """
    weights = dict(read)
    for index, layer in enumerate(config.layers):
        if layer.latent is not None:
            _split(weights, index, layer, source)
    if config.experts is not None:
        for index in config.experts.layers:
            _stack(weights, index, config.experts, config.hidden_size, source)
    return weights


def _split(weights: dict[str, np.ndarray], index: int, layer: LayerConfig, source: str) -> None:
    """Of every head, the rows that make its key's own part come first, then those of its value."""
    assert layer.latent is not None
    own, rank = layer.head_dim - layer.rope_dim, layer.latent.rank
    rows = own + layer.value_dim
    tensor = f"model.layers.{index}.self_attn.kv_b_proj.weight"
    both = _taken(weights, tensor, (layer.num_heads * rows, rank), source)
    both = both.reshape(layer.num_heads, rows, rank)
    weights[f"layers.{index}.attention.k_up.weight"] = both[:, :own].reshape(-1, rank)
    weights[f"layers.{index}.attention.v_up.weight"] = both[:, own:].reshape(-1, rank)


def _stack(
    weights: dict[str, np.ndarray], index: int, experts: Experts, size: int, source: str
) -> None:
    theirs, ours = f"model.layers.{index}.mlp", f"layers.{index}.mlp"
    if experts.routing == "noaux_tc":
        bias = f"{theirs}.gate.e_score_correction_bias"
        weights[f"{ours}.router.bias"] = _taken(weights, bias, (experts.count,), source)
    for part in ("gate", "up", "down"):
        shape = (size, experts.size) if part == "down" else (experts.size, size)
        tensors = [f"{theirs}.experts.{one}.{part}_proj.weight" for one in range(experts.count)]
        stack = np.stack([_taken(weights, tensor, shape, source) for tensor in tensors])
        weights[f"{ours}.experts.{part}"] = stack
        shared = f"{ours}.shared.{part}.weight"
        if not experts.shared_size and shared in weights and not weights[shared].size:
            del weights[shared]  # a model without shared experts may be written with such


def _taken(
    weights: dict[str, np.ndarray], tensor: str, shape: tuple[int, ...], source: str
) -> np.ndarray:
    if tensor not in weights:
        raise ValueError(f"{source}: tensor {tensor} {list(shape)} is missing")
    values = weights.pop(tensor)
    if values.shape != shape:
        raise ValueError(
            f"{source}: tensor {tensor} has shape {list(values.shape)}, the configuration calls "
            f"for {list(shape)}"
        )
    return values
