"""GGUF's names and metadata keys, in this package's terms."""

import re
from collections.abc import Iterable

import numpy as np

from kvjax.models.config import LayerConfig, ModelConfig, RopeScaling
from kvjax.models.gguf_file import GGUFFile

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
"""`general.architecture` values read here; Mistral files call themselves llama."""

_PERMUTED = ("llama",)  # files whose query and key rows are interleaved pairs

_GEMMA3_GLOBAL_EVERY = 6  # layers 5, 11, 17, ...; not in the file
_GEMMA3_LOCAL_THETA = 10_000.0  # not in the file either
_GEMMA3_27B_LAYERS = 62  # the one size whose scale is (hidden / heads) ** -0.5

_WHOLE = {
    "token_embd.weight": "embed.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "head.weight",
}
_BLOCK = {
    "attn_norm": "attention_norm",
    "attn_q": "attention.q",
    "attn_k": "attention.k",
    "attn_v": "attention.v",
    "attn_output": "attention.o",
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "post_attention_norm": "attention_post_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
    "post_ffw_norm": "mlp_post_norm",
}
_ROPE_FACTORS = "rope_freqs.weight"


def weight_name(tensor: str) -> str | None:
    """This package's name of a GGUF tensor, or None if it is not a weight of a known kind."""
    if tensor in _WHOLE:
        return _WHOLE[tensor]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", tensor)
    if match is None or match[2] not in _BLOCK:
        return None
    return f"layers.{match[1]}.{_BLOCK[match[2]]}.{match[3]}"


def weight_names(file: GGUFFile) -> dict[str, str]:
    """This package's name of every weight in a file, and the tensor that holds it.

    Raises:
        ValueError: a tensor is of no known kind.
    """
    names = {}
    for tensor in file.tensors:
        if tensor == _ROPE_FACTORS:
            continue  # part of the configuration
        name = weight_name(tensor)
        if name is None:
            raise ValueError(
                f"{file.path}: tensor {tensor} is of no kind known here; the file holds a model "
                f"that differs from the {', '.join(ARCHITECTURES)} ones kvjax runs"
            )
        names[name] = tensor
    return names


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undoes the interleaving of query and key rows in llama files.

    llama.cpp turns neighbouring pairs of a head's rows, this package pair (i, i + D/2).
    """
    half = rows.shape[0] // heads // 2
    pairs = rows.reshape(heads, half, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def heads_to_unpermute(config: ModelConfig, name: str) -> int | None:
    """How many heads a weight's rows are interleaved in; None if they are in order."""
    if config.architecture not in _PERMUTED:
        return None
    match = re.fullmatch(r"layers\.(\d+)\.attention\.([qk])\.(weight|bias)", name)
    if match is None or int(match[1]) >= len(config.layers):
        return None  # a layer the configuration lacks is refused when the model is built
    layer = config.layers[int(match[1])]
    return layer.num_heads if match[2] == "q" else layer.num_kv_heads


class _Metadata:
    """Typed access to one file's metadata under its architecture's prefix."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._file, self._prefix = file, architecture

    def number(self, key: str, default: float | None = None) -> float:
        name = f"{self._prefix}.{key}"
        value = self._file.metadata.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            found = "is missing" if value is None else f"is {value!r}, not a number"
            raise ValueError(f"{self._file.path}: metadata {name} {found}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value) or value < 0:
            raise ValueError(
                f"{self._file.path}: metadata {self._prefix}.{key} is {value}, not a count"
            )
        return int(value)

    def counts(self, key: str, layers: int, default: int | None = None) -> list[int]:
        value = self._file.metadata.get(f"{self._prefix}.{key}")
        if not isinstance(value, list):
            return [self.count(key, default)] * layers
        if len(value) != layers or not all(isinstance(v, int) for v in value):
            raise ValueError(
                f"{self._file.path}: metadata {self._prefix}.{key} holds {len(value)} values, "
                f"expected one integer for each of {layers} layers"
            )
        return value

    def text(self, key: str) -> str | None:
        value = self._file.metadata.get(f"{self._prefix}.{key}")
        return value if isinstance(value, str) else None


def model_config(file: GGUFFile) -> ModelConfig:
    """The configuration a file's metadata and tensor shapes describe.

    Raises:
        ValueError: its architecture is not known, or a field is missing or out of range.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{file.path}: metadata general.architecture is {architecture!r}; "
            f"kvjax reads {', '.join(ARCHITECTURES)}"
        )
    try:
        return _model_config(file, architecture, _Metadata(file, architecture))
    except ValueError as error:
        if str(file.path) in str(error):
            raise
        raise ValueError(f"{file.path}: {error}") from error


def _model_config(file: GGUFFile, architecture: str, get: _Metadata) -> ModelConfig:
    depth, size = get.count("block_count"), get.count("embedding_length")
    if depth > len(file.tensors):  # before a damaged count makes as many layers
        raise ValueError(
            f"metadata {architecture}.block_count is {depth}, "
            f"the file has {len(file.tensors)} tensors"
        )
    heads = get.counts("attention.head_count", depth)
    kv_heads = (
        get.counts("attention.head_count_kv", depth)
        if f"{architecture}.attention.head_count_kv" in file.metadata
        else heads
    )
    if not heads or min(heads) < 1:
        raise ValueError(f"metadata {architecture}.attention.head_count is {heads}")
    head_dim = get.count("attention.key_length", size // heads[0])
    for key in ("attention.value_length", "rope.dimension_count"):
        if get.count(key, head_dim) != head_dim:
            raise ValueError(
                f"metadata {architecture}.{key} is {get.count(key)}, only {head_dim} "
                "(attention.key_length) is supported"
            )
    gemma = architecture == "gemma3"
    theta = get.number("rope.freq_base", 1e6 if gemma else 1e4)
    scaling = _rope_scaling(file, get)
    window = get.count("attention.sliding_window", 0) or None
    layers = []
    for index in range(depth):
        local = gemma and (index + 1) % _GEMMA3_GLOBAL_EVERY != 0
        layers.append(
            LayerConfig(
                num_heads=heads[index],
                num_kv_heads=kv_heads[index],
                head_dim=head_dim,
                window=window if local or not gemma else None,
                rope_theta=_GEMMA3_LOCAL_THETA if local else theta,
                rope_scaling=None if local else scaling,
            )
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError("tensor token_embd.weight [vocabulary, hidden] is missing")
    attn_scale = None
    if gemma and depth == _GEMMA3_27B_LAYERS:
        attn_scale = (size / heads[0]) ** -0.5
    return ModelConfig(
        architecture=architecture,
        vocab_size=embedding.shape[0],
        hidden_size=size,
        intermediate_size=get.count("feed_forward_length"),
        layers=tuple(layers),
        max_context=get.count("context_length"),
        norm_eps=get.number("attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in file.tensors,
        attn_scale=attn_scale,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm=architecture in ("qwen3", "gemma3"),
        embed_scale=size**0.5 if gemma else None,
        post_norms=gemma,
        activation="gelu_tanh" if gemma else "silu",
    )


def _rope_scaling(file: GGUFFile, get: _Metadata) -> RopeScaling | None:
    if _ROPE_FACTORS in file.tensors:
        factors: Iterable[float] = file.tensor(_ROPE_FACTORS).tolist()
        return RopeScaling("factors", factors=tuple(factors))
    kind = get.text("rope.scaling.type")
    if kind in (None, "none"):
        return None
    factor = get.number("rope.scaling.factor", 1.0)
    if kind == "linear":
        return RopeScaling("linear", factor=factor)
    if kind == "yarn":
        return RopeScaling(
            "yarn",
            factor=factor,
            original_context=get.count("rope.scaling.original_context_length"),
        )
    raise ValueError(f"metadata rope.scaling.type is {kind!r}; none, linear and yarn are known")
