"""A model that is ready to run: configuration, weights on device, tokenizer."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvjax.errors import KvjaxError
from kvjax.models import LayerConfig, ModelConfig, Tokenizer
from kvjax.models.checkpoint import Checkpoint, Params, build
from kvjax.spec import KVSpec, LayerSpec


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Model:
    """What `kvjax.load` returns and every entry point takes."""

    name: str  # for people
    config: ModelConfig
    graphdef: Any  # static; `nnx.merge(graphdef, params)` is the `Decoder`
    params: Params  # nested dicts of arrays
    tokenizer: Tokenizer | None  # None: prompts must be token ids
    dtype: str  # of the matrices, "float32" or "bfloat16"

    def __repr__(self) -> str:
        config = self.config
        return (
            f"Model({self.name!r}: {config.architecture}, {len(config.layers)} layers, "
            f"{config.max_context} tokens of context, {self.dtype})"
        )

    @property
    def spec(self) -> KVSpec:
        """What one token costs this model's cache, stored in the dtype of its matrices."""
        return kv_spec(self.config, self.dtype)


def kv_spec(config: ModelConfig, dtype: str, *, index_dtype: str | None = None) -> KVSpec:
    """What a model's cache stores.

    Args:
      config: the model's.
      dtype: of the stored keys and values, or latents.
      index_dtype: of the keys that an indexer chooses tokens by, if not `dtype`.
    """
    layers = [_layer_spec(layer) for layer in config.layers]
    if config.cross_from is not None:
        readers = len(layers) - config.cross_from - 1
        layers[config.cross_from + 1 :] = [LayerSpec.shared_with(config.cross_from)] * readers
    return KVSpec(tuple(layers), dtype, index_dtype)


def keeps_latents(config: ModelConfig) -> bool:
    """Whether a model's cache keeps latents, in every layer.

    Args:
      config: the model's.
    """
    return all(layer.latent is not None for layer in config.layers)


def check_own_keys(model: Model, what: str, instead: str) -> None:
    """Refuse a model in which some layers make no keys and values of their own.

    Args:
      model: the caller's.
      what: is of models whose layers all do, as a sentence about it begins.
      instead: what to do.

    Raises:
      KvjaxError: it has a cross-decoder.
    """
    first = model.config.cross_from
    if first is not None:
        raise KvjaxError(
            f"model is {model.name!r}, whose layers {first} to {len(model.config.layers) - 1} are "
            f"a cross-decoder and read keys and values that one of them makes: {what} a model "
            f"whose layers all make their own; {instead}"
        )


def _layer_spec(layer: LayerConfig) -> LayerSpec:
    if layer.latent is not None:
        indexer = layer.indexer
        return LayerSpec.mla(
            layer.latent.rank,
            layer.rope_dim,
            window=layer.window,
            index_dim=0 if indexer is None or indexer.shares else indexer.head_dim,
            top_tokens=None if indexer is None else indexer.top_k,
        )
    kv_heads, head_dim, value_dim = layer.num_kv_heads, layer.head_dim, layer.value_dim
    if layer.retention:
        return LayerSpec.retention(kv_heads, head_dim, value_dim)
    return LayerSpec.gqa(kv_heads, head_dim, value_dim, window=layer.window)


def from_checkpoint(checkpoint: Checkpoint, *, name: str, dtype: str = "float32") -> Model:
    """Put a checkpoint on the default device.

    Args:
      checkpoint: what a reader of `kvjax.models` returned.
      name: for people.
      dtype: of the matrices, "float32" or "bfloat16".

    Raises:
      ValueError: a weight is missing, misshapen or not finite, or the dtype is another.
    """
    graphdef, params = build(checkpoint, jnp.dtype(dtype))
    return Model(name, checkpoint.config, graphdef, params, checkpoint.tokenizer, dtype)
