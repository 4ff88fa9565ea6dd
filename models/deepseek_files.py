"""DeepSeek's part of a Hugging Face `config.json`."""

import math
from collections.abc import Mapping
from typing import Any

from kvjax.models.deepseek import Experts, Latent
from kvjax.models.deepseek_sparse import Indexer
from kvjax.models.hf_fields import Fields

_V3: dict[str, Any] = {
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
}
_INDEXER = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
DEEPSEEK_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_method": "greedy",
    },
    "deepseek_v3": _V3,
    "deepseek_v32": _V3 | _INDEXER,
    "glm_moe_dsa": _V3 | _INDEXER | {"index_n_heads": 32, "n_group": 1, "topk_group": 1},
}
"""What is taken for granted where a field is absent, by `model_type`."""

_SCORES = ("softmax", "sigmoid")
_ROUTINGS = ("greedy", "group_limited_greedy", "noaux_tc")


def check_deepseek(kind: Any, fields: Mapping[str, Any], source: str) -> None:
    """Refuses a lightning indexer in a model whose type has none.

    Args:
        kind: `model_type`.
        fields: the parsed `config.json`.
        source: its path, for error messages.

    Raises:
        ValueError: there is one.
    """
    indexer = [f"{key}={fields[key]!r}" for key in _INDEXER if fields.get(key)]
    if kind in ("deepseek_v2", "deepseek_v3") and indexer:
        raise ValueError(
            f"{source}: model_type is {kind!r} with {', '.join(indexer)}: DeepSeek V2 and V3 have "
            "no lightning indexer; the type of V3.2, which has one, is 'deepseek_v32'"
        )


def latent_of(get: Fields) -> tuple[Latent, int]:
    """The latents that keys and values, and queries, are made from; and a head's elements."""
    heads = get.count("num_attention_heads")
    if get.count("num_key_value_heads", heads) != heads:
        raise ValueError(
            f"num_key_value_heads={get.count('num_key_value_heads')} must be "
            f"num_attention_heads={heads}: every head has its own key and value"
        )
    if not get.given("q_lora_rank"):
        raise ValueError("q_lora_rank is missing: null says that queries have no latent")
    latent = Latent(
        rank=get.count("kv_lora_rank"),
        rope_dim=get.count("qk_rope_head_dim"),
        value_dim=get.count("v_head_dim"),
        query_rank=None if get.get("q_lora_rank") is None else get.count("q_lora_rank"),
        interleaved=get.flag("rope_interleave", True),
    )
    return latent, get.count("qk_nope_head_dim") + latent.rope_dim


def indexers_of(get: Fields, depth: int) -> tuple[Indexer | None, ...]:
    """What chooses the tokens that each of `depth` layers attends to; all None before V3.2.

    GLM-5's layers may share a choice (`indexer_types`, or what it is derived from), and its index
    queries and keys are rotated in interleaved pairs, DeepSeek's in halves.
    """
    kind = get.get("model_type")
    if not get.get("index_topk"):
        return (None,) * depth
    heads, dim, top = (get.count(name) for name in _INDEXER)
    shared = _sharing(get, depth) if kind == "glm_moe_dsa" else (False,) * depth
    return tuple(Indexer(heads, dim, top, kind == "glm_moe_dsa", shares) for shares in shared)


def _sharing(get: Fields, depth: int) -> tuple[bool, ...]:
    types = get.get("indexer_types", get.get("index_topk_pattern"))
    if types is None:
        every, offset = get.count("index_topk_freq", 1), get.count("index_skip_topk_offset", 2)
        if every < 1:
            raise ValueError(f"index_topk_freq={every} must be at least 1")
        return tuple(max(i - offset + 1, 0) % every != 0 for i in range(depth))
    names = {"F": "full", "S": "shared"}
    types = [names.get(one, one) for one in types]
    if len(types) != depth or not {*types} <= {"full", "shared"}:
        raise ValueError(
            f"indexer_types is {types}; expected full or shared for each of {depth} layers"
        )
    return tuple(one == "shared" for one in types)


def attention_scale(get: Fields, head_dim: int) -> float:
    """1 / sqrt(head_dim); where RoPE is stretched, times the square of what yarn sharpens by.

    Yarn as others apply it multiplies cosines and sines. Only a part of a key is rotated here, so
    the whole score is multiplied instead, and cosines and sines by mscale's ratio to
    mscale_all_dim, which is 1 in released models.
    """
    scale = float(head_dim**-0.5)
    rope = get.get("rope_parameters", get.get("rope_scaling"))
    if not isinstance(rope, Mapping):
        return scale
    inner = Fields(f"{get.source}: rope scaling", rope, {})
    whole, part = inner.number("mscale_all_dim", 0.0), inner.number("mscale", 0.0)
    if bool(whole) != bool(part):
        raise ValueError(
            f"rope scaling has mscale={part} and mscale_all_dim={whole}: give both or neither; "
            "what one means without the other is not agreed on"
        )
    if not whole:
        return scale
    return scale * (0.1 * whole * math.log(max(inner.number("factor"), 1.0)) + 1.0) ** 2


def experts_of(get: Fields, depth: int) -> Experts | None:
    """The experts, if any of `depth` layers has some."""
    every = get.count("moe_layer_freq", 1)
    if every < 1:
        raise ValueError(f"moe_layer_freq={every} must be at least 1")
    first = get.count("first_k_dense_replace")
    layers = tuple(index for index in range(depth) if index >= first and index % every == 0)
    types = get.get("mlp_layer_types")
    if types is not None:
        if len(types) != depth or not {*types} <= {"dense", "sparse"}:
            raise ValueError(
                f"mlp_layer_types is {types}; expected dense or sparse for each of {depth} layers"
            )
        layers = tuple(index for index in range(depth) if types[index] == "sparse")
    if not layers or (get.given("n_routed_experts") and get.get("n_routed_experts") is None):
        return None
    scores, routing = get.get("scoring_func"), get.get("topk_method")
    if scores not in _SCORES:
        raise ValueError(f"scoring_func is {scores!r}, not one of {', '.join(_SCORES)}")
    if routing not in _ROUTINGS:
        raise ValueError(f"topk_method is {routing!r}, not one of {', '.join(_ROUTINGS)}")
    grouped = routing != "greedy"
    normalize, scale = get.flag("norm_topk_prob"), get.number("routed_scaling_factor")
    if get.get("model_type") == "deepseek_v2" and normalize and scale != 1:
        raise ValueError(
            f"norm_topk_prob=True with routed_scaling_factor={scale} is not supported for "
            "deepseek_v2: it is not agreed on whether weights that are normalised are scaled too"
        )
    size = get.count("moe_intermediate_size")
    return Experts(
        layers=layers,
        count=get.count("n_routed_experts"),
        chosen=get.count("num_experts_per_tok"),
        size=size,
        shared_size=get.count("n_shared_experts", 0) * size,
        scores=scores,
        routing=routing,
        groups=get.count("n_group", 1) if grouped else 1,
        chosen_groups=get.count("topk_group", 1) if grouped else 1,
        normalize=normalize,
        scale=scale,
    )
