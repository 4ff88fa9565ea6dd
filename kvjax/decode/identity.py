"""What stored keys and values depend on, besides the tokens."""

import dataclasses
import hashlib
import json
import weakref

import jax
import numpy as np

from kvjax.model import Model
from kvjax.storage.keys import Identity

_fingerprints: "weakref.WeakKeyDictionary[Model, str]" = weakref.WeakKeyDictionary()


def fingerprint(model: Model) -> str:
    """The SHA-256 of a model's weights, in hex; computed once a model.

    Args:
      model: whose weights, names, shapes and dtypes to hash.
    """
    if model not in _fingerprints:
        digest = hashlib.sha256()
        for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
            array = np.asarray(leaf)
            digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape};".encode())
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
        _fingerprints[model] = digest.hexdigest()
    return _fingerprints[model]


def identity(model: Model, cache_dtype: str, tenant: str = "") -> Identity:
    """What must be equal for one run's pages to serve another.

    Args:
      model: that computes them.
      cache_dtype: they are stored in.
      tenant: keeps one user's prefixes from being found by another.
    """
    numerics = {
        "config": dataclasses.asdict(model.config),
        "matrices": model.dtype,
        "cache": cache_dtype,
    }
    return Identity(
        weights=fingerprint(model),
        numerics=json.dumps(numerics, sort_keys=True, default=str),
        tenant=tenant,
    )
