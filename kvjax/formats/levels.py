"""The best few levels for numbers of one kind: k-means in one dimension, with weights, exact."""

import numpy as np
from jaxtyping import Float


def best_levels(
    points: Float[np.ndarray, " n"], weights: Float[np.ndarray, " n"], count: int
) -> Float[np.ndarray, " count"]:
    """The levels that sum(weight * (point - nearest level) ** 2) is least for.

    In one dimension the points of a level follow one another, so that the best cut is found by
    dynamic programming, and no start or number of iterations decides. Takes memory of n ** 2.

    Args:
      points: [n], finite, in any order, at least one.
      weights: [n], 0 or more each; all 0 counts as all equal.
      count: how many levels.

    Returns:
      Levels in ascending order; the last ones are equal if there are fewer points of any weight.
    """
    if not weights.any():
        weights = np.ones_like(weights)
    order = np.argsort(points[weights > 0], kind="stable")
    x = points[weights > 0][order].astype(np.float64)
    w = weights[weights > 0][order].astype(np.float64)
    w /= w.sum()
    many = len(x)
    sums = [np.concatenate([[0.0], np.cumsum(w * x**power)]) for power in range(3)]
    weight, moment, square = (s[None, 1:] - s[:-1, None] for s in sums)  # [first, last]
    there = np.triu(np.ones((many, many), bool))
    # Beside great weights small ones may be nothing: such points are their own mean, at no cost.
    some = there & (weight > 0)
    mean = np.where(some, moment / np.where(some, weight, 1.0), x[:, None])
    mean = np.clip(mean, x[:, None], x[None, :])
    cost = np.where(there, np.maximum(square - moment * mean, 0.0), np.inf)
    best, cuts = cost[0], []  # of all points up to each, with one level
    for _ in range(1, min(count, many)):
        before = np.concatenate([[0.0], best[:-1]])  # of the points before `first`
        total = before[:, None] + cost
        cuts.append(total.argmin(axis=0))
        best = total.min(axis=0)
    last, levels = many - 1, []
    for cut in reversed(cuts):
        if last < 0:
            break
        levels.append(mean[cut[last], last])
        last = cut[last] - 1
    if last >= 0:
        levels.append(mean[0, last])
    found = np.array(levels[::-1])
    return np.concatenate([found, np.full(count - len(found), found[-1])])
