"""A model written as a folder that `kvjax.load` reads like any other."""

import json
import os
import pathlib
from collections.abc import Callable

import numpy as np
import safetensors.numpy

from kvjax.errors import KvjaxError
from kvjax.models import Checkpoint, Tokenizer
from kvjax.models.hf_config import OWN_TYPE
from kvjax.storage.files import publish


def save_folder(
    path: str | os.PathLike[str],
    checkpoint: Checkpoint,
    *,
    more: Callable[[pathlib.Path], None] | None = None,
) -> None:
    """Write config.json, model.safetensors and the tokenizer; the folder appears whole or not.

    Tensors have this package's names, and config.json holds a whole `ModelConfig`.

    Args:
      path: the folder, which must not be there.
      checkpoint: whose weights to write, in the dtypes that they have.
      more: writes other files that belong to it; called with the unfinished folder.

    Raises:
      KvjaxError: it is there already.
      OSError: it cannot be written.
    """
    folder, tokenizer = pathlib.Path(path), checkpoint.tokenizer
    if folder.exists():
        raise KvjaxError(f"{folder} is already there: name a new folder")
    weights = {name: np.ascontiguousarray(value) for name, value in checkpoint.weights.items()}
    fields: dict[str, object] = {"model_type": OWN_TYPE, "kvjax": checkpoint.config.to_dict()}
    if tokenizer is not None:
        fields["eos_token_id"] = sorted(tokenizer.eos_ids)
    with publish(folder) as unfinished:
        unfinished.mkdir()
        safetensors.numpy.save_file(weights, unfinished / "model.safetensors")
        _write_json(unfinished / "config.json", fields)
        if tokenizer is not None:
            text = tokenizer.backend.to_str()
            (unfinished / "tokenizer.json").write_text(text, encoding="utf-8")
            _write_json(unfinished / "tokenizer_config.json", _settings(tokenizer))
        if more is not None:
            more(unfinished)


def _settings(tokenizer: Tokenizer) -> dict[str, object]:
    def named(token: int | None) -> str | None:
        return None if token is None else str(tokenizer.backend.id_to_token(token))

    return {
        "bos_token": named(tokenizer.bos_id),
        "eos_token": named(tokenizer.eos_id),
        "add_bos_token": tokenizer.add_bos,
        "chat_template": tokenizer.chat_template,
    }


def _write_json(path: pathlib.Path, fields: dict[str, object]) -> None:
    with publish(path) as unfinished:
        unfinished.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
