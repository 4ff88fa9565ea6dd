"""A model with keys and values as one with latents: nothing is made smaller yet.

Pairs that stay rotated become the rotated part that all heads share; the others, not rotated any
more, and the values become the latent. With all pairs rotated the model is the same one.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Complex128, Float64, Int64

from kvjax.convert.pairs import Pairs
from kvjax.models import Checkpoint, Latent, LayerConfig, ModelConfig, RopeScaling
from kvjax.models.rope import frequencies

Weights = dict[str, np.ndarray]


def separated(
    checkpoint: Checkpoint,
    pairs: Sequence[Pairs],
    rotated: Sequence[Int64[np.ndarray, "n 2"]],
) -> Checkpoint:
    """The checkpoint of a model with latents of as many elements as are stored now.

    Args:
      checkpoint: of a model without latents, windows or norms of queries and keys.
      pairs: one a layer.
      rotated: one a layer, which of them stay rotated, as (frequency, mixed pair).
    """
    config = checkpoint.config
    weights: dict[str, np.ndarray] = {}
    for name, value in checkpoint.weights.items():
        if ".attention.q." in name or ".attention.k." in name or ".attention.v." in name:
            continue
        weights[name] = np.asarray(value)
    layers, scale = [], _scale(config, 0)
    for index, (layer, mixed, stay) in enumerate(zip(config.layers, pairs, rotated, strict=True)):
        own = {
            name: _rows(checkpoint.weights, f"layers.{index}.attention.{name}") for name in "qkv"
        }
        own["q"] = own["q"] * (_scale(config, index) / scale)
        made = _Layer(layer, mixed, stay).weights(own)
        weights |= {f"layers.{index}.attention.{name}": value for name, value in made.items()}
        layers.append(_with_latent(layer, stay))
    return Checkpoint(
        dataclasses.replace(config, layers=tuple(layers), qkv_bias=False, attn_scale=scale),
        weights,
        checkpoint.tokenizer,
        checkpoint.source,
    )


def _scale(config: ModelConfig, layer: int) -> float:
    """What scores are multiplied by, with what yarn multiplies both sides by."""
    sharpen = frequencies(config.layers[layer])[1]
    return config.scale(layer) * sharpen**2


def _rows(weights: Mapping[str, Any], name: str) -> Float64[np.ndarray, "O I1"]:
    """A projection's rows, each with its bias (0 if there is none) behind it."""
    matrix = np.asarray(weights[f"{name}.weight"], np.float64)
    bias = weights.get(f"{name}.bias", np.zeros(len(matrix)))
    return np.concatenate([matrix, np.asarray(bias, np.float64)[:, None]], axis=1)


def _with_latent(layer: LayerConfig, stay: Int64[np.ndarray, "n 2"]) -> LayerConfig:
    rope_dim = 2 * len(stay)
    radians = frequencies(layer)[0].astype(np.float64)[stay[:, 0]]
    plain = layer.rope_theta ** (-np.arange(len(stay), dtype=np.float64) / len(stay))
    stored = 2 * layer.num_kv_heads * layer.head_dim
    return LayerConfig(
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_heads,
        head_dim=layer.head_dim + rope_dim,
        rope_theta=layer.rope_theta,
        rope_scaling=RopeScaling("factors", factors=tuple((plain / radians).tolist())),
        latent=Latent(
            rank=stored - rope_dim,
            rope_dim=rope_dim,
            value_dim=layer.head_dim,
            interleaved=False,
            normalized=False,
            biases=True,
        ),
    )


@dataclasses.dataclass(frozen=True)
class _Layer:
    """One layer's projections, from rows [out, in + 1] whose last column is the bias."""

    layer: LayerConfig
    pairs: Pairs
    stay: Int64[np.ndarray, "n 2"]

    def weights(self, own: Weights) -> Weights:
        """Every parameter of `LatentAttention` but `o`, in float32."""
        heads, groups, dim = self.layer.num_heads, self.layer.num_kv_heads, self.layer.head_dim
        group = np.arange(heads) // (heads // groups)
        keys = _as_pairs(own["k"].reshape(groups, dim, -1))
        mixed = np.einsum("fjg,gfi->fji", self.pairs.mix, keys)
        queries = own["q"].reshape(heads, dim, -1)
        unmixed = self.pairs.unmix[:, group]  # [half, H, G]
        frequency, pair = self.stay.T
        seen = unmixed[frequency, :, pair].conj()  # [n, H]
        q_rope = np.einsum("nh,hni->hni", seen, _as_pairs(queries)[:, frequency])
        gone = np.ones(self.pairs.lost.shape, bool)
        gone[frequency, pair] = False
        still = mixed[gone].copy()
        still[:, -1] = 0  # the same for every token: it changes no difference of scores
        values = own["v"].copy()
        bias = values[:, -1].reshape(groups, dim)[group]
        values[:, -1] = 0
        down = np.concatenate([still.real, still.imag, values, _as_rows(mixed[frequency, pair])])
        q = np.concatenate([queries, _as_rows(q_rope, axis=1)], axis=1).reshape(-1, down.shape[1])
        rank = down.shape[0] - 2 * len(self.stay)
        made = {
            "q.weight": q[:, :-1],
            "q.bias": q[:, -1],
            "kv_down.weight": down[:, :-1],
            "kv_down.bias": down[:, -1],
            "k_up.weight": self._k_up(gone, unmixed, rank).reshape(-1, rank),
            "v_up.weight": self._v_up(group, rank).reshape(-1, rank),
            "v_up.bias": bias.reshape(-1),
        }
        return {name: np.ascontiguousarray(value, np.float32) for name, value in made.items()}

    def _k_up(
        self,
        gone: np.ndarray,
        unmixed: Complex128[np.ndarray, "half H G"],
        rank: int,
    ) -> Float64[np.ndarray, "H D R"]:
        """Of conj(q) u y, with u a complex number: what y's two elements are to each of q's."""
        heads, dim = self.layer.num_heads, self.layer.head_dim
        frequency, pair = np.nonzero(gone)
        factor = self.pairs.turn[:, frequency, pair] * unmixed[frequency, :, pair].T  # [H, n]
        result = np.zeros((heads, dim, rank))
        first, second = frequency, frequency + dim // 2
        real = np.arange(len(frequency))
        imaginary = len(frequency) + real
        result[:, first, real], result[:, first, imaginary] = factor.real, -factor.imag
        result[:, second, real], result[:, second, imaginary] = factor.imag, factor.real
        return result

    def _v_up(self, group: np.ndarray, rank: int) -> Float64[np.ndarray, "H D R"]:
        """Each head's values are those of its group, the last elements of the latent."""
        heads, dim, groups = self.layer.num_heads, self.layer.head_dim, self.layer.num_kv_heads
        result = np.zeros((heads, dim, rank))
        first = rank - groups * dim
        for head in range(heads):
            start = first + group[head] * dim
            result[head, :, start : start + dim] = np.eye(dim)
        return result


def _as_pairs(rows: Float64[np.ndarray, "N D I1"]) -> Complex128[np.ndarray, "N half I1"]:
    """Element i and element i + D/2 of each head as one complex number."""
    first, second = np.split(rows, 2, axis=1)
    return first + 1j * second


def _as_rows(pairs: Complex128[np.ndarray, "..."], axis: int = 0) -> Float64[np.ndarray, "..."]:
    """The inverse of `_as_pairs` along an axis."""
    return np.concatenate([pairs.real, pairs.imag], axis=axis)
