"""Memory that stored prefixes share: tiers, and what of them is in device memory."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from kvjax.decode.device_pool import DevicePool
from kvjax.decode.prefix_config import PrefixConfig
from kvjax.model import Model
from kvjax.storage.placement import AttentionFrequency, ImpressScore, Lfu, Lru, Policy
from kvjax.storage.prefetch import Prefetcher
from kvjax.storage.segment import Segment
from kvjax.storage.tiers import Tiers


class Reading(NamedTuple):
    """How one call reads a stored prefix."""

    reader: Any  # a `Prefetcher`, or what serves as one
    pool: Float[Array, "S layers heads kinds P D"] | None  # units in device memory, if any may be


class Memory:
    """Tiers for each form of unit and each place where models run.

    Args:
      config: sizes and placement.
    """

    def __init__(self, config: PrefixConfig) -> None:
        self._config = config
        self._tiers: dict[Any, Tiers] = {}
        self._pools: dict[Any, DevicePool] = {}

    @contextlib.contextmanager
    def reading(self, segment: Segment, model: Model) -> Iterator[Reading]:
        """A reader of a segment for one call, and the device memory as it is during the call.

        Calls that use device memory wait for each other.

        Args:
          segment: what to read.
          model: what runs.
        """
        sharding = jax.tree.leaves(model.params)[0].sharding
        place = segment.unit_shape, segment.info.dtype, sharding
        if place not in self._tiers:
            self._tiers[place] = self._made(segment)
        tiers = self._tiers[place]
        if not tiers.device_units:
            with self._reader(segment, tiers, None) as reader:
                yield Reading(reader, None)
            return
        if place not in self._pools:
            self._pools[place] = DevicePool(tiers, sharding)
        pool = self._pools[place]
        with pool.lock, self._reader(segment, tiers, pool) as reader:
            yield Reading(reader, pool.array)
            pool.update()

    def _reader(self, segment: Segment, tiers: Tiers, pool: DevicePool | None) -> Prefetcher:
        return Prefetcher(
            segment.read,
            tiers,
            segment=f"{segment.info.key}.{segment.info.created}",  # reordering writes a key again
            on_device=None if pool is None else pool.units,
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
