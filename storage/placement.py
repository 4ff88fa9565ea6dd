"""Which units are worth keeping: four policies behind one interface, and the heap that ranks them.

A policy only counts and scores. Where a unit lives is decided in `tiers.py`, the same way for all
of them: the higher score stays nearer to the device, and of equal scores the one used last.
"""

import heapq
from typing import Protocol

from kvjax.storage.units import UnitId

Rank = tuple[float, int]
"""A score, and a number that grows with each use, so that no two units rank the same."""

REMEMBERED = 1 << 18
"""How many units a policy remembers, the longest untouched being forgotten first."""


class Policy(Protocol):
    """What a unit is worth, from how it was used. Calls come from one thread at a time."""

    def loaded(self, unit: UnitId) -> None:
        """A request took the unit, from whichever tier."""

    def touch(self, unit: UnitId, mass: float, important: float) -> None:
        """A request attended to the unit.

        Args:
          unit: the unit, kept in a tier or not.
          mass: its share of attention, summed over the request's queries; at least 0.
          important: the fraction of its tokens that were important, 0 to 1.
        """

    def score(self, unit: UnitId) -> float:
        """The higher, the longer it is kept; 0 for a unit never seen."""

    def evict(self, unit: UnitId) -> None:
        """The unit left the last tier that had it."""


class _Statistics:
    """A few numbers a unit, of at most so many units."""

    def __init__(self, width: int, remembered: int) -> None:
        if remembered < 1:
            raise ValueError(f"remembered is {remembered}: at least 1 unit must be remembered")
        self._zeros = (0.0,) * width
        self._remembered = remembered
        self._of: dict[UnitId, tuple[float, ...]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def get(self, unit: UnitId) -> tuple[float, ...]:
        return self._of.get(unit, self._zeros)

    def set(self, unit: UnitId, *numbers: float) -> None:
        # Taken out and put in again, so that the dictionary's first is the longest untouched.
        self._of.pop(unit, None)
        self._of[unit] = numbers
        if len(self._of) > self._remembered:
            del self._of[next(iter(self._of))]

    def forget(self, unit: UnitId) -> None:
        self._of.pop(unit, None)


class Lru:
    """Keeps what was used last.

    Args:
      remembered: units whose last use is kept.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._uses = 0
        self._last = _Statistics(1, remembered)

    def loaded(self, unit: UnitId) -> None:
        """Makes the unit the youngest."""
        self._uses += 1
        self._last.set(unit, self._uses)

    def touch(self, unit: UnitId, mass: float, important: float) -> None:
        """Attention does not count here."""

    def score(self, unit: UnitId) -> float:
        """The number of uses of all units until its last one."""
        return self._last.get(unit)[0]

    def evict(self, unit: UnitId) -> None:
        """Forgets it: its next use makes it the youngest whatever came before."""
        self._last.forget(unit)


class Lfu:
    """Keeps what was used most often; uses before an eviction count too.

    Args:
      remembered: units whose count is kept.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._uses = _Statistics(1, remembered)

    def loaded(self, unit: UnitId) -> None:
        """Counts one use."""
        self._uses.set(unit, self._uses.get(unit)[0] + 1)

    def touch(self, unit: UnitId, mass: float, important: float) -> None:
        """Attention does not count here."""

    def score(self, unit: UnitId) -> float:
        """The number of uses."""
        return self._uses.get(unit)[0]

    def evict(self, unit: UnitId) -> None:
        """Its count is kept, or no newcomer could ever outrank what is there."""


class ImpressScore:
    """IMPRESS (FAST'25): access frequency x moving average of the share of important KV.

    Args:
      weight: what the newest share weighs in the moving average, above 0 and at most 1.
      remembered: units whose numbers are kept.

    Raises:
      ValueError: `weight` is out of range.
    """

    def __init__(self, weight: float = 0.5, remembered: int = REMEMBERED) -> None:
        if not 0 < weight <= 1:
            raise ValueError(f"weight is {weight}; allowed: above 0, at most 1")
        self._weight = weight
        self._uses = _Statistics(1, remembered)
        self._share = _Statistics(1, remembered)

    def loaded(self, unit: UnitId) -> None:
        """Counts one access."""
        self._uses.set(unit, self._uses.get(unit)[0] + 1)

    def touch(self, unit: UnitId, mass: float, important: float) -> None:
        """Moves the average towards `important`."""
        before = self._share.get(unit)[0]
        self._share.set(unit, before + self._weight * (important - before))

    def score(self, unit: UnitId) -> float:
        """Accesses x average share."""
        return self._uses.get(unit)[0] * self._share.get(unit)[0]

    def evict(self, unit: UnitId) -> None:
        """Its numbers are kept."""


class AttentionFrequency:
    """ContiguousKV (arXiv 2601.13631): accumulated attention x times loaded, S_j = I_j * F_j.

    Args:
      remembered: units whose numbers are kept.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._of = _Statistics(2, remembered)

    def loaded(self, unit: UnitId) -> None:
        """Counts one load."""
        mass, loads = self._of.get(unit)
        self._of.set(unit, mass, loads + 1)

    def touch(self, unit: UnitId, mass: float, important: float) -> None:
        """Adds the attention that the unit received."""
        before, loads = self._of.get(unit)
        self._of.set(unit, before + mass, loads)

    def score(self, unit: UnitId) -> float:
        """Attention x loads."""
        mass, loads = self._of.get(unit)
        return mass * loads

    def evict(self, unit: UnitId) -> None:
        """Its numbers are kept."""


class Ranking:
    """The units of one tier in a min-heap, whose length stays in step with the tier's.

    A changed rank is pushed again and the old entry skipped when it surfaces; when more than half
    of the entries are old ones, the heap is made anew.
    """

    def __init__(self) -> None:
        self._rank: dict[UnitId, Rank] = {}
        self._heap: list[tuple[Rank, UnitId]] = []

    def __len__(self) -> int:
        return len(self._rank)

    def set(self, unit: UnitId, rank: Rank) -> None:
        """Puts a unit in, or changes its rank."""
        self._rank[unit] = rank
        heapq.heappush(self._heap, (rank, unit))
        if len(self._heap) > 2 * len(self._rank) + 64:
            self._heap = [(rank, unit) for unit, rank in self._rank.items()]
            heapq.heapify(self._heap)

    def remove(self, unit: UnitId) -> Rank | None:
        """Takes a unit out and gives its rank, None if it was not in."""
        return self._rank.pop(unit, None)

    def lowest(self) -> tuple[Rank, UnitId] | None:
        """The unit of least rank, left in; None if there is none."""
        heap = self._heap
        while heap and self._rank.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0] if heap else None
