"""What stored keys and values depend on, besides the tokens."""

import dataclasses
import hashlib
import json
import weakref
from typing import Any, NamedTuple

import jax
import numpy as np

from kvjax.model import Model, keeps_latents
from kvjax.storage.keys import Identity


class _Known(NamedTuple):
    leaves: tuple[weakref.ref[Any], ...]  # that were hashed
    hex: str


_fingerprints: "weakref.WeakKeyDictionary[Model, _Known]" = weakref.WeakKeyDictionary()


def fingerprint(model: Model) -> str:
    """The SHA-256 of a model's weights, in hex; computed once for the arrays it has.

    Args:
      model: whose weights, names, shapes and dtypes to hash.
    """
    leaves = jax.tree_util.tree_leaves_with_path(model.params)
    known = _fingerprints.get(model)
    if (
        known is None
        or len(known.leaves) != len(leaves)
        or any(ref() is not leaf for ref, (_, leaf) in zip(known.leaves, leaves, strict=True))
    ):
        digest = hashlib.sha256()
        for path, leaf in leaves:
            array = np.asarray(leaf)
            digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape};".encode())
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
        refs = tuple(weakref.ref(leaf) for _, leaf in leaves)
        known = _fingerprints[model] = _Known(refs, digest.hexdigest())
    return known.hex


def identity(model: Model, cache_dtype: str, tenant: str = "") -> Identity:
    """What must be equal for one run's pages to serve another.

    Args:
      model: that computes them.
      cache_dtype: they are stored in.
      tenant: keeps one user's prefixes from being found by another.
    """
    numerics: dict[str, Any] = {
        "config": dataclasses.asdict(model.config),
        "matrices": model.dtype,
        "cache": cache_dtype,
    }
    if keeps_latents(model.config):  # former versions kept the keys and values made of them
        numerics["pages"] = "latents"
    return Identity(
        weights=fingerprint(model),
        numerics=json.dumps(numerics, sort_keys=True, default=str),
        tenant=tenant,
    )


def numbers_of(stored: Identity) -> str:
    """What keys and values are kept in, as `identity` was told it."""
    numerics, _ = json.JSONDecoder().raw_decode(stored.numerics)  # a mark may follow
    return str(numerics["cache"])
