"""A GGUF file as a checkpoint."""

import concurrent.futures
import os
import pathlib

import numpy as np

from kvjax.models.checkpoint import Checkpoint
from kvjax.models.gguf_file import GGUFFile
from kvjax.models.gguf_names import (
    heads_to_unpermute,
    model_config,
    unpermute,
    weight_names,
)


def read_gguf(path: str | pathlib.Path) -> Checkpoint:
    """Reads a GGUF file: configuration, weights dequantized to float32, tokenizer.

    Raises:
        ValueError: the file is damaged or holds a model kvjax does not run; it says which field.
        FileNotFoundError: there is no such file.
    """
    file = GGUFFile(path)
    config = model_config(file)
    names = weight_names(file)

    def weight(name: str) -> np.ndarray:
        values = file.tensor(names[name])
        heads = heads_to_unpermute(config, name)
        return values if heads is None else unpermute(values, heads)

    # numpy releases the interpreter while it dequantizes, so threads share the cores.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        weights = dict(zip(names, pool.map(weight, names), strict=True))
    return Checkpoint(config, weights, None, str(path))
