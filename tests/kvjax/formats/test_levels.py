"""Levels are the best there are: no other cut of the points has a smaller error."""

import itertools

import numpy as np
import pytest

from kvjax.formats.levels import best_levels


def error(points, weights, levels):
    nearest = np.abs(points[:, None] - levels).min(axis=1)
    return float((weights * nearest**2).sum())


def best_of_all_cuts(points, weights, count):
    """The least error of any way to cut the sorted points into `count` runs."""
    order = np.argsort(points)
    x, w = points[order], weights[order]
    least = np.inf
    for cut in itertools.combinations(range(1, len(x)), count - 1):
        runs = np.split(np.arange(len(x)), cut)
        total = 0.0
        for run in runs:
            mean = np.average(x[run], weights=w[run])
            total += (w[run] * (x[run] - mean) ** 2).sum()
        least = min(least, total)
    return least


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [1, 2, 4])
def test_no_cut_is_better(seed, count):
    rng = np.random.default_rng(seed)
    points, weights = rng.standard_normal(11), rng.random(11) ** 4
    levels = best_levels(points, weights, count)
    assert levels.shape == (count,)
    assert (np.diff(levels) > 0).all()
    assert error(points, weights, levels) == pytest.approx(
        best_of_all_cuts(points, weights, count), rel=1e-9
    )


def test_weights_draw_levels():
    points = np.linspace(-1, 1, 201)
    even = best_levels(points, np.ones(201), 4)
    np.testing.assert_allclose(even, [-0.75, -0.25, 0.25, 0.75], atol=0.01)
    drawn = best_levels(points, np.where(points > 0.5, 1000.0, 1.0), 4)
    assert (drawn > 0.5).sum() >= 2


def test_what_weighs_nothing_does_not_count():
    points = np.array([0.0, 1.0, 5.0])
    np.testing.assert_allclose(best_levels(points, np.array([1.0, 1.0, 0.0]), 2), [0, 1])
    np.testing.assert_allclose(best_levels(points, np.zeros(3), 3), points)


def test_fewer_points_than_levels():
    np.testing.assert_allclose(best_levels(np.array([2.0, 1.0]), np.ones(2), 4), [1, 2, 2, 2])


def test_weights_of_all_sizes_give_ascending_levels_within_the_points():
    rng = np.random.default_rng(0)
    points = rng.random(200) * 2 - 1
    levels = best_levels(points, 10.0 ** rng.uniform(-40, 10, 200), 16)
    assert (np.diff(levels) >= 0).all()
    assert points.min() <= levels[0]
    assert levels[-1] <= points.max()
