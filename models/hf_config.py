"""A Hugging Face `config.json`, in this package's terms."""

import math
from collections.abc import Mapping
from typing import Any

from kvjax.models.config import Activation, LayerConfig, ModelConfig, RopeScaling
from kvjax.models.deepseek_files import (
    DEEPSEEK_DEFAULTS,
    attention_scale,
    check_deepseek,
    experts_of,
    indexers_of,
    latent_of,
)
from kvjax.models.hf_fields import Fields
from kvjax.models.yoco_files import YOCO_TYPE, yoco_config

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", *DEEPSEEK_DEFAULTS)
"""`model_type` values read here; gemma3 (with vision) is read as its text part."""

OWN_TYPE = "kvjax"
"""`model_type` of a folder that kvjax wrote: a whole `ModelConfig` stands in the field `kvjax`."""

_ACTIVATIONS: dict[Any, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_GEMMA_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "qwen2": {"sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    "gemma3_text": _GEMMA_DEFAULTS,
    **DEEPSEEK_DEFAULTS,
}
"""What the library that writes these files takes for granted where a field is absent."""


def model_config(fields: Mapping[str, Any], source: str) -> ModelConfig:
    """Translates a configuration.

    Args:
        fields: the parsed `config.json`.
        source: its path, for error messages.

    Raises:
        ValueError: the architecture is not known, or a field is missing, out of range or asks for
            what is not supported.
    """
    kind = fields.get("model_type")
    if kind == OWN_TYPE:
        return _own_config(fields, source)
    if kind == YOCO_TYPE:
        return yoco_config(fields, source)
    if kind == "gemma3" and isinstance(fields.get("text_config"), Mapping):
        return model_config({"model_type": "gemma3_text", **fields["text_config"]}, source)
    check_deepseek(kind, fields, source)
    if kind not in MODEL_TYPES:
        raise ValueError(
            f"{source}: model_type is {kind!r}; kvjax reads {', '.join(MODEL_TYPES)}, "
            f"{YOCO_TYPE} and gemma3"
        )
    get = Fields(source, fields, _DEFAULTS.get(kind, {}))
    get.refuse("quantization_config", "convert the checkpoint to bfloat16 or float32, or use GGUF")
    if kind != "qwen2":
        get.refuse("attention_bias", "only Qwen2's query, key and value biases are")
    get.refuse("mlp_bias", "no model kvjax runs has one")
    get.refuse("use_bidirectional_attention", "kvjax runs causal decoders")
    try:
        return _model_config(kind, get)
    except ValueError as error:
        if source in str(error):
            raise
        raise ValueError(f"{source}: {error}") from error


def _own_config(fields: Mapping[str, Any], source: str) -> ModelConfig:
    stored = fields.get("kvjax")
    if not isinstance(stored, dict):
        raise ValueError(f"{source}: model_type is {OWN_TYPE!r} and its field kvjax is {stored!r}")
    try:
        return ModelConfig.from_dict(stored)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _model_config(kind: str, get: Fields) -> ModelConfig:
    gemma, deepseek = kind == "gemma3_text", kind in DEEPSEEK_DEFAULTS
    size, heads = get.count("hidden_size"), get.count("num_attention_heads")
    activation = get.get("hidden_activation" if gemma else "hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not known: {', '.join(_ACTIVATIONS)} are")
    latent, head_dim = None, get.count("head_dim", size // max(heads, 1))
    if deepseek:
        latent, head_dim = latent_of(get)
    layers, windows = [], _windows(kind, get)
    indexers = indexers_of(get, len(windows))
    for window, indexer in zip(windows, indexers, strict=True):
        theta, scaling = _rope(kind, get, local=gemma and window is not None)
        layers.append(
            LayerConfig(
                num_heads=heads,
                num_kv_heads=get.count("num_key_value_heads", heads),
                head_dim=head_dim,
                window=window,
                rope_theta=theta,
                rope_scaling=scaling,
                latent=latent,
                indexer=indexer,
            )
        )
    scale = get.number("query_pre_attn_scalar") ** -0.5 if gemma else None
    if deepseek:
        scale = attention_scale(get, head_dim)
    return ModelConfig(
        architecture="gemma3" if gemma else kind,
        vocab_size=get.count("vocab_size"),
        hidden_size=size,
        intermediate_size=get.count("intermediate_size"),
        layers=tuple(layers),
        max_context=get.count("max_position_embeddings"),
        norm_eps=get.number("rms_norm_eps", 1e-6),
        tie_embeddings=bool(get.get("tie_word_embeddings", False)),
        attn_scale=scale,
        attn_soft_cap=get.get("attn_logit_softcapping"),
        final_soft_cap=get.get("final_logit_softcapping"),
        qkv_bias=kind == "qwen2",
        qk_norm=kind in ("qwen3", "gemma3_text"),
        embed_scale=math.sqrt(size) if gemma else None,
        post_norms=gemma,
        activation=_ACTIVATIONS[activation],
        experts=experts_of(get, len(layers)) if deepseek else None,
    )


def _windows(kind: str, get: Fields) -> list[int | None]:
    """Each layer's sliding window in tokens, or None."""
    depth = get.count("num_hidden_layers")
    if kind in DEEPSEEK_DEFAULTS:
        return [None] * depth
    window = get.get("sliding_window")
    optional = kind in ("qwen2", "qwen3") and not get.get("use_sliding_window")
    if optional or kind == "llama":
        window = None
    types = get.get("layer_types")
    if types is None:
        if kind == "gemma3_text":
            every = get.count("sliding_window_pattern", get.get("_sliding_window_pattern", 6))
            local = [(index + 1) % every != 0 for index in range(depth)]
        else:  # Qwen: the lower layers see everything
            first = get.count("max_window_layers", depth) if kind != "mistral" else 0
            local = [index >= first for index in range(depth)]
    else:
        if len(types) != depth or not {*types} <= {"sliding_attention", "full_attention"}:
            raise ValueError(
                f"layer_types is {types}; expected sliding_attention or full_attention for each "
                f"of {depth} layers"
            )
        local = [name == "sliding_attention" for name in types]
    return [window if is_local else None for is_local in local]


def _rope(kind: str, get: Fields, *, local: bool) -> tuple[float, RopeScaling | None]:
    """One layer's base and scaling, from either of the two ways they are written."""
    fields = get.get("rope_parameters")
    if isinstance(fields, Mapping) and kind == "gemma3_text":
        fields = fields.get("sliding_attention" if local else "full_attention")
    if isinstance(fields, Mapping):
        written = fields.get("rope_theta")
    else:
        fields = None if local else get.get("rope_scaling")
        written = None
    fallback = get.number("rope_local_base_freq", 1e4) if local else None
    if fallback is None:
        fallback = get.number("rope_theta", 1e6 if kind == "gemma3_text" else 1e4)
    theta = fallback if written is None else float(written)
    return theta, None if fields is None else _scaling(fields, get)


def _scaling(fields: Mapping[str, Any], get: Fields) -> RopeScaling | None:
    kind = fields.get("rope_type", fields.get("type", "default"))
    if fields.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("rope partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return None
    inner = Fields(f"{get.source}: rope scaling", fields, {})
    if kind == "linear":
        return RopeScaling("linear", factor=inner.number("factor"))
    context = inner.count("original_max_position_embeddings", get.count("max_position_embeddings"))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            factor=inner.number("factor"),
            original_context=context,
            low_freq_factor=inner.number("low_freq_factor"),
            high_freq_factor=inner.number("high_freq_factor"),
        )
    if kind == "yarn":
        return RopeScaling(
            "yarn",
            factor=inner.number("factor"),
            original_context=context,
            beta_fast=inner.number("beta_fast", 32.0),
            beta_slow=inner.number("beta_slow", 1.0),
            attention_factor=_sharpening(inner),
            truncate=bool(fields.get("truncate", True)),
        )
    raise ValueError(f"rope_type {kind!r} is not known: default, linear, llama3 and yarn are")


def _sharpening(fields: Fields) -> float | None:
    """Yarn's attention factor, where the file says it one way or the other."""
    if fields.get("attention_factor") is not None:
        return fields.number("attention_factor")
    if not (fields.get("mscale") and fields.get("mscale_all_dim")):
        return None
    grown = 0.1 * math.log(max(fields.number("factor"), 1.0))
    return (fields.number("mscale") * grown + 1) / (fields.number("mscale_all_dim") * grown + 1)
