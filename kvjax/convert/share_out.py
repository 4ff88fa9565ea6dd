"""Room that layers have together, given to those that need it most."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64


def shared_out(worth: Sequence[Float64[np.ndarray, " n"]], mean: int, unit: int) -> list[int]:
    """How many entries each layer keeps, `mean` of them on average.

    Entries are kept in units of some, of every layer at least one unit; units go where they are
    worth most, the earlier layer's first where two are worth the same.

    Args:
      worth: what each of a layer's entries is worth, the greatest first.
      mean: entries a layer, at most as many as the shortest of `worth` has.
      unit: entries that are given at once; what does not divide by it is given singly, to all.
    """
    single = mean % unit
    units, layers = [], []
    for layer, entries in enumerate(worth):
        rest = np.asarray(entries, np.float64)[single:]
        whole = rest[: len(rest) // unit * unit].reshape(-1, unit).sum(axis=1)
        first = 1 if single == 0 else 0
        whole[:first] = np.inf
        units.append(whole)
        layers.append(np.full(len(whole), layer))
    order = np.argsort(-np.concatenate(units), kind="stable")
    given = np.concatenate(layers)[order[: len(worth) * (mean // unit)]]
    return (single + unit * np.bincount(given, minlength=len(worth))).tolist()
