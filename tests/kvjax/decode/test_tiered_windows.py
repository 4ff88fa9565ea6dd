"""Slots of its own for every layer and KV head: what moves changes, what is read does not."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.config import CacheConfig
from kvjax.decode import generate, plan_windows, profile_windows
from kvjax.decode.identity import fingerprint
from kvjax.decode.program import compilations
from kvjax.errors import KvjaxError
from kvjax.policies import Place, Select, TrafficProfile, Window, WindowPlan
from tests.kvjax.decode.forced import forced_logits
from tests.kvjax.decode.test_tiered import (
    HELD,
    LENGTHS,
    PAGE_BYTES,
    SIZE,
    TOKENS,
    TOTAL,
    made,
    over_tiers,
    plainly,
    split,
)
from tests.kvjax.decode.tiny import prompt

ROWS = 4  # of three prompts


def planned(slots, name="llama", by="keys", **place):
    plan = WindowPlan(slots, fingerprint(made(name)), SIZE)
    cache = over_tiers(by, times=1, **place)
    return dataclasses.replace(cache, window=Window(plan=plan))


def run(cache, name="llama", limits=None):
    _, prompts, given = split(LENGTHS, TOKENS)
    return forced_logits(made(name), prompts, given, cache, limits)


def misses(slots):
    """What NumPy says that these slots miss."""
    window = {"slots": slots, "total": TOTAL, "held": HELD}
    return sum(plain.misses(**window) for plain in plainly())


# A step reads 4 pages; a row has 16.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "slots"),
    [
        (((4, 9), (14, 6)), ((5, 10), (15, 7))),
        (((0, 3), (1000, 0)), ((5, 5), (16, 5))),  # the least, and everything
    ],
)
def test_uneven_slots_move_pages_and_change_nothing(plan, slots):
    got, stats, call = run(planned(plan))
    assert call.shapes.slots == slots
    for row, want in zip(got, plainly(), strict=True):
        np.testing.assert_allclose(row, want.logits, atol=1e-4, rtol=1e-4)
    assert (stats.least_slots, stats.slots) == (5, max(map(max, slots)))
    assert stats.device_bytes == ROWS * sum(map(sum, slots)) * PAGE_BYTES
    assert stats.bytes_moved == stats.misses * PAGE_BYTES
    assert stats.misses == misses(slots)


@pytest.mark.slow
def test_an_equal_plan_is_that_window(tmp_path):
    """The same program, also from a file."""
    path = tmp_path / "plan.json"
    WindowPlan(((8,) * 2,), fingerprint(made("one layer")), SIZE).save(path)
    want = run(over_tiers(times=2), "one layer")
    for plan in (path, str(path)):
        cache = dataclasses.replace(over_tiers(times=1), window=Window(plan=plan))
        assert hash(cache.window) == hash(Window(plan=str(path)))
        got = run(cache, "one layer")
        assert got.call.shapes == want.call.shapes
        assert got.stats == want.stats
        for one, other in zip(got.logits, want.logits, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("limits", [((5, 5), (5, 5)), ((5, 12), (7, 5)), ((12, 12), (12, 12))])
def test_heads_use_no_more_slots_than_their_limit(limits):
    """A program with more of them decodes as one that has no more."""
    got, stats, call = run(planned(((11, 11), (11, 11))), limits=jnp.asarray(limits, jnp.int32))
    assert call.shapes.slots == ((12, 12), (12, 12))
    for row, want in zip(got, plainly(), strict=True):
        np.testing.assert_allclose(row, want.logits, atol=1e-4, rtol=1e-4)
    assert stats.misses == misses(limits)


@pytest.mark.slow
def test_a_store_and_fewer_rows_change_nothing(tmp_path):
    want = run(over_tiers(times=None), "one layer").logits
    cache = planned(((4, 13),), "one layer", store=str(tmp_path), host_bytes=0)
    _, prompts, given = split(LENGTHS, TOKENS)
    for rows in (slice(0, 3), slice(0, 2), slice(1, 2)):
        got = forced_logits(made("one layer"), prompts[rows], given[rows], cache)
        assert got.stats.store is not None
        assert 0 < got.stats.store.units <= got.stats.misses
        for one, other in zip(got.logits, want[rows], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)


PROFILED = CacheConfig(page_size=SIZE, select=Select("25%", "mean"), place=Place())
PROMPTS = [prompt(n, seed) for seed, n in enumerate((85, 60))]


@pytest.fixture(scope="module")
def profiled():
    told = []
    before = compilations()
    profile = profile_windows(
        made(),
        PROMPTS,
        PROFILED,
        new_tokens=24,
        times=(2, 1, 1.5, 100, 200),
        progress=lambda phase, share: told.append((phase, share)),
    )
    assert compilations() == before + 3  # to start, prefill and decode
    assert told == [("profile", share) for share in (0, 0.25, 0.5, 0.75, 1)]
    return profile


@pytest.mark.slow
def test_a_profile_is_what_windows_miss(profiled):
    """Greater windows miss less, and one for all pages nothing that is ever near."""
    assert profiled.windows.tolist() == [4, 6, 8, TOTAL - 1]
    assert profiled.misses.shape == (2, 2, 4)
    assert (np.diff(profiled.misses.sum((0, 1))) < 0).all()
    for size, window in enumerate((1, 1.5, 2)):
        cache = dataclasses.replace(PROFILED, window=Window(window))
        stats = generate(
            made(), PROMPTS, max_new_tokens=24, stop_at_eos=False, cache=cache
        ).stats.tiers
        np.testing.assert_allclose(profiled.misses[..., size].sum() * 23, stats.misses)


@pytest.mark.slow
def test_a_plan_fetches_less_in_as_much_memory(profiled):
    """On what was profiled; greedy, so not more than equal windows."""
    equal, page = dataclasses.replace(PROFILED, window=Window(1.5)), PAGE_BYTES
    plan = plan_windows(profiled, made(), PROFILED, device_bytes=4 * 7 * page)
    assert plan.total <= 4 * 6
    stats = []
    for cache in (equal, dataclasses.replace(PROFILED, window=Window(plan=plan))):
        options = {"max_new_tokens": 24, "stop_at_eos": False}
        stats.append(generate(made(), PROMPTS, cache=cache, **options))
    assert stats[0].tokens == stats[1].tokens
    tiers = [answer.stats.tiers for answer in stats]
    assert tiers[1].device_bytes <= tiers[0].device_bytes
    assert tiers[1].misses <= tiers[0].misses
    np.testing.assert_allclose(profiled.traffic(plan.array) * 23, tiers[1].misses)


# What is refused.


def refused(window, message, **place):
    cache = dataclasses.replace(over_tiers(times=1, **place), window=window)
    with pytest.raises(KvjaxError, match=message):
        generate(made(), prompt(85), max_new_tokens=31, cache=cache)


def test_a_plan_that_is_none():
    for plan in (3, "", b"plan", ((4, 4),)):
        with pytest.raises(KvjaxError, match=r"plan is .*: must be a kvjax\.policies\.WindowPlan"):
            Window(plan=plan)
    with pytest.raises(KvjaxError, match=r"times is 2 and plan is given: .*leave out one of them"):
        Window(2, plan="plan.json")


def test_a_plan_of_something_else(tmp_path):
    refused(Window(plan=tmp_path / "none"), "none does not exist: give the path")
    own, slots = fingerprint(made()), ((4, 4), (4, 4))
    for plan, message in (
        (WindowPlan(slots, "ab" * 32, SIZE), "is for model abababababab"),
        (WindowPlan(slots, own, 16), "is for pages of 16 tokens, and these hold 8"),
        (WindowPlan(((4, 4),), own, SIZE), r"is of \(1, 2\) layers and KV heads, and llama has"),
    ):
        refused(Window(plan=plan), f"the window's plan {message}")
        plan.save(tmp_path / "plan")
        refused(Window(plan=tmp_path / "plan"), message)


@pytest.mark.slow
def test_a_plan_that_does_not_fit_the_device():
    plan = WindowPlan(((4, 9), (15, 6)), fingerprint(made()), SIZE)
    need = (5 + 10 + 16 + 7) * PAGE_BYTES
    message = f"device_bytes is {need - 1}: .*plan need {need} bytes for one row; raise it to that"
    refused(Window(plan=plan), message, device_bytes=need - 1)
    cache = over_tiers(times=1, device_bytes=need)
    cache = dataclasses.replace(cache, window=Window(plan=plan))
    tiers = generate(made(), prompt(85), max_new_tokens=31, cache=cache).stats.tiers
    assert tiers.device_bytes == need


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"times": ()}, "times is empty: give window sizes"),
        ({"times": (0, 1)}, "times holds 0: each must be a number of at least 1"),
        ({"times": (1, "2")}, "times holds '2'"),
        ({"new_tokens": 1}, "new_tokens is 1: must be an integer of at least 2"),
        ({"cache": CacheConfig()}, "cache.select is None"),
        ({"prompts": []}, "prompts is empty"),
    ],
)
def test_what_cannot_be_profiled(options, message):
    with pytest.raises(KvjaxError, match=message):
        profile_windows(made(), **{"prompts": PROMPTS, "cache": PROFILED} | options)


def test_what_cannot_be_planned():
    profile = TrafficProfile(np.ones((2, 2, 1)), [4])
    need = 4 * 5 * PAGE_BYTES
    with pytest.raises(KvjaxError, match=f"must be at least {need}, what the smallest window"):
        plan_windows(profile, made(), PROFILED, device_bytes=need - 1)
    assert plan_windows(profile, made(), PROFILED, device_bytes=need).slots == ((4, 4), (4, 4))
    profile = TrafficProfile(np.ones((1, 2, 1)), [4])
    with pytest.raises(KvjaxError, match=r"profile is of \(1, 2\) layers and KV heads, and llama"):
        plan_windows(profile, made(), PROFILED, device_bytes=need)
