"""Compiled programs, kept by what they are compiled for, with a count of compilations."""

import functools
import time
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.errors import KvjaxError

Compiled = Callable[..., Any]


def compiled(
    function: Callable[..., Any],
    static: Hashable,
    *args: Any,
    donate: tuple[int, ...] = (),
    result_as: int | None = None,
    formats: Any = None,
) -> tuple[Compiled, float]:
    """The program of `function(static, *args)`, compiled now unless it was before.

    Args:
      function: a module-level function; its first argument is static.
      static: what it is specialised on.
      args: pytrees of arrays, for their shapes, dtypes, placement and layouts in memory.
      donate: indices into `args` whose buffers the program may reuse.
      result_as: index into `args` of the pytree whose placement and layouts the result has. A
        program that hands on what it was given says so, or XLA may lay the result out anew, which
        copies it.
      formats: the result's placement and layouts (a pytree), where no argument has them.

    Returns:
      What to call with `args`, and the seconds compilation took in this call (0 if it is kept).

    Raises:
      KvjaxError: JAX is set to compile nothing.
    """
    settings: Any = jax.config  # its attributes are made at run time
    if settings.jax_disable_jit:
        raise KvjaxError("JAX_DISABLE_JIT is set: kvjax runs compiled programs only; unset it")
    leaves, tree = jax.tree.flatten(args)
    before = compilations()
    began = time.perf_counter()
    abstract = tuple(_abstract(leaf) for leaf in leaves)
    laid_out = jax.tree.flatten(formats)
    result = (tuple(laid_out[0]), laid_out[1])
    program = _compile(function, static, tree, abstract, donate, result_as, result)
    took = time.perf_counter() - began
    return program, took if compilations() > before else 0.0


def compilations() -> int:
    """How many programs were compiled (or read from JAX's persistent cache) in this process."""
    return _compile.cache_info().misses


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if isinstance(leaf, jax.Array):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # which has no layout to ask for
        placement = leaf.sharding if is_key else leaf.format  # type: ignore[attr-defined]
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement)
    array = np.asarray(leaf)
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


KEPT_PROGRAMS = 256
"""More than the shapes that requests of one kind come in, as `kvjax.decode.shapes` counts them."""


@functools.lru_cache(maxsize=KEPT_PROGRAMS)
def _compile(
    function: Callable[..., Any],
    static: Hashable,
    tree: Any,
    leaves: tuple[jax.ShapeDtypeStruct, ...],
    donate: tuple[int, ...],
    result_as: int | None,
    result: tuple[tuple[Any, ...], Any],
) -> Compiled:
    def call(*args: Any) -> Any:
        return function(static, *args)

    call.__name__ = function.__name__.lstrip("_")  # the program's name in profiles
    args = jax.tree.unflatten(tree, leaves)
    formats = jax.tree.unflatten(result[1], result[0])
    if result_as is not None:
        formats = jax.tree.map(lambda x: x.format, args[result_as])
    return jax.jit(call, donate_argnums=donate, out_shardings=formats).lower(*args).compile()
