"""What a decoder is made of: static facts, hashable, equal when the models are alike."""

import dataclasses
import math
from typing import Any, Literal

from kvjax.models.deepseek import Experts, Latent
from kvjax.models.deepseek_sparse import Indexer, check_sharing

RopeKind = Literal["linear", "llama3", "yarn", "factors"]
Activation = Literal["silu", "gelu_tanh"]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched past the context a model was trained on.

    `linear` divides every frequency by `factor` (position interpolation); `llama3` leaves high
    frequencies alone and divides low ones; `yarn` (arXiv:2309.00071, section 3.2) interpolates by
    the number of rotations within the original context and sharpens attention; `factors` divides
    frequency i by `factors[i]` (what GGUF files of Llama 3.1 carry).
    """

    kind: RopeKind
    factor: float = 1.0  # how many times longer the context becomes
    original_context: int = 0  # tokens, for llama3 and yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn, rotations
    beta_slow: float = 1.0  # yarn, rotations
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    factors: tuple[float, ...] = ()  # factors, one a frequency

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3", "yarn", "factors"):
            raise ValueError(
                f"rope scaling kind={self.kind!r} is not known: use linear, llama3, yarn or factors"
            )
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ValueError(f"rope scaling factor={self.factor} must be a positive number")
        if self.kind in ("llama3", "yarn") and self.original_context < 1:
            raise ValueError(
                f"rope scaling {self.kind} needs original_context >= 1 (tokens), "
                f"not {self.original_context}"
            )
        if self.kind == "factors" and not all(f > 0 and math.isfinite(f) for f in self.factors):
            raise ValueError(f"rope factors must be positive numbers, not {self.factors}")


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """One layer's attention: what its cache must hold and what its queries may see."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None  # a query sees the last `window` tokens, itself included
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    latent: Latent | None = None  # None: keys and values are projected directly
    indexer: Indexer | None = None  # None: a query attends to all tokens that it sees
    retention: bool = False  # gated retention: a state takes the place of keys and values

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.retention:
            self._check_retention()
        if self.indexer is not None:
            self._check_indexer(self.indexer)
        if self.latent is not None:
            if self.num_heads != self.num_kv_heads:
                raise ValueError(
                    f"num_kv_heads={self.num_kv_heads} must be num_heads={self.num_heads}: "
                    "of a latent a key and a value are made for every head"
                )
            if self.window is not None:
                raise ValueError(
                    f"window={self.window} must be None: a layer with a latent sees all"
                )
            if self.rope_dim >= self.head_dim:
                raise ValueError(f"rope_dim={self.rope_dim} must be below head_dim={self.head_dim}")
        elif self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE turns pairs")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1 token, or None for all")
        if not (math.isfinite(self.rope_theta) and self.rope_theta > 1):
            raise ValueError(f"rope_theta={self.rope_theta} must be above 1")
        scaling = self.rope_scaling
        count = None if scaling is None or scaling.kind != "factors" else len(scaling.factors)
        if count not in (None, self.rope_dim // 2):
            raise ValueError(
                f"rope factors hold {count} numbers, "
                f"head_dim={self.rope_dim} needs {self.rope_dim // 2}"
            )

    def _check_retention(self) -> None:
        if self.num_heads != self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} must be num_heads={self.num_heads}: each head "
                "of a layer of gated retention has a state of its own"
            )
        for name in ("window", "latent", "indexer"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be None: gated retention has none"
                )

    def _check_indexer(self, indexer: Indexer) -> None:
        if self.latent is None:
            raise ValueError("indexer: a layer that has one must have a latent")
        if self.latent.query_rank is None and not indexer.shares:
            raise ValueError(
                "indexer: query_rank=None must be a number: index queries are made of latents of "
                "queries"
            )
        if indexer.head_dim < self.rope_dim:
            raise ValueError(
                f"indexer: head_dim={indexer.head_dim} must be at least rope_dim={self.rope_dim}"
            )

    @property
    def rope_dim(self) -> int:
        """Elements of a query and a key that are rotated: the last ones."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        """Elements of one head's value."""
        return self.head_dim if self.latent is None else self.latent.value_dim


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder, up to its weights."""

    architecture: str  # llama, mistral, qwen2, qwen3, gemma3, deepseek_v2 ...: for people
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerConfig, ...]
    max_context: int  # tokens the model was made for
    norm_eps: float = 1e-5
    tie_embeddings: bool = False  # the LM head is the embedding table
    attn_scale: float | None = None  # None: head_dim ** -0.5
    attn_soft_cap: float | None = None  # scores become c * tanh(score / c)
    final_soft_cap: float | None = None  # the same for logits
    qkv_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each query's and key's head_dim, before RoPE
    embed_scale: float | None = None  # embeddings are multiplied by it
    post_norms: bool = False  # RMSNorm after attention and after the MLP, before the residual sum
    activation: Activation = "silu"
    experts: Experts | None = None  # None: every layer has one MLP
    cross_from: int | None = None  # first layer of a cross-decoder (YOCO); None: there is none

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "max_context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.layers:
            raise ValueError("layers=() is empty: a decoder needs at least one layer")
        if not self.norm_eps > 0:
            raise ValueError(f"norm_eps={self.norm_eps} must be positive")
        for name in ("attn_scale", "attn_soft_cap", "final_soft_cap", "embed_scale"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value} must be positive, or None")
        if self.activation not in ("silu", "gelu_tanh"):
            raise ValueError(f"activation={self.activation!r} is not known: use silu or gelu_tanh")
        if (self.qkv_bias or self.qk_norm) and any(layer.latent for layer in self.layers):
            raise ValueError(
                f"qkv_bias={self.qkv_bias} and qk_norm={self.qk_norm} must be False: layers with a "
                "latent have neither"
            )
        if self.attn_soft_cap is not None and any(layer.latent for layer in self.layers):
            raise ValueError(
                f"attn_soft_cap={self.attn_soft_cap} must be None: layers with a latent have none"
            )
        check_sharing(tuple(layer.indexer for layer in self.layers))
        for index, layer in enumerate(self.layers):
            if layer.retention and index >= (self.cross_from or 0):
                raise ValueError(
                    f"layer {index} is of gated retention and cross_from={self.cross_from}: only "
                    "layers of a self-decoder, those before cross_from, may be"
                )
        if self.cross_from is not None:
            self._check_cross(self.cross_from)
        if self.experts is not None and not {*self.experts.layers} <= {*range(len(self.layers))}:
            raise ValueError(
                f"experts: layers={self.experts.layers} must be among 0..{len(self.layers) - 1}"
            )

    def _check_cross(self, first: int) -> None:
        depth = len(self.layers)
        if not 1 <= first < depth:
            raise ValueError(
                f"cross_from={first} must be 1..{depth - 1}: the layers before it make what those "
                f"of the cross-decoder read"
            )
        if self.qkv_bias or self.qk_norm or self.attn_soft_cap is not None:
            raise ValueError(
                f"qkv_bias={self.qkv_bias}, qk_norm={self.qk_norm} and attn_soft_cap="
                f"{self.attn_soft_cap} must be False, False and None: cross-decoders have none"
            )
        for index, layer in enumerate(self.layers):
            if layer.latent is not None:
                raise ValueError(f"layer {index} has a latent and cross_from={first}: use one")
        for index, layer in enumerate(self.layers[first:], first):
            if layer.window is not None:
                raise ValueError(
                    f"layer {index}: window={layer.window} must be None: layers from "
                    f"cross_from={first} on see all tokens"
                )
            if dataclasses.replace(layer, num_heads=layer.num_kv_heads) != dataclasses.replace(
                self.layers[first], num_heads=self.layers[first].num_kv_heads
            ):
                raise ValueError(
                    f"layer {index} is {layer}: from cross_from={first} on, keys and values are "
                    f"those of that layer, so all but num_heads must be as in {self.layers[first]}"
                )

    def scale(self, layer: int) -> float:
        """What layer `layer`'s attention scores are multiplied by."""
        if self.attn_scale is not None:
            return self.attn_scale
        return float(self.layers[layer].head_dim ** -0.5)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, as JSON can hold them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "ModelConfig":
        """The inverse of `to_dict`.

        Raises:
            ValueError: a field is missing, unknown or out of range.
        """
        try:
            layers = []
            for layer in fields["layers"]:
                scaling = layer.get("rope_scaling")
                if scaling is not None:
                    scaling = RopeScaling(**{**scaling, "factors": tuple(scaling["factors"])})
                latent = layer.get("latent")
                latent = None if latent is None else Latent(**latent)
                indexer = layer.get("indexer")
                indexer = None if indexer is None else Indexer(**indexer)
                made = {"rope_scaling": scaling, "latent": latent, "indexer": indexer}
                layers.append(LayerConfig(**{**layer, **made}))
            experts = fields.get("experts")
            if experts is not None:
                experts = Experts(**{**experts, "layers": tuple(experts["layers"])})
            return cls(**{**fields, "layers": tuple(layers), "experts": experts})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a stored ModelConfig: {error}") from error
