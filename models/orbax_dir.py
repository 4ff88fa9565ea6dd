"""Checkpoints in Orbax's format: one folder with weights, configuration and tokenizer."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from kvjax.models.checkpoint import Checkpoint, check_weights, parameters
from kvjax.models.config import ModelConfig
from kvjax.models.tokenizer import Tokenizer

_FORMAT = "kvjax 1"


def save_orbax(folder: str | os.PathLike[str], checkpoint: Checkpoint) -> None:
    """Writes a checkpoint; the folder appears whole or not at all.

    Sharded arrays are written shard by shard, each by a process that holds it.

    Args:
        folder: where; must not exist yet.
        checkpoint: what a loader returned.

    Raises:
        ValueError: the folder is already there, or a weight is missing, misshapen or not finite.
    """
    path = pathlib.Path(folder).absolute()
    if path.exists():
        raise ValueError(f"folder={path} is already there: name a new one")
    check_weights(checkpoint)
    tokenizer = checkpoint.tokenizer
    description = {
        "format": _FORMAT,
        "config": checkpoint.config.to_dict(),
        "dtypes": {name: array.dtype.name for name, array in checkpoint.weights.items()},
        "tokenizer": None if tokenizer is None else tokenizer.to_dict(),
    }
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer:
        writer.save(
            path,
            args=ocp.args.Composite(
                description=ocp.args.JsonSave(description),
                weights=ocp.args.StandardSave(dict(checkpoint.weights)),
            ),
        )


def read_orbax(
    folder: str | os.PathLike[str],
    *,
    shardings: Mapping[str, jax.sharding.Sharding] | None = None,
) -> Checkpoint:
    """Reads what `save_orbax` wrote.

    Args:
        folder: where it lies.
        shardings: a sharding by parameter name: those weights become sharded arrays of which each
            process reads only its shards. Weights without one become NumPy arrays.

    Raises:
        ValueError: the folder is no such checkpoint, or is damaged.
    """
    path = pathlib.Path(folder).absolute()
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder")
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        description = _restore(reader, path, "description", ocp.args.JsonRestore())
        config, tokenizer, dtypes = _described(path, description)
        targets: dict[str, Any] = {}
        for name, want in parameters(config).items():
            if name not in dtypes:
                raise ValueError(f"{path}: weight {name} {list(want.shape)} is missing")
            if shardings is not None and name in shardings:
                targets[name] = jax.ShapeDtypeStruct(
                    want.shape, np.dtype(dtypes[name]), sharding=shardings[name]
                )
            else:
                targets[name] = np.empty(want.shape, np.dtype(dtypes[name]))
        weights = _restore(reader, path, "weights", ocp.args.StandardRestore(targets))
    return Checkpoint(config, weights, tokenizer, str(path))


def _restore(reader: ocp.Checkpointer, path: pathlib.Path, item: str, how: Any) -> Any:
    try:
        return reader.restore(path, args=ocp.args.Composite(**{item: how}))[item]
    except (ValueError, KeyError, OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path}: {item} cannot be read: not a whole checkpoint of save_orbax ({error})"
        ) from error


def _described(
    path: pathlib.Path, description: Any
) -> tuple[ModelConfig, Tokenizer | None, dict[str, str]]:
    if not isinstance(description, dict) or description.get("format") != _FORMAT:
        found = description.get("format") if isinstance(description, dict) else description
        raise ValueError(f"{path}: format is {found!r}, expected {_FORMAT!r}")
    try:
        config = ModelConfig.from_dict(description["config"])
        stored = description["tokenizer"]
        tokenizer = None if stored is None else Tokenizer.from_dict(stored)
        return config, tokenizer, dict(description["dtypes"])
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path}: description is damaged: {error}") from error
