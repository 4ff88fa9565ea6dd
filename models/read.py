"""Any checkpoint this package can read, told apart by what lies at a path."""

import os
import pathlib

from kvjax.models.checkpoint import Checkpoint
from kvjax.models.gguf_reader import read_gguf
from kvjax.models.orbax_dir import read_orbax
from kvjax.models.safetensors_dir import read_safetensors
from kvjax.models.yoco_files import YOCO_SETTINGS


def read(path: str | os.PathLike[str]) -> Checkpoint:
    """Reads a GGUF file, a folder of Hugging Face's or YOCO's files, or a folder of `save_orbax`.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        ValueError: it is none of these, or is damaged, or holds a model kvjax does not run.
    """
    path = pathlib.Path(path)
    if path.is_file():
        return read_gguf(path)
    if not path.exists():
        raise FileNotFoundError(f"path={path}: there is nothing")
    if (path / "_CHECKPOINT_METADATA").is_file():
        return read_orbax(path)
    if (path / "config.json").is_file() or (path / YOCO_SETTINGS).is_file():
        return read_safetensors(path)
    raise ValueError(
        f"path={path} holds no checkpoint kvjax reads: a GGUF file, a folder with config.json or, "
        f"for YOCO, {YOCO_SETTINGS} and *.safetensors, or a folder written by save_orbax"
    )
