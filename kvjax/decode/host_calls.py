"""Calls of host functions inside programs, each made whenever it is reached."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback
from jaxtyping import Array

from kvjax.pallas_kernels.support import target_platform


def writes_in_place() -> bool:
    """Whether host functions write where the program reads, so that room for results is free."""
    return target_platform() == "cpu"


def call_host(
    function: Callable[..., None], results: tuple[jax.ShapeDtypeStruct, ...], *arguments: Array
) -> tuple[Array, ...]:
    """Call a function with NumPy arrays, the first few of which it fills.

    On a CPU those are where the program reads them. `io_callback` takes two to three times as long
    there: it makes arrays of JAX of all arguments, and copies what is returned. On other platforms
    it moves both.

    Args:
      function: must not raise, and must not call JAX. It is given an array for each result and one
        for each argument; the latter are its own to keep. Results that it does not write are zero,
        or anything where `writes_in_place`.
      results: shapes and dtypes.
      arguments: what it is called with.
    """
    if not writes_in_place():

        def returning(*arguments: Any) -> tuple[Any, ...]:
            out = tuple(np.zeros(result.shape, result.dtype) for result in results)
            function(*out, *map(np.asarray, arguments))
            return out

        returned: tuple[Array, ...] = io_callback(returning, results, *arguments)
        return returned

    def filling(context: Any, out: Any, *arguments: Any) -> None:
        del context
        # The arguments' memory is the program's, which puts other things there later.
        function(*map(np.asarray, out), *(np.array(np.asarray(each)) for each in arguments))

    filled: tuple[Array, ...] = buffer_callback(filling, results, has_side_effect=True)(*arguments)
    return filled
