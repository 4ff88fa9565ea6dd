"""Models with sliding windows over tiers: such a layer reads what its window reaches."""

import dataclasses
import functools
import itertools
import re

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.config import CacheConfig
from kvjax.decode import (
    PrefixCache,
    PrefixConfig,
    calibrate,
    generate,
    plan_windows,
    profile_windows,
)
from kvjax.decode.identity import fingerprint
from kvjax.errors import KvjaxError
from kvjax.formats import int4
from kvjax.model import from_checkpoint
from kvjax.models import random_checkpoint
from kvjax.policies import Place, Select, TrafficProfile, Window, WindowPlan
from kvjax.storage.page_store import PageStore
from tests.kvjax.decode.forced import forced_logits, prefilled, step
from tests.kvjax.decode.plain_tiers import PlainTiers
from tests.kvjax.decode.tiny import attention, config, no_cache_logits, prompt

SIZE, NEW = 8, 29
PAGE_BYTES = 2 * SIZE * 8 * 4
ROWS = 4  # of three prompts
LENGTHS = (61, 40, 7)  # of one shape with their 29 tokens: 12 pages
TOTAL, HELD = 12, 8


@functools.cache
def made(window=12, name="gemma"):
    """Two layers like Gemma 3's, the first with a sliding window, and random weights."""
    if name == "shapes":  # the window's layer has heads of its own number and width
        layers = attention(4, 2, 16, window=window), attention(4, 1)
    else:
        layers = attention(4, 1, window=window), attention(4, 1, rope_theta=1e6)
    options = {"qk_norm": True, "post_norms": True, "activation": "gelu_tanh"}
    checkpoint = random_checkpoint(config(*layers, attn_scale=0.4, **options), seed=7)
    for weight, value in checkpoint.weights.items():
        if "norm" not in weight:
            value *= 2
    return from_checkpoint(checkpoint, name=name, dtype="float32")


def over_tiers(by="keys", budget="25%", *, times=None, evict="lookahead", format=None, **place):
    return CacheConfig(
        page_size=SIZE,
        format=format,
        select=Select(budget, by),
        window=None if times is None else Window(times, evict),
        place=None if times is None else Place(**place),
    )


def split(lengths=LENGTHS, new=NEW):
    ids = [prompt(n + new, row) for row, n in enumerate(lengths)]
    heads = [row[:n] for row, n in zip(ids, lengths, strict=True)]
    return ids, heads, [row[n:] for row, n in zip(ids, lengths, strict=True)]


def run(cache, of=None, **options):
    _, prompts, given = split()
    return forced_logits(of or made(), prompts, given, cache, **options)


def exactly(of=None):
    of = of or made()
    return [no_cache_logits(of, row)[n - 1 :] for row, n in zip(split()[0], LENGTHS, strict=True)]


def assert_near(got, want, tolerance=1e-5):
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=tolerance)


# All pages are read: windows of parts of a page, of pages, and longer than a prompt.


@pytest.mark.parametrize(
    ("window", "name", "by", "times"),
    [
        (9, "gemma", "low-bit", 3),
        (17, "shapes", "retroinfer", 0),
        pytest.param(2, "gemma", "mean", 0, marks=pytest.mark.slow),
        pytest.param(500, "gemma", "low-rank", None, marks=pytest.mark.slow),
    ],
)
def test_all_pages_are_exact(window, name, by, times):
    of = made(window, name)
    parts = {} if times is None else {"micro_batches": 2}
    got, stats, call = run(over_tiers(by, "100%", times=times, **parts), of)
    assert (call.shapes.pages, call.shapes.tokens // SIZE) == (TOTAL, HELD)
    assert_near(got, exactly(of))
    steps = itertools.product(LENGTHS, range(NEW))
    assert stats.reads == sum((n + t) // SIZE for n, t in steps)  # only the other layer chooses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "by"),
    [(1, "quest"), (7, "hierarchical"), (8, "pqcache"), (10, "magicpig"), (16, "kvdrive")],
)
def test_all_pages_are_exact_by_other_selectors(window, by):
    of = made(window)
    assert_near(run(over_tiers(by, "100%", times=3), of).logits, exactly(of))


# A quarter is read.


@functools.cache
def plainly():
    counts = (3, 3, 2)  # a quarter of 12, 9 and 5 pages, the first and the last at least
    return [
        PlainTiers(made(), row, prompt=n, size=SIZE, count=count)
        for row, n, count in zip(split()[0], LENGTHS, counts, strict=True)
    ]


@functools.cache
def a_quarter(times, evict):
    return run(over_tiers(times=times, evict=evict))


@pytest.mark.parametrize(
    ("times", "evict"), [(0, "lookahead"), pytest.param(3, "lru", marks=pytest.mark.slow)]
)
def test_a_quarter_equals_the_oracle(times, evict):
    """Whatever moves; and what is counted is of the layer that chooses."""
    got, stats, call = a_quarter(times, evict)
    assert_near(got, [plain.logits for plain in plainly()], 1e-4)
    assert np.abs(got[0] - exactly()[0]).max() > 0.1  # less than everything was read
    window = {"slots": stats.slots, "total": TOTAL, "held": HELD, "evict": evict}
    assert stats.misses == sum(plain.misses(keeps=times > 0, **window) for plain in plainly())
    # A window of 12 tokens reaches into 3 pages, that of the token included.
    assert stats.device_bytes == ROWS * (stats.slots + 3) * PAGE_BYTES
    assert stats.host_bytes == ROWS * TOTAL * PAGE_BYTES  # of the layer that chooses
    assert stats.bytes_moved == stats.misses * PAGE_BYTES
    assert call.shapes.leaving == (1,)


def test_nothing_behind_a_window_is_read():
    """Whatever is left in the ring of tokens that it does not reach, and of none."""
    _, prompts, given = split()
    tokens, cache = [row[0] for row in given], over_tiers(times=0)
    with prefilled(made(), prompts, new_tokens=NEW + 1, cache=cache) as (call, state, rules):
        _, want = step(made(), call, state, rules, tokens)
        assert_near(want[:3], [row[1] for row in a_quarter(0, "lookahead").logits])
        pools = [np.array(pool[0]) for pool in (state.cache.keys, state.cache.values)]
        reached = np.zeros((ROWS * 3, SIZE), bool)
        for row, n in enumerate(LENGTHS):
            for position in range(max(n - 11, 0), n):  # and the token itself are 12
                reached[row * 3 + position // SIZE % 3, position % SIZE] = True
        for pool in pools:
            pool.swapaxes(1, 2)[~reached] = np.nan
        keys, values = (
            (jnp.asarray(pool), other)
            for pool, (_, other) in zip(pools, (state.cache.keys, state.cache.values), strict=True)
        )
        poisoned = dataclasses.replace(state.cache, keys=keys, values=values)
        state = dataclasses.replace(state, cache=poisoned)
        _, got = step(made(), call, state, rules, tokens)
    np.testing.assert_array_equal(got[:3], want[:3])


# Stores, formats, plans.


@pytest.mark.slow
def test_a_store_changes_nothing_and_keeps_all_layers(tmp_path):
    """As other calls would find the prompt; what windows do not reach is never read again."""
    want, stats, _ = a_quarter(0, "lookahead")
    for _ in range(2):  # the second time they are found
        cache = over_tiers(times=0, store=str(tmp_path), host_bytes=0)
        got, stored, call = run(cache)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)
        assert (stored.misses, stored.bytes_moved) == (stats.misses, stats.bytes_moved)
        assert 0 < stored.store.units <= stored.misses
        assert stored.store.bytes_read == stored.store.units * PAGE_BYTES
        assert call.shapes.leaving == (0, 1)
    segments = PageStore.open(tmp_path).segments()
    assert sorted(info.shape[:2] for info in segments) == [(2, 5), (2, 7)]  # layers, pages
    key = next(info.key for info in segments if info.shape[1] == 7)
    with PageStore.open(tmp_path).open_segment(key) as segment:
        units = np.array([[layer, 0, 0, page] for layer in range(2) for page in range(7)], np.int32)
        pages = np.concatenate([unit.result() for unit in segment.read(units)])
    for layer in range(2):
        got = pages.reshape(2, 7, 2, SIZE, 8)[layer]
        for kind, want in enumerate((plainly()[0].keys, plainly()[0].values)):
            want = want[layer][: 7 * SIZE].reshape(7, SIZE, 8)
            np.testing.assert_allclose(got[:, kind], want, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_an_answer_is_kept_with_all_layers(tmp_path):
    """A prompt that goes on where it ended is found in the store, and answered as without it."""
    cache = over_tiers("mean", "100%", times=1, store=str(tmp_path), keep_generated=True)
    first = generate(made(), prompt(61), max_new_tokens=NEW, cache=cache, stop_at_eos=False)
    assert first.stats.tiers.store.pages_kept == (61 + NEW - 1) // SIZE - 61 // SIZE
    longer = [*prompt(61), *first.tokens[0], *prompt(5)]
    prefixes = PrefixCache(tmp_path, config=PrefixConfig("100%", by="all", load_policy="load"))
    options = {"max_new_tokens": 9, "stop_at_eos": False}
    plain = CacheConfig(page_size=SIZE)
    got = generate(made(), longer, cache=plain, prefixes=prefixes, **options)
    assert got.stats.prefix.pages == (61 + NEW - 1) // SIZE
    assert got.tokens == generate(made(), longer, cache=plain, **options).tokens


@pytest.mark.slow
@pytest.mark.parametrize("store", [False, True])
def test_a_format_is_of_the_pages_that_leave(tmp_path, store):
    """In memory and in a store; the other layer's pages are as the model made them."""
    near, stats, _ = run(over_tiers(times=9, format=int4()))
    first = 1  # page of the layer that chooses, which the format leaves as it is
    assert stats.device_bytes == ROWS * (stats.slots + first + 3) * PAGE_BYTES
    where = {"store": str(tmp_path), "host_bytes": 0} if store else {}
    form = dataclasses.replace(int4(), skip_windows=False)
    got, fewer, call = run(over_tiers(times=0, format=form, **where))
    assert_near(got, near)
    assert call.shapes.leaving == (1,)
    assert fewer.bytes_moved < 0.4 * fewer.misses * PAGE_BYTES
    assert np.abs(near[0] - plainly()[0].logits).max() > 1e-3


def test_a_plan_is_of_the_layers_that_choose():
    """Its memory has the window's pages too."""
    cache = over_tiers("mean", times=1)
    profile = TrafficProfile(np.array([[[5.0, 3.0]]]), [4, 6])
    need = (6 + 1 + 3) * PAGE_BYTES
    plan = plan_windows(profile, made(), cache, device_bytes=need)
    assert plan.slots == ((6,),)
    assert plan_windows(profile, made(), cache, device_bytes=need - 1).slots == ((4,),)
    with pytest.raises(KvjaxError, match=f"must be at least {(4 + 1 + 3) * PAGE_BYTES}, what"):
        plan_windows(profile, made(), cache, device_bytes=8 * PAGE_BYTES - 1)
    both = TrafficProfile(np.ones((2, 1, 1)), [4])
    with pytest.raises(KvjaxError, match=r"profile is of \(2, 1\) .* gemma has \(1, 1\) that"):
        plan_windows(both, made(), cache, device_bytes=need)
    wrong = WindowPlan(((4,), (4,)), fingerprint(made()), SIZE)
    for kept, given, message in (
        (plan, need - 1, f"device_bytes is {need - 1}: .* plan need {need} bytes for one row"),
        (wrong, None, r"is of \(2, 1\) .* gemma has \(1, 1\) that choose pages"),
    ):
        planned = dataclasses.replace(
            cache, window=Window(plan=kept), place=Place(device_bytes=given)
        )
        with pytest.raises(KvjaxError, match=message):
            generate(made(), prompt(61), max_new_tokens=NEW, cache=planned)


@pytest.mark.slow
def test_a_profile_counts_what_the_layers_that_choose_fetch():
    cache, prompts = over_tiers("mean", times=1), split()[1][:2]
    profile = profile_windows(made(), prompts, cache, new_tokens=NEW, times=(1, 2))
    assert profile.misses.shape == (1, 1, 2)
    assert profile.misses[0, 0, 0] > profile.misses[0, 0, 1]
    need = int(profile.windows[1] + 1 + 3) * PAGE_BYTES
    plan = plan_windows(profile, made(), cache, device_bytes=need)
    place = Place(device_bytes=need)
    planned = dataclasses.replace(cache, window=Window(plan=plan), place=place)
    options = {"max_new_tokens": NEW, "stop_at_eos": False}
    got = generate(made(), prompts[0], cache=planned, **options)
    assert got.stats.tiers.device_bytes == need
    assert got.tokens == generate(made(), prompts[0], cache=cache, **options).tokens


@pytest.mark.slow
def test_a_calibration_is_of_the_layers_that_choose():
    cache = over_tiers("mean", times=None)
    cache = dataclasses.replace(cache, place=Place())
    found = calibrate(made(), [prompt(104)], cache, new_tokens=6, runs=1, plan=True)
    assert np.shape(found.slots) == (1, 1)
    answer = generate(made(), prompt(98), max_new_tokens=6, cache=found.apply(cache))
    assert answer.stats.tiers.slots <= 14


# What is refused.


def refused(of, message, **place):
    with pytest.raises(KvjaxError, match=message):
        generate(of, prompt(20), cache=over_tiers("mean", times=1, **place))


def test_what_has_no_place(tmp_path):
    refused(
        made(17, "shapes"),
        "store is given and layers of shapes with a sliding window have another shape.*leave out "
        "store",
        store=str(tmp_path),
    )
    need = (3 + 1 + 3) * PAGE_BYTES  # three pages of a step, the open one, and the window's
    message = f"device_bytes is {need - 1}: .*those that never leave need {need} bytes for one row"
    refused(made(), message, device_bytes=need - 1)


# A real model.


def who_lives_where():
    """A text of 80 lines that begins its fourth once more."""
    random = np.random.default_rng(0)
    adjectives = ["red", "old", "tall", "lame", "grey", "wild", "shy", "fat", "blind", "tame"]
    animals = ["heron", "badger", "otter", "lizard", "magpie", "donkey", "ferret", "weasel"]
    names = [f"{adjective} {animal}" for adjective in adjectives for animal in animals]
    random.shuffle(names)
    lines = [f"The {name} lives at number {random.integers(100, 999)}.\n" for name in names]
    return "".join(lines) + f"The {names[3]} lives at number"


@pytest.mark.slow
def test_gemma_draws_what_it_draws_without_tiers(gguf_file):
    """All pages: the same tokens. An eighth: numbers and names still follow each other."""
    of, text = kvjax.load(gguf_file("gemma3-270m"), dtype="float32"), who_lives_where()
    options = {"max_new_tokens": 16, "stop_at_eos": False}
    want = generate(of, text, **options)
    assert want.stats.prompt_tokens > 900  # of which windows reach 512
    by = {"window": Window(3), "place": Place()}
    exact = generate(of, text, cache=CacheConfig(select=Select("100%", "mean"), **by), **options)
    assert exact.tokens == want.tokens
    few = generate(of, text, cache=CacheConfig(select=Select("12.5%"), **by), **options)
    assert re.match(r" \d+\.\nThe \w+ \w+ lives at number", few.texts[0]), few.texts[0]
    tiers, total = few.stats.tiers, 64  # pages that a row has room for
    assert tiers.reads == 3 * 15 * tiers.pages_chosen  # of three layers, one KV head each
    assert tiers.hit_ratio > 0.8
    assert tiers.host_bytes == 3 / 18 * total * of.spec.bytes_per_page(16)
    assert tiers.device_bytes == (3 * tiers.slots + 15 * 33) / 18 * of.spec.bytes_per_page(16)
