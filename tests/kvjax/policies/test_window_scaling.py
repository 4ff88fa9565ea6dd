"""Windows within a budget: greedy against exact, and exact against every combination."""

import itertools

import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.policies import TrafficProfile, exact_windows, greedy_windows

WINDOWS = [2, 3, 5, 8, 13]


def curves(rng, layers, heads, sizes):
    """Misses that fall unevenly, so that hulls have corners that are not measured points."""
    steps = rng.exponential(size=(layers, heads, sizes)) ** 2
    return np.cumsum(steps, axis=2)[..., ::-1] * rng.exponential(size=(layers, heads, 1))


def instance(seed, layers=2, heads=3, costly=False):
    rng = np.random.default_rng(seed)
    misses = curves(rng, layers, heads, len(WINDOWS))
    if seed % 3 == 0:
        misses = np.round(misses)  # ties
    if seed % 3 == 1:
        misses = rng.permuted(misses, axis=2)  # a larger window may miss more
    cost = rng.integers(1, 4, (layers, heads)) if costly else 1
    return TrafficProfile(misses, WINDOWS, cost)


def every_budget(profile):
    """From the least that is allowed to more than the largest windows cost."""
    return range(profile.cost(WINDOWS[0]), profile.cost(WINDOWS[-1]) + 3)


def first_step_that_did_not_fit(profile, budget):
    """The saving of it: greedy along the convex hulls, all heads' steps in one sorted list."""
    left, steps = budget - profile.cost(WINDOWS[0]), []
    for head in np.ndindex(profile.slot_cost.shape):
        costs = profile.windows * profile.slot_cost[head]
        at = 0
        while True:
            rates = [
                (profile.misses[head][at] - profile.misses[head][to]) / (costs[to] - costs[at])
                for to in range(at + 1, len(costs))
            ]
            if not rates or max(rates) <= 0:
                break
            to = at + 1 + int(np.argmax(rates))
            saved = profile.misses[head][at] - profile.misses[head][to]
            steps.append((-max(rates), costs[to] - costs[at], saved))
            at = to
    for _, price, saved in sorted(steps):
        if price > left:
            return saved
        left -= price
    return 0.0


@pytest.mark.parametrize("costly", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_exact_is_the_best_of_every_combination(seed, costly):
    profile = instance(seed, layers=1, heads=3, costly=costly)
    plans = [np.reshape(plan, (1, 3)) for plan in itertools.product(WINDOWS, repeat=3)]
    costs = np.array([profile.cost(plan) for plan in plans])
    traffic = np.array([profile.traffic(plan) for plan in plans])
    for budget in every_budget(profile):
        found = exact_windows(profile, budget)
        best = traffic[costs <= budget].min()
        assert profile.traffic(found) == pytest.approx(best, abs=1e-12)
        assert profile.cost(found) == costs[traffic <= best + 1e-12].min() <= budget


@pytest.mark.parametrize("costly", [False, True])
@pytest.mark.parametrize("seed", range(18))
def test_greedy_is_as_near_to_exact_as_it_says(seed, costly):
    profile = instance(seed, costly=costly)
    for budget in every_budget(profile):
        greedy, exact = greedy_windows(profile, budget), exact_windows(profile, budget)
        assert greedy.shape == profile.slot_cost.shape
        assert np.isin(greedy, WINDOWS).all()
        assert profile.cost(greedy) <= budget
        excess = profile.traffic(greedy) - profile.traffic(exact)
        assert -1e-9 <= excess <= first_step_that_did_not_fit(profile, budget) + 1e-9


@pytest.mark.parametrize("solve", [greedy_windows, exact_windows])
@pytest.mark.parametrize("seed", range(12))
def test_a_larger_budget_never_gives_more_misses(solve, seed):
    profile = instance(seed, costly=seed % 2 == 0)
    traffic = [profile.traffic(solve(profile, budget)) for budget in every_budget(profile)]
    assert (np.diff(traffic) <= 1e-9).all()
    best = profile.misses.min(axis=2).sum()
    assert traffic[-1] == pytest.approx(best)


@pytest.mark.parametrize("solve", [greedy_windows, exact_windows])
def test_uneven_heads_beat_one_window_for_all(solve):
    profile = instance(2, layers=4, heads=4)
    for window in WINDOWS:
        scaled = solve(profile, profile.cost(window))
        assert profile.traffic(scaled) <= profile.traffic(window)


def test_greedy_passes_over_a_step_that_does_not_fit():
    """The first head's step saves most a slot and needs ten; with five left the second head's."""
    misses = [[[100.0, 90.0, 0.0], [30.0, 10.0, 10.0]]]
    profile = TrafficProfile(misses, [1, 6, 11])
    assert greedy_windows(profile, 12).tolist() == [[11, 1]]
    assert greedy_windows(profile, 11).tolist() == [[1, 6]]
    assert greedy_windows(profile, 17).tolist() == [[11, 6]]


@pytest.mark.parametrize("solve", [greedy_windows, exact_windows])
def test_ties_are_the_same_every_time_and_nothing_is_spent_in_vain(solve):
    profile = TrafficProfile(np.tile([9.0, 6.0, 3.0, 3.0, 3.0], (2, 2, 1)), [0, 1, 2, 3, 4])
    assert solve(profile, 100).tolist() == [[2, 2], [2, 2]]
    assert profile.cost(solve(profile, 5)) == 5
    assert profile.traffic(solve(profile, 5)) == 36 - 15
    assert (solve(profile, 5) == solve(profile, 5)).all()


def test_of_equal_steps_the_larger_then_the_first_head_comes_first():
    profile = TrafficProfile(np.tile([9.0, 6.0, 3.0], (2, 2, 1)), [0, 1, 2])
    assert greedy_windows(profile, 2).tolist() == [[2, 0], [0, 0]]
    assert greedy_windows(profile, 3).tolist() == [[2, 1], [0, 0]]


@pytest.mark.parametrize("solve", [greedy_windows, exact_windows])
def test_one_window_size_and_no_traffic_leave_nothing_to_choose(solve):
    assert solve(TrafficProfile([[[5.0], [7.0]]], [3]), 6).tolist() == [[3, 3]]
    assert solve(TrafficProfile(np.zeros((1, 2, 3)), [1, 2, 3]), 6).tolist() == [[1, 1]]


@pytest.mark.parametrize("solve", [greedy_windows, exact_windows])
def test_a_budget_below_the_smallest_windows_is_refused(solve):
    profile = instance(0)
    assert (solve(profile, 12) == 2).all()
    for budget in (0, 11):
        message = rf"budget is {budget}: must be at least 12, the cost of .*\(2 slots\) .* 6 heads"
        with pytest.raises(KvjaxError, match=message):
            solve(profile, budget)


@pytest.mark.parametrize("budget", [-1, 2.5, True, "12"])
def test_other_budgets_are_refused(budget):
    for solve in (greedy_windows, exact_windows):
        with pytest.raises(KvjaxError, match=r"budget is .* must be an integer of at least 0"):
            solve(instance(0), budget)


def test_a_table_that_is_too_large_is_refused():
    profile = TrafficProfile(np.ones((80, 8, 2)), [0, 1_000_003], 1)
    with pytest.raises(KvjaxError, match="use greedy_windows"):
        exact_windows(TrafficProfile(np.ones((80, 8, 3)), [0, 7, 1_000_003]), 10**9)
    assert (exact_windows(profile, 10**9) == 0).all()  # one unit is a whole window


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"misses": [[1.0, 2.0]]}, r"misses has shape \(1, 2\)"),
        ({"misses": np.zeros((1, 0, 2))}, r"misses has shape \(1, 0, 2\)"),
        ({"misses": [[[1.0, np.nan]]]}, r"misses\[0, 0, 1\] is nan: must be a finite number"),
        ({"misses": [[[-1.0, 0.0]]]}, r"misses\[0, 0, 0\] is -1.0"),
        ({"windows": [1, 1]}, r"windows is \[1, 1\]: must be 2 sizes"),
        ({"windows": [1, 2, 3]}, r"windows is \[1, 2, 3\]: must be 2 sizes"),
        ({"windows": [1.5, 2.0]}, "windows is .* must be integers of at least 0"),
        ({"windows": [-1, 2]}, "windows is .* must be integers of at least 0"),
        ({"slot_cost": 0}, "slot_cost is 0: must be integers of at least 1"),
        ({"slot_cost": [1, 2]}, r"slot_cost has shape \(2,\): must be one number"),
    ],
)
def test_bad_profiles_are_refused_by_name(changed, message):
    with pytest.raises(KvjaxError, match=message):
        TrafficProfile(**{"misses": [[[2.0, 1.0]]], "windows": [1, 2]} | changed)


def test_sizes_that_were_not_measured_have_no_traffic():
    profile = instance(0)
    with pytest.raises(KvjaxError, match="not measured"):
        profile.traffic(4)
    with pytest.raises(KvjaxError, match=r"slots has shape \(6,\): must be \(2, 3\)"):
        profile.cost([2] * 6)
    assert profile.traffic(2) == pytest.approx(profile.misses[..., 0].sum())
