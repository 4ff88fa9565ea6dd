"""A GGUF file as a checkpoint."""

import concurrent.futures
import os
import pathlib

import numpy as np

from kvjax.models.checkpoint import Checkpoint
from kvjax.models.config import ModelConfig
from kvjax.models.gguf_file import GGUFFile
from kvjax.models.gguf_names import heads_to_unpermute, model_config, unpermute, weight_names
from kvjax.models.gguf_tokenizer import gguf_tokenizer


def read_gguf(path: str | pathlib.Path) -> Checkpoint:
    """Reads a GGUF file: configuration, weights dequantized to float32, tokenizer.

    Raises:
        ValueError: the file is damaged or holds a model kvjax does not run; it says which field.
        FileNotFoundError: there is no such file.
    """
    file = GGUFFile(path)
    config = model_config(file)
    return Checkpoint(config, gguf_weights(file, config), gguf_tokenizer(file), str(path))


def gguf_weights(file: GGUFFile, config: ModelConfig) -> dict[str, np.ndarray]:
    """Every weight of a file in float32, by this package's names.

    Raises:
        ValueError: a tensor is of no known kind, or its quantization type cannot be read.
    """
    names = weight_names(file)

    def weight(name: str) -> np.ndarray:
        values = file.tensor(names[name])
        heads = heads_to_unpermute(config, name)
        if heads is None:
            return _aligned(values)
        if values.shape[0] % (2 * heads):
            raise ValueError(
                f"{file.path}: tensor {names[name]} has {values.shape[0]} rows, "
                f"not a multiple of 2 for each of {heads} heads"
            )
        return _aligned(unpermute(values, heads))

    # NumPy lets go of the interpreter while it dequantizes, so threads share the cores.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(names, pool.map(weight, names), strict=True))


def _aligned(values: np.ndarray) -> np.ndarray:
    """A copy that starts at a 64-byte boundary.

    XLA's CPU backend takes such an array as it is; any other it would copy, and for a while the
    weights would be in memory twice.
    """
    buffer = np.empty(values.nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    copy = buffer[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy
