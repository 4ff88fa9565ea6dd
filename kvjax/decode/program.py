"""Compiled programs, kept by what they are compiled for, with a count of compilations."""

import functools
import time
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

Compiled = Callable[..., Any]


def compiled(
    function: Callable[..., Any], static: Hashable, *args: Any, donate: tuple[int, ...] = ()
) -> tuple[Compiled, float]:
    """The program of `function(static, *args)`, compiled now unless it was before.

    Args:
      function: a module-level function; its first argument is static.
      static: what it is specialised on.
      args: pytrees of arrays, for their shapes, dtypes and placement.
      donate: indices into `args` whose buffers the program may reuse.

    Returns:
      What to call with `args`, and the seconds compilation took in this call (0 if it is kept).
    """
    leaves, tree = jax.tree.flatten(args)
    before = compilations()
    began = time.perf_counter()
    program = _compile(function, static, tree, tuple(_abstract(leaf) for leaf in leaves), donate)
    took = time.perf_counter() - began
    return program, took if compilations() > before else 0.0


def compilations() -> int:
    """How many programs were compiled (or read from JAX's persistent cache) in this process."""
    return _compile.cache_info().misses


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    array = np.asarray(leaf)
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


@functools.lru_cache(maxsize=64)
def _compile(
    function: Callable[..., Any],
    static: Hashable,
    tree: Any,
    leaves: tuple[jax.ShapeDtypeStruct, ...],
    donate: tuple[int, ...],
) -> Compiled:
    def call(*args: Any) -> Any:
        return function(static, *args)

    call.__name__ = function.__name__.lstrip("_")  # the program's name in profiles
    args = jax.tree.unflatten(tree, leaves)
    return jax.jit(call, donate_argnums=donate).lower(*args).compile()
