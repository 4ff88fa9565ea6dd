"""A model as loaders hand it over, and its way onto devices."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.models.tokenizer import Tokenizer

Params = dict[str, Any]
"""A decoder's arrays as nested dicts, keyed like its attributes."""


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model's configuration, weights and tokenizer.

    `weights` maps flattened parameter names ("layers.0.attention.q.weight", [out, in]) to arrays
    of any floating dtype. `source` says where they came from, for error messages.
    """

    config: ModelConfig
    weights: Mapping[str, np.ndarray | jax.Array]
    tokenizer: Tokenizer | None = None
    source: str = "checkpoint"


@functools.lru_cache(maxsize=16)
def _structure(config: ModelConfig, dtype: np.dtype) -> tuple[Any, dict[str, jax.ShapeDtypeStruct]]:
    """A decoder's graph definition, and the shape and dtype of each parameter, by name."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype)))
    return graphdef, {
        ".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)
    }


def parameters(
    config: ModelConfig, dtype: DTypeLike = jnp.float32
) -> dict[str, jax.ShapeDtypeStruct]:
    """Every parameter by name: matrices in `dtype`; norms, biases and routers in float32."""
    return dict(_structure(config, np.dtype(dtype))[1])


def build(
    checkpoint: Checkpoint,
    dtype: DTypeLike = jnp.float32,
    *,
    shardings: Mapping[str, jax.sharding.Sharding] | None = None,
) -> tuple[Any, Params]:
    """Checks a checkpoint and puts it on the device.

    `nnx.merge(graphdef, params)`, inside or outside jit, is the `Decoder`. Params are plain nested
    dicts, so passing them to a jitted function costs little.

    Args:
        checkpoint: what a loader returned.
        dtype: of matrices: float32 or bfloat16. Norms, biases and routers stay float32.
        shardings: a sharding by parameter name; parameters without one go to the default device.

    Returns:
        The graph definition (static, hashable) and the parameters.

    Raises:
        ValueError: a weight is missing, unexpected, misshapen or not finite; it is named.
    """
    dtype = np.dtype(dtype)
    if dtype not in (np.dtype(jnp.float32), np.dtype(jnp.bfloat16)):
        raise ValueError(f"dtype={dtype} is not supported: use float32 or bfloat16")
    graphdef, expected = _structure(checkpoint.config, dtype)
    check_weights(checkpoint)
    params: dict[Any, Any] = {}
    for name, want in expected.items():
        weight = checkpoint.weights[name]
        # Straight to where it goes: no single device need hold a whole weight. A mapped file's
        # pages are copied, as they are slower to read than memory of our own.
        mine = isinstance(weight, jax.Array)
        value = jax.device_put(weight, (shardings or {}).get(name), may_alias=mine)
        _insert(params, name, value.astype(want.dtype))
    return graphdef, params


def _insert(params: dict[Any, Any], name: str, value: jax.Array) -> None:
    *path, last = name.split(".")
    for part in path:
        params = params.setdefault(int(part) if part.isdigit() else part, {})
    params[last] = value


def check_weights(checkpoint: Checkpoint) -> None:
    """Compares a checkpoint's weights with what its configuration calls for.

    Raises:
        ValueError: a weight is missing, unexpected, misshapen or not finite; it is named.
    """
    source, weights = checkpoint.source, checkpoint.weights
    expected = parameters(checkpoint.config)
    for name, want in expected.items():
        if name not in weights:
            raise ValueError(f"{source}: weight {name} {list(want.shape)} is missing")
        got = weights[name]
        if tuple(got.shape) != tuple(want.shape):
            raise ValueError(
                f"{source}: weight {name} has shape {list(got.shape)}, "
                f"the configuration calls for {list(want.shape)}"
            )
        if not jnp.issubdtype(got.dtype, jnp.floating):
            raise ValueError(f"{source}: weight {name} has dtype {got.dtype}, not a floating one")
        if not _finite(got):
            raise ValueError(
                f"{source}: weight {name} holds NaN or infinity; the file is damaged or was "
                "written by a failed training run: get it again"
            )
    for name in weights:
        if name not in expected:
            raise ValueError(
                f"{source}: weight {name} has no place in a {checkpoint.config.architecture} model "
                "of this configuration"
            )


def _finite(array: np.ndarray | jax.Array) -> bool:
    if isinstance(array, jax.Array):
        return bool(jnp.isfinite(array).all())
    if array.dtype == np.float32:
        # A sum is finite unless an element is not (or the sum overflows: then look closely);
        # it costs one pass and no temporary.
        with np.errstate(all="ignore"):
            if np.isfinite(array.sum(dtype=np.float32)):
                return True
    return bool(np.isfinite(array.astype(np.float32)).all())


def random_checkpoint(config: ModelConfig, seed: int = 0) -> Checkpoint:
    """Small random float32 weights for any configuration: for tests and benchmarks."""
    generator = np.random.default_rng(seed)
    weights: dict[str, np.ndarray | jax.Array] = {}
    for name, want in parameters(config).items():
        noise = generator.standard_normal(want.shape, np.float32)
        if "norm" in name:
            weights[name] = 1 + 0.1 * noise
        else:
            weights[name] = noise * np.float32(0.5 * want.shape[-1] ** -0.5)
    return Checkpoint(config, weights, None, "random weights")


def check_tokens(tokens: Sequence[int] | np.ndarray, vocab_size: int) -> None:
    """Refuses token ids a model does not have; call it before tracing.

    Raises:
        ValueError: an id is not an integer within 0..vocab_size-1; it is named with its index.
    """
    ids = np.asarray(tokens)
    if ids.size == 0:
        return
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"token ids must be integers, not {ids.dtype}")
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if wrong.size:
        first = int(wrong[0])
        raise ValueError(
            f"token id {int(ids.reshape(-1)[first])} at index {first} is outside the vocabulary: "
            f"ids are 0..{vocab_size - 1}"
        )
