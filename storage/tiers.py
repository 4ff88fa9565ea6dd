"""Device and host memory for units: who is kept where, in one arena of equal slots.

The store holds everything, so leaving the last tier never writes. Rows of the arena are only ever
copied: no caller sees one, and a unit that is pinned neither moves nor leaves.

The arena is in host memory, rows of the device tier included: whoever owns device memory copies
their changes there between programs, and a unit that sinks is not copied back.
"""

import dataclasses
import itertools
import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from kvjax.storage.placement import Lru, Policy, Rank, Ranking
from kvjax.storage.units import MAX_SEGMENTS, UnitId


@dataclasses.dataclass(frozen=True)
class TierCounts:
    """What the tiers hold, and what happened in them since they were made; all in units."""

    device_units: int  # kept in device memory now
    host_units: int  # kept in host memory now
    raised: int  # moved from host to device when they were used
    sunk: int  # moved from device to host to make room
    dropped: int  # left the last tier; nothing was written
    refused: int  # never kept, everything there outranked them


@dataclasses.dataclass(frozen=True)
class Changes:
    """What the tiers hold, for who keeps a copy of it. Rows of the device tier come first."""

    rows: np.ndarray  # int32 [m], ascending: those whose contents changed
    data: np.ndarray  # [m, *unit_shape], their contents, an array of the caller's own
    units: dict[UnitId, int]  # the row of every unit


class _Tier:
    """Slots of one kind of memory: rows `first` to `first + capacity` of the arena."""

    def __init__(self, first: int, capacity: int) -> None:
        self.capacity = capacity
        self.slots: dict[UnitId, int] = {}
        self.free = list(range(first + capacity - 1, first - 1, -1))
        self.ranking = Ranking()  # of those that may be moved: not the pinned ones


class Tiers:
    """A device and a host tier over a store that holds everything; safe to use from any thread.

    A unit that a request took enters the device tier if it outranks the least unit there, which
    then sinks to the host tier if it outranks the least one there, and is dropped if not. With 0
    bytes of device memory, host memory is the first tier; with none at all nothing is kept.

    Args:
      host_bytes: bytes of host memory for units.
      unit_shape: shape of one unit, [layers, heads, 2 or 1, page tokens, head_dim] in a segment.
      dtype: dtype of a unit.
      device_bytes: bytes of device memory for units.
      policy: ranks the units; `Lru()` if None.

    Raises:
      ValueError: a size is negative, or a unit has no bytes.
    """

    def __init__(
        self,
        host_bytes: int,
        unit_shape: Sequence[int],
        dtype: Any,
        *,
        device_bytes: int = 0,
        policy: Policy | None = None,
    ) -> None:
        for name, size in (("host_bytes", host_bytes), ("device_bytes", device_bytes)):
            if size < 0:
                raise ValueError(f"{name} is {size}: give 0 for no such tier, or a number of bytes")
        self.unit_shape = tuple(int(size) for size in unit_shape)
        self.dtype = np.dtype(dtype)
        self.unit_bytes = int(np.prod(self.unit_shape, dtype=np.int64)) * self.dtype.itemsize
        if self.unit_bytes < 1 or min(self.unit_shape, default=0) < 1:
            raise ValueError(f"unit_shape is {list(unit_shape)}: every axis must be at least 1")
        self._policy = Lru() if policy is None else policy
        on_device, on_host = device_bytes // self.unit_bytes, host_bytes // self.unit_bytes
        self._device = _Tier(0, on_device)
        self._host = _Tier(on_device, on_host)
        self._order = [tier for tier in (self._device, self._host) if tier.capacity]
        self._arena = np.empty((on_device + on_host, self.unit_bytes), np.uint8)
        self._changed: set[int] = set()  # rows
        self._lock = threading.Lock()
        self._stamps = itertools.count()
        self._pins: dict[UnitId, tuple[int, Rank]] = {}  # how often, and the rank to return to
        self._segments: dict[str, int] = {}
        self._counts = dict.fromkeys(("raised", "sunk", "dropped", "refused"), 0)

    def segment(self, key: str) -> int:
        """The number of a segment, which stays the same as long as these tiers.

        Args:
          key: names the stored bytes, layout included: two segments of one key are the same bytes.

        Raises:
          ValueError: more than a million segments were named.
        """
        with self._lock:
            if key not in self._segments and len(self._segments) == MAX_SEGMENTS:
                raise ValueError(f"{MAX_SEGMENTS} segments are known: make new Tiers")
            return self._segments.setdefault(key, len(self._segments))

    def where(self, unit: UnitId) -> Literal["device", "host"] | None:
        """The tier that keeps a unit, None if only the store does."""
        with self._lock:
            tier = self._tier_of(unit)
        return None if tier is None else "device" if tier is self._device else "host"

    @property
    def device_units(self) -> int:
        """Rows of the device tier."""
        return self._device.capacity

    @property
    def host_units(self) -> int:
        """Rows of the host tier."""
        return self._host.capacity

    def take_changes(self, below: int, *, whole: bool = False) -> Changes:
        """What changed since the last call.

        Args:
          below: only rows below this number count, such as those of the device tier.
          whole: whether every row in use counts as changed.
        """
        with self._lock:
            slots = (*self._device.slots.items(), *self._host.slots.items())
            units = {unit: row for unit, row in slots if row < below}
            changed = units.values() if whole else (row for row in self._changed if row < below)
            rows = np.array(sorted(changed), np.int32)
            data = self._arena[rows].view(self.dtype).reshape(len(rows), *self.unit_shape)
            changes = Changes(rows, data, units)
            self._changed.clear()  # last: what fails or is interrupted before has lost nothing
        return changes

    def counts(self) -> TierCounts:
        """What the tiers hold and did."""
        with self._lock:
            kept = len(self._device.slots), len(self._host.slots)
            return TierCounts(*kept, **self._counts)

    def lookup(self, units: Sequence[UnitId]) -> list[bool]:
        """Whether each unit is kept in a tier, at this moment."""
        device, host = self._device.slots, self._host.slots
        with self._lock:
            return [unit in device or unit in host for unit in units]

    def pin(self, units: Sequence[UnitId]) -> list[int]:
        """Keeps those units that are here where they are, until `unpin`.

        Returns:
          For each unit its row for `copy`, -1 where it is in no tier (and not pinned).
        """
        rows = []
        with self._lock:
            for unit in units:
                tier = self._tier_of(unit)
                if tier is None:
                    rows.append(-1)
                    continue
                rows.append(tier.slots[unit])
                if unit in self._pins:
                    times, rank = self._pins[unit]
                    self._pins[unit] = times + 1, rank
                else:
                    rank = tier.ranking.remove(unit) or (0.0, 0)
                    self._pins[unit] = 1, rank
        return rows

    def unpin(self, units: Iterable[UnitId], *, used: bool = False) -> None:
        """Gives pinned units back, each as often as it was pinned.

        Args:
          units: the units.
          used: whether a request took them: then they gain rank, and may rise from host to device.
        """
        with self._lock:
            for unit in units:
                times, rank = self._pins.pop(unit)
                if used:
                    self._policy.loaded(unit)
                    rank = self._rank(unit)
                if times > 1:
                    self._pins[unit] = times - 1, rank
                elif used and unit in self._host.slots and self._outranks_device(rank):
                    self._raise_to_device(unit, rank)
                elif (tier := self._tier_of(unit)) is not None:
                    tier.ranking.set(unit, rank)

    def used(self, units: Iterable[UnitId]) -> None:
        """A request took these units from a copy of the tiers: they gain rank, and may rise."""
        with self._lock:
            for unit in units:
                self._policy.loaded(unit)
                rank = self._rank(unit)
                free = unit in self._host.slots and unit not in self._pins
                if free and self._outranks_device(rank):
                    self._raise_to_device(unit, rank)
                else:
                    self._rerank(unit)

    def copy(self, rows: np.ndarray, out: np.ndarray, places: np.ndarray) -> None:
        """Copies pinned units.

        Args:
          rows: integers [m] that `pin` gave, none of them -1.
          out: [n, *unit_shape], contiguous, of the units' dtype.
          places: integers [m]: where in `out` each goes.
        """
        as_bytes = self._bytes_of(out)
        if len(rows) == len(out) and (places == np.arange(len(out))).all():
            np.take(self._arena, rows, axis=0, out=as_bytes, mode="clip")
        else:
            as_bytes[places] = self._arena[rows]

    def admit(self, units: Sequence[UnitId], data: np.ndarray, places: Sequence[int]) -> None:
        """A request took these units, which were read; they are kept if they rank high enough.

        Args:
          units: m units.
          data: [n, *unit_shape] of the units' dtype, contiguous; what is kept is copied.
          places: m numbers: where in `data` each unit is.

        Raises:
          ValueError: `data` has another shape or dtype; nothing is kept.
        """
        if data.shape[1:] != self.unit_shape or data.dtype != self.dtype:
            raise ValueError(
                f"data is {data.dtype}{list(data.shape)}; "
                f"units here are {self.dtype}{list(self.unit_shape)}"
            )
        if not len(self._arena):
            return
        as_bytes = self._bytes_of(data)
        with self._lock:
            for unit, place in zip(units, places, strict=True):
                self._policy.loaded(unit)
                if unit not in self._host.slots and unit not in self._device.slots:
                    kept = self._place(unit, self._rank(unit), as_bytes[place])
                    self._counts["refused"] += not kept
                else:
                    self._rerank(unit)

    def keep(self, unit: UnitId, data: np.ndarray) -> None:
        """Keeps a unit that was read and not used, where host memory has room to spare.

        Everything outranks it until a request takes it or attends to it.

        Args:
          unit: the unit.
          data: [*unit_shape] of the units' dtype; it is copied.
        """
        with self._lock:
            if not self._host.free or self._tier_of(unit) is not None:
                return
            slot = self._host.free.pop()
            self._arena[slot] = self._bytes_of(np.ascontiguousarray(data)[None])[0]
            self._changed.add(slot)
            self._host.slots[unit] = slot
            self._host.ranking.set(unit, (-math.inf, next(self._stamps)))

    def touch(
        self, units: Sequence[UnitId], mass: np.ndarray, important: np.ndarray | None = None
    ) -> None:
        """Tells the policy what attention a request gave to units, kept here or not.

        Call it when the units are chosen, before they are collected: then their rank counts when
        they are admitted.

        Args:
          units: the units.
          mass: float [n], attention summed over the request's queries; finite, at least 0.
          important: float [n], the fraction of the unit's tokens that were important; 1 if None.

        Raises:
          ValueError: a number is out of range, or there are not as many as units.
        """
        masses = np.asarray(mass, np.float64)
        shares = np.ones(len(units)) if important is None else np.asarray(important, np.float64)
        for name, numbers, most in (("mass", masses, np.inf), ("important", shares, 1.0)):
            if numbers.shape != (len(units),):
                raise ValueError(f"{name} has shape {list(numbers.shape)}; allowed: [{len(units)}]")
            wrong = ~(np.isfinite(numbers) & (numbers >= 0) & (numbers <= most))
            if wrong.any():
                place = int(wrong.argmax())
                raise ValueError(f"{name}[{place}] is {numbers[place]}; allowed: 0 to {most}")
        with self._lock:
            for unit, weight, share in zip(units, masses.tolist(), shares.tolist(), strict=True):
                self._policy.touch(unit, weight, share)
                self._rerank(unit)

    def _bytes_of(self, units: np.ndarray) -> np.ndarray:
        return units.reshape(len(units), self.unit_bytes // self.dtype.itemsize).view(np.uint8)

    def _tier_of(self, unit: UnitId) -> _Tier | None:
        if unit in self._host.slots:
            return self._host
        return self._device if unit in self._device.slots else None

    def _rank(self, unit: UnitId) -> Rank:
        return self._policy.score(unit), next(self._stamps)

    def _rerank(self, unit: UnitId) -> None:
        if unit in self._pins:
            self._pins[unit] = self._pins[unit][0], self._rank(unit)
        elif (tier := self._tier_of(unit)) is not None:
            tier.ranking.set(unit, self._rank(unit))

    def _outranks_device(self, rank: Rank) -> bool:
        lowest = self._device.ranking.lowest()
        return bool(self._device.free) or (lowest is not None and lowest[0] < rank)

    def _raise_to_device(self, unit: UnitId, rank: Rank) -> None:
        self._host.ranking.remove(unit)
        slot = self._host.slots.pop(unit)
        self._host.free.append(slot)
        self._counts["raised"] += 1
        self._place(unit, rank, self._arena[slot].copy())

    def _place(self, unit: UnitId, rank: Rank, payload: np.ndarray) -> bool:
        """Puts a unit where it ranks high enough, and whom it drives out one tier further down.

        Returns:
          Whether the unit itself is kept.
        """
        newcomer, kept = unit, False
        for tier in self._order:
            lowest = None
            if not tier.free:
                lowest = tier.ranking.lowest()
                if lowest is None or lowest[0] > rank:
                    continue  # all pinned, or all of higher rank
                tier.ranking.remove(lowest[1])
                tier.free.append(tier.slots.pop(lowest[1]))
            slot = tier.free.pop()
            sinks = lowest is not None and tier is self._device and self._host.capacity > 0
            sinking = self._arena[slot].copy() if sinks else payload
            self._arena[slot] = payload
            self._changed.add(slot)
            tier.slots[unit] = slot
            tier.ranking.set(unit, rank)
            kept |= unit == newcomer
            self._counts["sunk"] += unit != newcomer
            if lowest is None:
                return kept
            (rank, unit), payload = lowest, sinking
        self._counts["dropped"] += kept
        self._policy.evict(unit)
        return kept
