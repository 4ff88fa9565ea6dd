"""The device tier: pages of stored prefixes that stay in device memory between calls."""

import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.storage.tiers import DeviceRows, Tiers
from kvjax.storage.units import UnitId


class DevicePool:
    """A copy in device memory of what the tiers rank as kept there.

    It changes between programs only, so a program may be told at any time which rows hold what:
    `units` and `array` belong together. Hold `lock` from reading them until the program has ended
    and `update` is done.

    Args:
      tiers: what ranks; must have a device tier.
      sharding: of the program's parameters.
    """

    def __init__(self, tiers: Tiers, sharding: Any) -> None:
        self.lock = threading.Lock()
        self._tiers = tiers
        self._sharding = sharding
        self._clear()

    def _clear(self) -> None:
        shape = (self._tiers.device_units, *self._tiers.unit_shape)
        self.array = jnp.zeros(shape, self._tiers.dtype, device=self._sharding)
        self.units: dict[UnitId, int] = {}
        self._whole = True  # every row in use is still to be copied

    def update(self) -> None:
        """Copy what changed in the tiers since the last update."""
        changes = self._tiers.take_device_changes(whole=self._whole)
        try:
            self._write(changes)
        except BaseException:
            self._clear()  # no row is known to be right
            raise
        self.units, self._whole = changes.units, False

    def _write(self, changes: DeviceRows) -> None:
        count = len(changes.rows)
        if not count:
            return
        size = 1 << (count - 1).bit_length()  # so that few programs serve all updates
        rows = np.full((size,), self._tiers.device_units, np.int32)
        rows[:count] = changes.rows
        data = np.zeros((size, *self._tiers.unit_shape), self._tiers.dtype)
        data[:count] = changes.data
        self.array = _with_rows(self.array, rows, data)
        self.array.block_until_ready()


@functools.partial(jax.jit, donate_argnums=0)
def _with_rows(array: Array, rows: Array, data: Array) -> Array:
    return array.at[rows].set(data, mode="drop")
