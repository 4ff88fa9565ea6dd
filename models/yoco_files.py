"""A released YOCO's files in this package's terms (microsoft/unilm, YOCO): settings and tensors.

Its `params.json` has the fields of `YOCOArgs`. Its weights are a PyTorch state dict; saved as
safetensors under the same names, they are read here.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvjax.models.config import LayerConfig, ModelConfig, RopeScaling
from kvjax.models.hf_fields import Fields

YOCO_TYPE = "yoco"
"""`model_type` of such a model in a `config.json`; a `params.json` has no such field."""

YOCO_SETTINGS = "params.json"

_WHOLE = {
    "embed_tokens.weight": "embed.weight",
    "output_projection.weight": "head.weight",
    "layer_norm.weight": "norm.weight",
}
_SOURCE = {"k_proj": "k", "v_proj": "v", "kv_layer_norm": "norm"}
_LAYER = {
    "mixer_layer_norm": "attention_norm",
    "mixer.q_proj": "attention.q",
    "mixer.k_proj": "attention.k",
    "mixer.v_proj": "attention.v",
    "mixer.g_proj": "attention.gate",
    "mixer.gt_proj": "attention.decay",
    "mixer.out_proj": "attention.o",
    "final_layer_norm": "mlp_norm",
    "ffn.fc1": "mlp.gate",  # the one that goes through silu
    "ffn.gate": "mlp.up",
    "ffn.fc2": "mlp.down",
}


def yoco_config(fields: Mapping[str, Any], source: str) -> ModelConfig:
    """Translates `YOCOArgs`.

    Args:
      fields: the parsed file.
      source: its path, for error messages.

    Raises:
      ValueError: a field is missing or out of range.
    """
    get = Fields(source, fields, {})
    depth, size = get.count("n_layers"), get.count("dim")
    retention = fields.get("sliding_window") is None
    if not retention and isinstance(fields["sliding_window"], bool):
        raise ValueError(
            f"{source}: sliding_window={fields['sliding_window']} must be a number of tokens; "
            "leave it out for a self-decoder of gated retention"
        )
    if depth < 2 or depth % 2:
        raise ValueError(f"{source}: n_layers={depth} must be even: half of them are the decoders'")
    context = get.count("max_seq_len", -1)
    if context < 1:
        raise ValueError(
            f"{source}: max_seq_len={context} must be the tokens of context that the model was "
            "made for: write it there"
        )
    theta = get.number("rope_theta", 1e4)

    def layer(heads: str, kv_heads: str, **options: Any) -> LayerConfig:
        count = get.count(heads)
        if count < 1 or size % count:
            raise ValueError(f"{source}: {heads}={count} must divide dim={size}")
        return LayerConfig(
            num_heads=count,
            num_kv_heads=get.count(kv_heads, count),
            head_dim=size // count,
            rope_theta=theta,
            rope_scaling=_slower(theta, size // count),
            **options,
        )

    window = None if retention else get.count("sliding_window")
    try:
        return ModelConfig(
            architecture=YOCO_TYPE,
            vocab_size=get.count("vocab_size"),
            hidden_size=size,
            intermediate_size=get.count("hidden_dim"),
            layers=(layer("n_self_heads", "n_self_heads", window=window, retention=retention),)
            * (depth // 2)
            + (layer("n_attn_heads", "n_attn_kv_heads"),) * (depth // 2),
            max_context=context,
            norm_eps=get.number("norm_eps", 1e-5),
            tie_embeddings=get.flag("share_input_output_embed", False),
            embed_scale=math.sqrt(size),
            cross_from=depth // 2,
        )
    except ValueError as error:
        if source in str(error):
            raise
        raise ValueError(f"{source}: {error}") from error


def _slower(theta: float, head_dim: int) -> RopeScaling | None:
    """Its frequencies go down to 1 / theta itself: theta ** -(i / (half - 1)), not i / half."""
    half = head_dim // 2
    if half < 2:
        return None
    factors = (theta ** (i / (half - 1) - i / half) for i in range(half))
    return RopeScaling("factors", factors=tuple(factors))


def yoco_weight_name(tensor: str, config: ModelConfig) -> str | None:
    """This package's name of a tensor; None for one that the model leaves out.

    A name of no known kind is returned as it is, and refused when the model is built.

    Args:
      tensor: the file's name of it.
      config: the model's.
    """
    if tensor == "output_projection.weight" and config.tie_embeddings:
        return None
    if tensor in _WHOLE:
        return _WHOLE[tensor]
    first = config.cross_from
    assert first is not None
    match = re.fullmatch(r"cross_decoder\.(\w+)\.weight", tensor)
    if match is not None and match[1] in _SOURCE:
        return f"layers.{first}.attention.source.{_SOURCE[match[1]]}.weight"
    match = re.fullmatch(r"(self|cross)_decoder\.layers\.(\d+)\.([\w.]+)\.weight", tensor)
    if match is None or match[3] not in _LAYER:
        return tensor
    index = int(match[2]) + (first if match[1] == "cross" else 0)
    return f"layers.{index}.{_LAYER[match[3]]}.weight"


def in_halves(values: np.ndarray, name: str, config: ModelConfig) -> np.ndarray:
    """A tensor with its rotated pairs (2i, 2i + 1) as (i, i + half), where it makes such.

    Queries and keys are laid out alike, so that no product of theirs changes.

    Args:
      values: [out, in] of a matrix.
      name: this package's name of it.
      config: the model's.
    """
    match = re.fullmatch(r"layers\.(\d+)\.attention\.(?:source\.)?[qk]\.weight", name)
    if match is None or int(match[1]) >= len(config.layers) or values.ndim != 2:
        return values
    pairs = config.layers[int(match[1])].head_dim // 2
    if values.shape[0] % (2 * pairs):
        return values  # misshapen, which is said when the model is built
    rows = values.reshape(-1, pairs, 2, values.shape[1]).swapaxes(1, 2)
    return np.ascontiguousarray(rows).reshape(values.shape)
