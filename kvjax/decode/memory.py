"""Memory that stored prefixes share: tiers, and what of them is in device memory."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from kvjax.decode.near_memory import Near, NearMemory
from kvjax.decode.prefix_config import PrefixConfig
from kvjax.model import Model
from kvjax.storage.placement import AttentionFrequency, ImpressScore, Lfu, Lru, Policy
from kvjax.storage.prefetch import Prefetcher
from kvjax.storage.segment import Segment
from kvjax.storage.tiers import Tiers


class Reading(NamedTuple):
    """How one call reads a stored prefix."""

    reader: Any  # a `Prefetcher`, or what serves as one
    near: Near  # what the program reads by itself


class Memory:
    """Tiers for each form of unit and each place where models run; for one call at a time.

    Args:
      config: sizes and placement.
    """

    def __init__(self, config: PrefixConfig) -> None:
        self._config = config
        self._tiers: dict[Any, Tiers] = {}
        self._near: dict[Any, NearMemory] = {}

    @contextlib.contextmanager
    def reading(self, segment: Segment, model: Model) -> Iterator[Reading]:
        """A reader of a segment for one call, and near memory as it is during the call.

        Args:
          segment: what to read.
          model: what runs.
        """
        sharding = jax.tree.leaves(model.params)[0].sharding
        place = segment.unit_shape, segment.info.dtype, sharding
        if place not in self._tiers:
            self._tiers[place] = self._made(segment)
        tiers = self._tiers[place]
        pin_host = self._config.pin_host and tiers.host_units > 0
        if not tiers.device_units and not pin_host:
            with self._reader(segment, tiers, None) as reader:
                yield Reading(reader, Near(None, None))
            return
        if place not in self._near:
            self._near[place] = NearMemory(tiers, sharding, pin_host=pin_host)
        memory = self._near[place]
        with self._reader(segment, tiers, memory) as reader:
            yield Reading(reader, memory.near)
            memory.update()

    def _reader(self, segment: Segment, tiers: Tiers, memory: NearMemory | None) -> Prefetcher:
        return Prefetcher(
            segment.read,
            tiers,
            segment=f"{segment.info.key}.{segment.info.created}",  # reordering writes a key again
            near=None if memory is None else memory.units,
            timeout_s=self._config.timeout_s,
        )

    def _made(self, segment: Segment) -> Tiers:
        policies: dict[str, type[Policy]] = {
            "attention": AttentionFrequency,
            "impress": ImpressScore,
            "lru": Lru,
            "lfu": Lfu,
        }
        return Tiers(
            self._config.host_bytes,
            segment.unit_shape,
            segment.grid.numpy_dtype,
            device_bytes=self._config.device_bytes,
            policy=policies[self._config.placement](),
        )
