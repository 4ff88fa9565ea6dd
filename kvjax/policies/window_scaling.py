"""How many slots each layer's KV heads get for pages that stay on the device.

KVDrive's two-dimensional window scaling (arXiv:2605.18071): heads differ in how much a larger
window saves them, so memory that all share is given where it saves most. Choosing one window for
every head within a budget is the multiple-choice knapsack problem. Solved once, on the host, with
NumPy.
"""

import dataclasses

import numpy as np
from jaxtyping import Float64, Int64
from numpy.typing import ArrayLike

from kvjax.errors import KvjaxError, check_integer

_MOST_CELLS = 1 << 26
"""Cells of the table of choices that `exact_windows` fills, a byte each: 64 MiB."""


@dataclasses.dataclass(frozen=True, eq=False)
class TrafficProfile:
    """What each head fetches, measured with several window sizes.

    Attributes:
      misses: float64 [L, Hkv, W], fetched a step (pages or bytes, one unit throughout), at least 0;
        L layers, Hkv KV heads, W window sizes. A larger window may miss more than a smaller one,
        as measured ones do; then it is never chosen.
      windows: int64 [W], slots of each window, 0 or more, increasing.
      slot_cost: int64 [L, Hkv], what a slot costs (1 for a count of slots, or bytes), at least 1;
        whatever is given is broadcast to it.

    Raises:
      KvjaxError: shapes that do not fit, or a value out of range.
    """

    misses: Float64[np.ndarray, "L Hkv W"]
    windows: Int64[np.ndarray, " W"]
    slot_cost: Int64[np.ndarray, "L Hkv"]

    def __init__(self, misses: ArrayLike, windows: ArrayLike, slot_cost: ArrayLike = 1) -> None:
        measured = np.array(misses, np.float64)
        if measured.ndim != 3 or 0 in measured.shape:
            raise KvjaxError(
                f"misses has shape {measured.shape}: must be [layers, KV heads, window sizes], "
                f"none of them 0"
            )
        wrong = np.argwhere(~(np.isfinite(measured) & (measured >= 0)))
        if len(wrong):
            raise KvjaxError(
                f"misses{wrong[0].tolist()} is {measured[tuple(wrong[0])]}: must be a finite "
                f"number of at least 0; measure that window again"
            )
        sizes = _whole("windows", windows, 0)
        if sizes.shape != measured.shape[2:] or (np.diff(sizes) <= 0).any():
            raise KvjaxError(
                f"windows is {sizes.tolist()}: must be {measured.shape[2]} sizes, as misses has, "
                f"in increasing order"
            )
        cost = _whole("slot_cost", slot_cost, 1)
        try:
            cost = np.broadcast_to(cost, measured.shape[:2])
        except ValueError as error:
            raise KvjaxError(
                f"slot_cost has shape {cost.shape}: must be one number, or one for each of "
                f"misses' {measured.shape[:2]} layers and KV heads"
            ) from error
        for name, array in (("misses", measured), ("windows", sizes), ("slot_cost", cost)):
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    def traffic(self, slots: ArrayLike) -> float:
        """What all heads together fetch a step, in the unit of `misses`.

        Args:
          slots: [L, Hkv], or one number for every head; each one of `windows`.

        Raises:
          KvjaxError: a size that was not measured.
        """
        chosen = self._sizes(slots)
        places = np.searchsorted(self.windows, chosen)
        return float(np.take_along_axis(self.misses, places[..., None], axis=2).sum())

    def cost(self, slots: ArrayLike) -> int:
        """What all heads' slots cost together; arguments as for `traffic`."""
        return int((self._sizes(slots) * self.slot_cost).sum())

    def _sizes(self, slots: ArrayLike) -> Int64[np.ndarray, "L Hkv"]:
        """Slots of every head, each a measured size."""
        sizes = _whole("slots", slots, 0)
        if sizes.ndim and sizes.shape != self.misses.shape[:2]:
            raise KvjaxError(f"slots has shape {sizes.shape}: must be {self.misses.shape[:2]}")
        if not np.isin(sizes, self.windows).all():
            raise KvjaxError(
                f"slots holds a size that was not measured: each must be one of windows, "
                f"{self.windows.tolist()}"
            )
        return np.broadcast_to(sizes, self.misses.shape[:2])


def greedy_windows(profile: TrafficProfile, budget: int) -> Int64[np.ndarray, "L Hkv"]:
    """Windows for every head, grown from the smallest by the greatest saving for its cost.

    Each step takes, of all windows of all heads that still fit, the one that saves most misses a
    unit of cost. While everything fits, a head's steps are the corners of the convex hull of its
    curve, in order. Guaranteed: the misses exceed those of `exact_windows` by less than the saving
    of the first hull step that did not fit, and not at all if there was none; a larger budget never
    gives more misses. Of equal steps the larger comes first, then the lower layer and head. Nothing
    is spent that saves nothing.

    Args:
      profile: the measurements.
      budget: what all slots may cost together.

    Returns:
      Slots, one of `profile.windows` for every head.

    Raises:
      KvjaxError: the budget does not cover the smallest window everywhere.
    """
    left = _beyond_smallest(profile, budget)
    heads = profile.slot_cost.size
    misses = profile.misses.reshape(heads, -1)
    costs = profile.slot_cost.reshape(-1, 1) * profile.windows
    at = np.zeros(heads, np.int64)
    every = np.arange(heads)
    while True:
        saved = misses[every, at][:, None] - misses
        price = costs - costs[every, at][:, None]
        possible = (price > 0) & (price <= left) & (saved > 0)
        if not possible.any():
            return profile.windows[at].reshape(profile.slot_cost.shape)
        rate = np.where(possible, saved / np.maximum(price, 1), -1.0)
        best = rate == rate.max()
        head, size = np.unravel_index(np.argmax(np.where(best, price, 0)), price.shape)
        left -= int(price[head, size])
        at[head] = size


def exact_windows(profile: TrafficProfile, budget: int) -> Int64[np.ndarray, "L Hkv"]:
    """Windows for every head with the least misses that the budget allows, by dynamic programming.

    Time is heads x windows x budget (in units of the costs' common divisor): for small cases, and
    to check `greedy_windows` by. Of equal solutions it finds one of least cost.

    Args:
      profile: the measurements.
      budget: what all slots may cost together.

    Returns:
      Slots, one of `profile.windows` for every head.

    Raises:
      KvjaxError: the budget does not cover the smallest window everywhere, or the table is too
        large.
    """
    left = _beyond_smallest(profile, budget)
    heads, sizes = profile.slot_cost.size, len(profile.windows)
    misses = profile.misses.reshape(heads, sizes)
    extra = profile.slot_cost.reshape(-1, 1) * (profile.windows - profile.windows[0])
    unit = max(int(np.gcd.reduce(extra, axis=None)), 1)
    extra = extra // unit
    units = min(left // unit, int(extra.max(axis=1).sum()))
    if heads * (units + 1) > _MOST_CELLS or sizes > 256:
        raise KvjaxError(
            f"budget is {budget}: {heads} heads of {sizes} window sizes and {units} units to "
            f"give them need a table of more than {_MOST_CELLS} cells, or more than 256 sizes; "
            f"use greedy_windows"
        )
    choice = np.zeros((heads, units + 1), np.uint8)
    least = np.full(units + 1, np.inf)  # misses of the heads so far, by what they cost exactly
    least[0] = 0.0
    for head in range(heads):
        found = np.full(units + 1, np.inf)
        for size in range(sizes):
            price = int(extra[head, size])
            if price > units:
                break
            reached = least[: units + 1 - price] + misses[head, size]
            better = reached < found[price:]
            found[price:][better] = reached[better]
            choice[head, price:][better] = size
        least = found
    spent = int(np.argmin(least))
    at = np.zeros(heads, np.int64)
    for head in reversed(range(heads)):
        at[head] = choice[head, spent]
        spent -= int(extra[head, at[head]])
    return profile.windows[at].reshape(profile.slot_cost.shape)


def _beyond_smallest(profile: TrafficProfile, budget: int) -> int:
    """What is left of the budget when every head has the smallest window."""
    budget = check_integer("budget", budget, 0, ", in units of slot_cost")
    smallest = int(profile.windows[0])
    least = profile.cost(smallest)
    if budget < least:
        raise KvjaxError(
            f"budget is {budget}: must be at least {least}, the cost of the smallest window "
            f"({smallest} slots) for each of {profile.slot_cost.size} heads; raise it, or profile "
            f"a smaller window"
        )
    return budget - least


def _whole(name: str, values: ArrayLike, least: int) -> Int64[np.ndarray, "..."]:
    """Values as int64, refused if they are no integers of at least `least`."""
    array = np.array(values)
    if array.dtype.kind not in "iu" or array.size == 0 or int(array.min()) < least:
        raise KvjaxError(f"{name} is {values!r}: must be integers of at least {least}")
    return array.astype(np.int64)
