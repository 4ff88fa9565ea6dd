"""Pages of stored prefixes that a program reads without a callback, kept between calls."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, Shaped

from kvjax.storage.tiers import Changes, Tiers
from kvjax.storage.units import UnitId


class Near(NamedTuple):
    """Units in memory that a program reads by itself: rows of one numbering, device rows first."""

    device: Shaped[Array, "S layers heads kinds P D"] | None
    pinned: Shaped[Array, "R layers heads kinds P D"] | None  # in page-locked host memory

    @property
    def rows(self) -> int:
        """S + R."""
        return sum(len(array) for array in self if array is not None)


class NearMemory:
    """A copy of what the tiers keep, where programs read it.

    It changes between programs only, so a program may be told at any time which rows hold what:
    `units` and `near` belong together. One call at a time may use it, from reading them until its
    program has ended and `update` is done.

    Args:
      tiers: what ranks; must have a device tier, or `pin_host` a host tier to pin.
      sharding: of the program's parameters.
      pin_host: whether the host tier is copied to page-locked host memory too.
    """

    def __init__(self, tiers: Tiers, sharding: Any, *, pin_host: bool) -> None:
        self._tiers = tiers
        self._device = sharding
        self._pinned = sharding.with_memory_kind("pinned_host")
        self._pin_host = pin_host
        self._clear()

    def _clear(self) -> None:
        def empty(rows: int, sharding: Any) -> Array | None:
            shape = (rows, *self._tiers.unit_shape)
            zeros = jnp.zeros(shape, self._tiers.dtype, device=self._device) if rows else None
            return None if zeros is None else jax.device_put(zeros, sharding)

        self.units: dict[UnitId, int] = {}
        self._whole = True  # every row in use is still to be copied
        self.near = Near(None, None)  # what was donated is gone, whether there is room anew or not
        pinned = self._tiers.host_units if self._pin_host else 0
        self.near = Near(empty(self._tiers.device_units, self._device), empty(pinned, self._pinned))

    def update(self) -> None:
        """Copy what changed in the tiers since the last update."""
        try:
            changes = self._tiers.take_changes(self.near.rows, whole=self._whole)
            self._write(changes)
        except BaseException:
            self._clear()  # no row is known to be right
            raise
        self.units, self._whole = changes.units, False

    def _write(self, changes: Changes) -> None:
        device, pinned = self.near
        split = int(np.searchsorted(changes.rows, self._tiers.device_units))
        if device is not None and split:
            rows, data, _ = _padded(changes.rows[:split], changes.data[:split], len(device))
            device = _with_rows(device, rows, data)
        if pinned is not None and split < len(changes.rows):
            own = changes.rows[split:] - self._tiers.device_units
            rows, data, count = _padded(own, changes.data[split:], 0)
            write = jax.jit(_with_pinned_rows, donate_argnums=0, out_shardings=self._pinned)
            pinned = write(pinned, rows, data, count)
        self.near = jax.block_until_ready(Near(device, pinned))


def read_pinned(
    pinned: Shaped[Array, "R layers heads kinds P D"],
    rows: Int32[Array, "two Hkv K"],
    layer: int,
    into: Shaped[Array, "two K Hkv P D"],
) -> Shaped[Array, "two K Hkv P D"]:
    """Copy pages from page-locked host memory, one slice each: what TPUs can do there.

    Args:
      pinned: units in host memory.
      rows: of keys and values; others than 0 to R - 1 are left alone.
      layer: whose pages.
      into: where to put them.
    """
    there = ((rows >= 0) & (rows < len(pinned))).reshape(-1)
    places = jnp.argsort(~there, stable=True).astype(jnp.int32)
    _, layers, heads, kinds, *page = pinned.shape
    pinned = jax.device_put(pinned, jax.memory.Space.Host)

    def copy(index: Array, out: Array) -> Array:
        kind, head, column = jnp.unravel_index(places[index], rows.shape)
        unit = rows[kind, head, column], layer % layers, head % heads, jnp.minimum(kind, kinds - 1)
        start = tuple(jnp.asarray(x, jnp.int32) for x in (*unit, 0, 0))
        got = lax.dynamic_slice(pinned, start, (1, 1, 1, 1, *page))
        got = jax.device_put(got, jax.memory.Space.Device).reshape(1, 1, 1, *page)
        place = tuple(jnp.asarray(x, jnp.int32) for x in (kind, column, head, 0, 0))
        return lax.dynamic_update_slice(out, got, place)

    done: Array = lax.fori_loop(0, jnp.sum(there, dtype=jnp.int32), copy, into)
    return done


def _padded(rows: np.ndarray, data: np.ndarray, none: int) -> tuple[Any, Any, Any]:
    """Rows and units to a power of two, so that few programs serve all updates; and how many."""
    size = 1 << (len(rows) - 1).bit_length()
    more = size - len(rows)
    rows = np.concatenate([rows, np.full(more, none, np.int32)])
    data = np.concatenate([data, np.zeros((more, *data.shape[1:]), data.dtype)])
    return rows, data, np.int32(size - more)


@functools.partial(jax.jit, donate_argnums=0)
def _with_rows(device: Array, rows: Array, data: Array) -> Array:
    return device.at[rows].set(data, mode="drop")


def _with_pinned_rows(pinned: Array, rows: Array, data: Array, count: Array) -> Array:
    pinned = jax.device_put(pinned, jax.memory.Space.Host)
    rest = (jnp.int32(0),) * (data.ndim - 1)

    def copy(index: Array, out: Array) -> Array:
        unit = lax.dynamic_slice(data, (index, *rest), (1, *data.shape[1:]))
        unit = jax.device_put(unit, jax.memory.Space.Host)
        return lax.dynamic_update_slice(out, unit, (rows[index], *rest))

    done: Array = lax.fori_loop(0, count, copy, pinned)
    return done
