"""What a call took, measured from its beginning: seconds, compilations, pages, bytes."""

import time
from collections.abc import Callable, Hashable
from typing import Any

import jax

from kvjax.cache import pool_bytes
from kvjax.decode.inputs import empty_cache
from kvjax.decode.program import Compiled, compilations, compiled
from kvjax.decode.results import PrefixStats, Stats
from kvjax.decode.shapes import Shapes


class Meter:
    """One call's clock, which stands still while programs are compiled.

    Args:
      spent: seconds that the call took before.
    """

    def __init__(self, spent: float = 0.0) -> None:
        self._began = time.perf_counter() - spent
        self._compiled_before = compilations()
        self._compile_seconds = 0.0

    def program(
        self, function: Callable[..., Any], static: Hashable, *args: Any, **options: Any
    ) -> Compiled:
        """The compiled program, as `program.compiled` gives it."""
        program, seconds = compiled(function, static, *args, **options)
        self._compile_seconds += seconds
        return program

    @property
    def seconds(self) -> float:
        """Since the call, compilation excluded."""
        return time.perf_counter() - self._began - self._compile_seconds

    def stats(
        self,
        shapes: Shapes,
        *,
        prompt_tokens: int,
        new_tokens: int,
        pages_used: int,
        ttft_seconds: float | None = None,
        prefix: PrefixStats | None = None,
        prefix_unused: str | None = None,
    ) -> Stats:
        """The call's statistics, at its end."""
        return Stats(
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            compile_seconds=self._compile_seconds,
            run_seconds=self.seconds,
            ttft_seconds=ttft_seconds,
            compilations=compilations() - self._compiled_before,
            pages_used=pages_used,
            pages_total=shapes.num_pages,
            page_size=shapes.page_size,
            cache_bytes=pool_bytes(jax.eval_shape(lambda: empty_cache(shapes))),
            prefix=prefix,
            prefix_unused=prefix_unused,
        )
