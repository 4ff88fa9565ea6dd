"""Keeps compiled programs between processes, in JAX's persistent compilation cache."""

import pathlib
from typing import Any

import jax

from kvjax.registry import cache_root


def keep_programs(cache_dir: str | pathlib.Path | None = None) -> pathlib.Path:
    """Switches JAX's persistent compilation cache on, for the rest of this process.

    The `kvjax` command calls it; a library does not change JAX's settings by itself. Call it
    before the first program is compiled. A cache that was already chosen by the JAX setting
    `jax_compilation_cache_dir` is left as it is.

    Args:
      cache_dir: the folder of kvjax's caches; None means the operating system's place.

    Returns:
      The folder in which programs are kept.
    """
    settings: Any = jax.config  # its attributes are made at run time
    chosen = settings.jax_compilation_cache_dir
    if chosen:
        return pathlib.Path(chosen)
    folder = cache_root(cache_dir) / "programs"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return folder
