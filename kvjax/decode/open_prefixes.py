"""Stored prefixes that calls have read from, kept open with what was made of them."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.decode.load_or_recompute import CostModel, measure_reads
from kvjax.decode.packed_prefix import ExactTokens, exact_group, exact_tokens
from kvjax.decode.prefix_config import PrefixConfig
from kvjax.decode.shapes import half_step
from kvjax.decode.stored_form import StoredForm
from kvjax.storage.segment import Segment

TAIL = "tail"
"""Name of the array that kept the tokens after the last full page in stores of former versions."""

PREFILL_S = "prefill_s"
"""Name of the array that keeps the seconds that prefilling took."""

OPEN_SEGMENTS = 8
"""Stored prefixes that stay open; the store does not evict them."""


class OpenPrefix:
    """One stored prefix, open: its segment, what to choose by, and what reading it costs.

    Args:
      segment: open; `close` closes it.
      config: how it is chosen from.
    """

    def __init__(self, segment: Segment, config: PrefixConfig) -> None:
        self.segment = segment
        self._config = config
        self._sketches: dict[int, tuple[dict[str, jax.Array], ...]] = {}  # by least size
        self._exact: tuple[ExactTokens | None, ...] | None = None
        self._cost: CostModel | None = None

    def sketches(self, least: int) -> tuple[dict[str, jax.Array], ...]:
        """The configured sketch of every layer, padded to a size that programs are made for.

        Args:
          least: pages that a program must have room to choose.

        Raises:
          SegmentError: it is damaged.
        """
        if least not in self._sketches:
            self._sketches[least] = self._read_sketches(least)
        return self._sketches[least]

    def exact(self, form: StoredForm) -> tuple[ExactTokens | None, ...]:
        """Every layer's tokens that a format leaves as they are.

        Args:
          form: how the prefix is stored.

        Raises:
          SegmentError: they are damaged.
        """
        if self._exact is None:
            _, pages, _, size, _ = self.segment.info.shape
            group = f"{exact_group(pages * size)}."
            arrays = self.segment.sketches(group)
            self._exact = exact_tokens(
                form, {name.removeprefix(group): array for name, array in arrays.items()}
            )
        return self._exact

    def cost(self) -> CostModel:
        """What reading it and prefilling it anew cost here, measured once.

        Raises:
          UnitError: a unit cannot be read.
          TimeoutError: a unit is not there in time.
          SegmentError: it is damaged.
        """
        if self._cost is None:
            seconds = float(self.segment.sketches(PREFILL_S)[PREFILL_S])
            tokens_per_s = self.segment.info.tokens / max(seconds, 1e-6)
            rates = measure_reads(self.segment, self._config.timeout_s)
            self._cost = CostModel(*rates, tokens_per_s)
        return self._cost

    def close(self) -> None:
        """Close the segment."""
        self.segment.close()

    def _read_sketches(self, least: int) -> tuple[dict[str, jax.Array], ...]:
        layers, pages = self.segment.info.shape[:2]
        room = max(half_step(pages), least)
        name = self._config.sketch_name()
        if name is None:
            return ({"pages": jnp.zeros((room,), jnp.int32)},) * layers  # only for its size
        parts = {
            whole.removeprefix(f"{name}."): array
            for whole, array in self.segment.sketches(f"{name}.").items()
        }
        return tuple(
            {part: _padded(array[layer], room) for part, array in parts.items()}
            for layer in range(layers)
        )


class OpenPrefixes:
    """Open prefixes by key; of too many, the least recently used is closed.

    Args:
      config: how they are chosen from.
    """

    def __init__(self, config: PrefixConfig) -> None:
        self._config = config
        self._open: dict[str, OpenPrefix] = {}  # the least recently used first

    def keep(self, found: Segment) -> OpenPrefix:
        """The prefix of a segment that was just opened, as it was kept if it is the same still.

        Args:
          found: open; it is closed here or kept.
        """
        key = found.info.key
        kept = self._open.pop(key, None)
        if kept is not None and kept.segment.info.created == found.info.created:
            found.close()
        else:
            if kept is not None:
                kept.close()
            kept = OpenPrefix(found, self._config)
        self._open[key] = kept
        while len(self._open) > OPEN_SEGMENTS:
            self.close_one()
        return kept

    def drop(self, key: str) -> None:
        """Close a prefix, if it is open."""
        kept = self._open.pop(key, None)
        if kept is not None:
            kept.close()

    def close_one(self) -> bool:
        """Close the least recently used; whether there was one."""
        if not self._open:
            return False
        self.drop(next(iter(self._open)))
        return True


def built_sketches(config: PrefixConfig, keys: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    """The configured sketch of every layer, stacked, under names of its own.

    Args:
      config: says which.
      keys: of each layer, [N, Hkv, P, D], finite.
    """
    sketch = config.sketch()
    if sketch is None:
        return {}
    build: Any = jax.jit(sketch.build)
    layers = [jax.device_get(build(jnp.asarray(layer))) for layer in keys]
    name = config.sketch_name()
    return {f"{name}.{part}": np.stack([a[part] for a in layers]) for part in layers[0]}


def joined_sketches(
    segment: Segment, pages: int, after: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Sketches of the first pages of a segment, as it keeps them, and of pages that follow.

    Args:
      segment: open.
      pages: how many of its pages come first.
      after: as `built_sketches` gives them, of the pages that follow.

    Returns:
      Nothing if the segment keeps no such sketches.

    Raises:
      SegmentError: one of them is damaged.
    """
    if not after.keys() <= segment.sketch_names:
        return {}
    return {
        name: np.concatenate([segment.sketch(name)[:, :, :pages], array], axis=2)
        for name, array in after.items()
    }


def _padded(array: np.ndarray, pages: int) -> jax.Array:
    """A layer's sketch [Hkv, N, ...] with room for more pages."""
    widths = [(0, 0), (0, pages - array.shape[1])] + [(0, 0)] * (array.ndim - 2)
    return jnp.pad(jnp.asarray(array), widths)
