"""Policies: what each keeps on traces with known decisions; memory that does not grow."""

import random

import pytest

from kvjax.storage.placement import AttentionFrequency, ImpressScore, Lfu, Lru, Ranking


def play(policy, trace):
    """Plays "a" for a load, ("a", mass, important) for attention; gives the units, best first."""
    units = []
    for step in trace:
        name, *attention = step
        if name not in units:
            units.append(name)
        unit = ord(name)
        if attention:
            policy.touch(unit, *attention)
        else:
            policy.loaded(unit)
    return "".join(sorted(units, key=lambda name: -policy.score(ord(name))))


@pytest.mark.parametrize(
    ("policy", "trace", "best_first"),
    [
        (Lru(), ["a", "b", "c", "a"], "acb"),
        (Lru(), ["a", "b", ("a", 9.0, 1.0)], "ba"),
        (Lfu(), ["a", "b", "b", "c", "c", "c"], "cba"),
        (Lfu(), ["a", "a", "b", ("b", 9.0, 1.0)], "ab"),
        # 3 accesses x 0.25 against 1 x 0.5 and 2 x 0.5
        (ImpressScore(), [*"aaabcc", ("a", 0, 0.5), ("b", 0, 1.0), ("c", 0, 1.0)], "cab"),
        # the average moves half of the way each time: 0.5, then 0.25
        (ImpressScore(), [*"aab", ("a", 0, 1.0), ("a", 0, 0.0), ("b", 0, 1.0)], "ab"),
        (ImpressScore(weight=1.0), [*"aab", ("a", 0, 1.0), ("a", 0, 0.0), ("b", 0, 1.0)], "ba"),
        # attention adds up: 0.5 x 2 loads against 0.8 x 1
        (AttentionFrequency(), [*"aab", ("a", 0.2, 0), ("a", 0.3, 0), ("b", 0.8, 0)], "ab"),
        (AttentionFrequency(), [*"aab", ("a", 0.3, 0), ("b", 0.8, 0)], "ba"),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "score") else "",
)
def test_a_trace_with_known_decisions(policy, trace, best_first):
    assert play(policy, trace) == best_first


def test_scores_of_the_papers():
    impress, attention = ImpressScore(weight=0.5), AttentionFrequency()
    for policy in (impress, attention):
        assert policy.score(7) == 0
        policy.loaded(7)
        policy.loaded(7)
        policy.touch(7, 0.25, 0.5)
        policy.touch(7, 0.5, 1.0)
    assert impress.score(7) == 2 * (0.5 * (0.5 * 0.5) + 0.5 * 1.0)
    assert attention.score(7) == 2 * (0.25 + 0.5)


@pytest.mark.parametrize("policy", [Lfu(), ImpressScore(), AttentionFrequency()])
def test_what_was_counted_survives_an_eviction(policy):
    policy.loaded(1)
    policy.touch(1, 1.0, 1.0)
    before = policy.score(1)
    policy.evict(1)
    policy.loaded(1)
    assert policy.score(1) == 2 * before > 0


@pytest.mark.parametrize("kind", [Lfu, ImpressScore, AttentionFrequency])
def test_the_longest_untouched_is_forgotten_first(kind):
    policy = kind(remembered=100)
    for unit in range(1000):
        for name in (5, unit):  # 5 is used all the time
            policy.loaded(name)
            policy.touch(name, 1.0, 1.0)
    assert policy.score(5) > 0
    assert sum(policy.score(unit) > 0 for unit in range(1000)) == 100
    assert policy.score(950) > 0


@pytest.mark.parametrize("kind", [Lfu, ImpressScore, AttentionFrequency])
def test_remembering_nothing_is_refused(kind):
    with pytest.raises(ValueError, match="remembered is 0"):
        kind(remembered=0)


@pytest.mark.parametrize("weight", [0, -1, 1.5])
def test_a_weight_out_of_range_is_refused(weight):
    with pytest.raises(ValueError, match="weight"):
        ImpressScore(weight=weight)


def test_the_lowest_is_that_of_a_sorted_list():
    ranking, model, dice = Ranking(), {}, random.Random(3)
    for stamp in range(5000):
        unit = dice.randrange(50)
        if dice.random() < 0.3:
            assert ranking.remove(unit) == model.pop(unit, None)
        else:
            model[unit] = (float(dice.randrange(5)), stamp)
            ranking.set(unit, model[unit])
        expected = min(((rank, unit) for unit, rank in model.items()), default=None)
        assert ranking.lowest() == expected
        assert len(ranking) == len(model)


def test_the_heap_stays_bounded_under_endless_touches():
    ranking, most = Ranking(), 0
    for stamp in range(400_000):
        ranking.set(stamp % 100, (float(stamp), stamp))
        if stamp % 37 == 0:
            most = max(most, len(ranking._heap))
    assert len(ranking) == 100
    assert 100 <= most <= 2 * 100 + 64
