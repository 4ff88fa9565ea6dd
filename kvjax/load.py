"""Opens a model that is already on this machine: a name in the local cache, or a path."""

import os
import pathlib
import shutil
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np

from kvjax.config import SHORT_DTYPES
from kvjax.errors import KvjaxError, ModelNotFoundError, as_kvjax_error
from kvjax.model import Model, from_checkpoint
from kvjax.models import (
    Checkpoint,
    GGUFFile,
    ModelConfig,
    gguf_config,
    gguf_tokenizer,
    gguf_weights,
    parameters,
    read,
)
from kvjax.pallas_kernels import target_platform
from kvjax.pallas_kernels.cpu_flags import cpu_multiplies_bfloat16
from kvjax.registry import MODELS, cache_root, is_hub_name, model_path, source_of
from kvjax.storage.files import sha256
from kvjax.storage.tensor_file import map_tensors, write_tensors

Progress = Callable[[str, float], None]
"""progress(phase, share): phases are "check", "weights" and "device"; share is 0 to 1."""

DType = Literal["auto", "float32", "bfloat16", "fp32", "bf16"]

_WEIGHTS_VERSION = 1  # raise it when a reader gives a weight another name, order or value
_UNQUANTIZED = ("F32", "F16", "BF16")


def load(
    name_or_path: str | pathlib.Path,
    *,
    dtype: DType = "auto",
    cache_dir: str | pathlib.Path | None = None,
    progress: Progress | None = None,
) -> Model:
    """Opens a model and puts its weights on the device. Downloads nothing.

    A quantized GGUF file is dequantized to float32 once; the result is kept in
    `cache_dir/weights` under the file's SHA-256 and mapped into memory the next time.

    Args:
      name_or_path: a name that `kvjax pull` fetched (`smollm2-135m`, `hf:ORG/NAME`), a GGUF file,
        a folder of Hugging Face safetensors, or a folder that `save_orbax` wrote. A folder that has
        a model's name is meant by `./NAME`, or by a `pathlib.Path`, which is never a name.
      dtype: of the matrices. "auto" is bfloat16 where the hardware multiplies it, else float32.
      cache_dir: the folder of kvjax's caches; None means the operating system's place.
      progress: see `Progress`.

    Raises:
      ModelNotFoundError: the model is not on this machine; the message says how to get it.
      KvjaxError: JAX has no device, `dtype` is none of these, or the path is no checkpoint, a
        damaged one, or one of a model that kvjax does not run.
    """
    devices()
    matrices = resolve_dtype(dtype)
    path, name = _locate(name_or_path, cache_dir)
    report = progress or (lambda phase, share: None)
    with as_kvjax_error():
        if path.is_dir():
            report("weights", 0.0)
            checkpoint = read(path)
            report("weights", 1.0)
        else:
            checkpoint = _read_gguf(path, cache_root(cache_dir) / "weights", report)
        report("device", 0.0)
        model = from_checkpoint(checkpoint, name=name, dtype=matrices)
    report("device", 1.0)
    return model


def devices() -> list[jax.Device]:
    """JAX's devices.

    Raises:
      KvjaxError: it has none on the platform that was asked for.
    """
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter for what has no plugin at all
        settings: Any = jax.config  # its attributes are made at run time
        reason = str(error).partition("\n")[0]
        raise KvjaxError(
            f"JAX has no device on the platforms {settings.jax_platforms!r} here"
            f"{f' ({reason})' if reason else ''}: install its support for them, or set "
            f"JAX_PLATFORMS=cpu"
        ) from error


def resolve_dtype(dtype: str) -> str:
    """The dtype of matrices that "auto" or a short name stands for on this machine.

    Raises:
      KvjaxError: `dtype` is not "auto", "float32", "bfloat16" or short for one of them.
    """
    dtype = SHORT_DTYPES.get(dtype, dtype)
    if dtype not in ("auto", "float32", "bfloat16"):
        raise KvjaxError(f"dtype is {dtype!r}: must be 'auto', 'float32' or 'bfloat16'")
    if dtype != "auto":
        return dtype
    if target_platform() != "cpu":
        return "bfloat16"
    return "bfloat16" if cpu_multiplies_bfloat16() else "float32"


def _locate(
    name_or_path: str | pathlib.Path, cache_dir: str | pathlib.Path | None
) -> tuple[pathlib.Path, str]:
    """Where a model lies, and what to call it."""
    if not isinstance(name_or_path, str | os.PathLike) or not str(name_or_path):
        raise KvjaxError(
            f"name_or_path is {name_or_path!r}: must be a model's name, such as 'smollm2-135m', or "
            f"a path"
        )
    name = str(name_or_path)
    if isinstance(name_or_path, str) and (name in MODELS or is_hub_name(name)):
        path = model_path(name, cache_dir)
        if not path.exists():
            raise ModelNotFoundError(
                f"{name} is not in {path.parent}: `kvjax pull {name}` fetches it"
            )
        return path, name
    path = pathlib.Path(name_or_path).expanduser()
    if path.exists():
        return path, path.stem if path.is_file() else path.name
    if isinstance(name_or_path, str) and not path.suffix and path.name == name:
        source_of(name)  # raises: it knows the names, and which one is close
    raise ModelNotFoundError(f"there is no file or folder {name}; names: {', '.join(MODELS)}")


def _read_gguf(path: pathlib.Path, weights: pathlib.Path, report: Progress) -> Checkpoint:
    report("check", 0.0)
    file = GGUFFile(path)
    config = gguf_config(file)
    tokenizer = gguf_tokenizer(file)
    if all(entry.kind.name in _UNQUANTIZED for entry in file.tensors.values()):
        report("weights", 0.0)
        arrays = gguf_weights(file, config)
    else:
        digest = sha256(path, lambda done, total: report("check", done / total))
        report("weights", 0.0)
        arrays = _dequantized(file, config, weights / f"{digest}.{_WEIGHTS_VERSION}.safetensors")
    report("weights", 1.0)
    return Checkpoint(config, arrays, tokenizer, str(path))


def _dequantized(
    file: GGUFFile, config: ModelConfig, cached: pathlib.Path
) -> dict[str, np.ndarray]:
    """A quantized file's weights in float32: mapped from the cache, or computed and put there."""
    expected = {
        name: (want.shape, np.dtype(np.float32)) for name, want in parameters(config).items()
    }
    try:
        arrays = map_tensors(cached)
        found = {name: (array.shape, array.dtype) for name, array in arrays.items()}
        if found == expected:
            return arrays
        raise ValueError(f"{cached} holds other tensors than the model has")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        warnings.warn(f"{error}; it is a cache and is written anew", stacklevel=4)
    arrays = gguf_weights(file, config)
    _keep(arrays, cached)
    return arrays


def _keep(arrays: dict[str, np.ndarray], cached: pathlib.Path) -> None:
    """Writes the cache; a disk that cannot hold it costs the next load some time, not this one."""
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        size = sum(array.nbytes for array in arrays.values())
        free = shutil.disk_usage(cached.parent).free
        if free < 2 * size:  # never the program that fills a disk
            raise OSError(f"{size / 1e6:.0f} MB of {free / 1e6:.0f} MB free")
        write_tensors(cached, arrays)
    except OSError as error:
        warnings.warn(
            f"the dequantized weights were not kept in {cached.parent} ({error}), so the next "
            "load will take as long",
            stacklevel=5,
        )
