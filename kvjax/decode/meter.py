"""What a call took, measured from its beginning: seconds, compilations, pages, bytes."""

import math
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.cache import pool_bytes
from kvjax.decode.inputs import empty_cache
from kvjax.decode.program import Compiled, compilations, compiled
from kvjax.decode.results import PrefixStats, Stats, TierStats
from kvjax.decode.shapes import Shapes
from kvjax.decode.tiered_layers import selecting
from kvjax.decode.tiered_packed import page_shape
from kvjax.decode.tiered_state import TieredShapes


class Meter:
    """One call's clock, which stands still while programs are compiled.

    Args:
      spent: seconds that the call took before.
    """

    def __init__(self, spent: float = 0.0) -> None:
        self._began = time.perf_counter() - spent
        self._compiled_before = compilations()
        self._compile_seconds = 0.0
        self._ended: float | None = None

    def program(
        self, function: Callable[..., Any], static: Hashable, *args: Any, **options: Any
    ) -> Compiled:
        """The compiled program, as `program.compiled` gives it."""
        program, seconds = compiled(function, static, *args, **options)
        self._compile_seconds += seconds
        return program

    @property
    def seconds(self) -> float:
        """Since the call, compilation excluded; after `stop`, until then."""
        ended = time.perf_counter() if self._ended is None else self._ended
        return ended - self._began - self._compile_seconds

    def stop(self) -> None:
        """Count no more: what comes now is not part of the answer."""
        self._ended = time.perf_counter()

    def stats(
        self,
        shapes: Shapes | TieredShapes,
        *,
        prompt_tokens: int,
        new_tokens: int,
        pages_used: int,
        ttft_seconds: float | None = None,
        prefix: PrefixStats | None = None,
        prefix_unused: str | None = None,
        tiers: TierStats | None = None,
        rows: Sequence[int] | None = None,
    ) -> Stats:
        """The call's statistics, at its end.

        `rows` are the tokens of each, drawn ones included; None if there is one row.
        """
        token_bytes: float = shapes.spec.bytes_per_token
        if isinstance(shapes, TieredShapes):
            assert tiers is not None
            cache_bytes = {shapes.spec.dtype: tiers.device_bytes}
            if shapes.format is not None or shapes.fetches:
                sent, (page, dtype) = selecting(shapes.spec), page_shape(shapes)
                pages = 2 * sum(layer.pool_dims[0] for layer in sent.layers)
                token_bytes -= sent.bytes_per_token
                token_bytes += pages * math.prod(page) * jnp.dtype(dtype).itemsize / page[0]
        else:
            cache_bytes = pool_bytes(jax.eval_shape(lambda: empty_cache(shapes)))
            if shapes.format is not None:
                token_bytes = shapes.format.bytes_per_token(shapes.spec, shapes.page_size)
        read = None
        if isinstance(shapes, Shapes) and shapes.format is None and prefix is None:
            held = [prompt_tokens + new_tokens] if rows is None else rows
            # The last token drawn is not in the cache.
            read = sum(map(shapes.spec.bytes_read_per_step, (n - (new_tokens > 0) for n in held)))
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
            cache_bytes=cache_bytes,
            bytes_per_token=token_bytes,
            bytes_read_per_step=read,
            prefix=prefix,
            prefix_unused=prefix_unused,
            tiers=tiers,
            state_bytes=shapes.spec.state_bytes,
        )
