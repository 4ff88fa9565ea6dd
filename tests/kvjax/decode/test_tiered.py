"""Decoding over tiers: exact where all pages are read, else equal to NumPy, however pages move."""

import concurrent.futures
import dataclasses
import functools
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.config import CacheConfig
from kvjax.decode import Sampling, generate
from kvjax.decode.meter import Meter
from kvjax.decode.program import compilations
from kvjax.decode.results import TierStats
from kvjax.decode.tiered_plan import tiered_plan
from kvjax.errors import KvjaxError
from kvjax.model import from_checkpoint
from kvjax.models import random_checkpoint
from kvjax.policies import Place, Select, Window
from kvjax.storage import handles
from kvjax.storage.segment import Segment
from kvjax.storage.sequence_pages import SequencePages
from tests.kvjax.decode.forced import forced_logits, prefilled, step
from tests.kvjax.decode.plain_tiers import PlainTiers
from tests.kvjax.decode.tiny import attention, config, model, no_cache_logits, prompt

SIZE = 8


@functools.cache
def made(name="llama"):
    if name == "one layer":  # half as long to compile
        checkpoint = random_checkpoint(config(attention()), seed=3)
        return from_checkpoint(checkpoint, name=name, dtype="float32")
    return model(name)


def over_tiers(by="keys", budget="25%", *, times=None, evict="lookahead", dtype=None, **place):
    """A configuration; without `times`, all pages stay on the device."""
    window = None if times is None else Window(times, evict)
    return CacheConfig(
        page_size=SIZE,
        dtype=dtype,
        select=Select(budget, by),
        window=window,
        place=None if times is None else Place(**place),
    )


def split(lengths, new, seed=0):
    """Prompts of these lengths, and `new` tokens that follow each."""
    ids = [prompt(n + new, seed + row) for row, n in enumerate(lengths)]
    return (
        ids,
        [r[:n] for r, n in zip(ids, lengths, strict=True)],
        [r[n:] for r, n in zip(ids, lengths, strict=True)],
    )


# All pages are read: nothing else may be seen than without a cache.

NEW = 12
BATCHES = [(41, 7, 8), (40, 9, 3), (38, 16, 1)]  # of one shape: pages begin, end and are open

EXACT = [
    ("one layer", "mean", 1, "lru"),
    ("llama", "low-bit", 0, "lookahead"),
    ("llama", "low-bit", None, "lookahead"),
    ("mha", "quest", 3, "lookahead"),
    ("soft_caps", "keys", 1.5, "lfu"),
    ("latents", "low-bit", 1, "lookahead"),
]


@pytest.mark.parametrize(("name", "by", "times", "evict"), EXACT)
def test_all_pages_are_exact(name, by, times, evict):
    for lengths in BATCHES:
        ids, prompts, given = split(lengths, NEW)
        given[1] = given[1][:-3]  # a row that ends before the others
        got, _, call = forced_logits(
            made(name), prompts, given, over_tiers(by, "100%", times=times, evict=evict)
        )
        assert call.shapes.batch == 4
        for row, n in enumerate(lengths):
            want = no_cache_logits(made(name), ids[row])[n - 1 :][: len(got[row])]
            np.testing.assert_allclose(got[row], want, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_prompt_alone_and_shorter_than_a_page():
    for length in (1, 5, 7):
        ids, prompts, given = split((length,), 9)
        cache = over_tiers("low-bit", "25%", times=1)
        (got,), stats, call = forced_logits(made("one layer"), prompts, given, cache)
        assert call.shapes.batch == 1
        np.testing.assert_allclose(
            got, no_cache_logits(made("one layer"), ids[0])[length - 1 :], atol=1e-5
        )
        assert stats.pages_chosen == 2  # the first and the last are always read


@pytest.mark.slow
def test_a_cache_of_fewer_bits_is_near():
    """Pages cross the host in bfloat16 as they are."""
    ids, prompts, given = split(BATCHES[0], NEW)
    cache = over_tiers("low-bit", "100%", times=0, dtype="bfloat16")
    got, stats, _ = forced_logits(made("one layer"), prompts, given, cache)
    for row, n in enumerate(BATCHES[0]):
        want = no_cache_logits(made("one layer"), ids[row])[n - 1 :]
        assert 1e-4 < np.abs(got[row] - want).mean() < 0.05
    assert stats.bytes_moved == stats.misses * PAGE_BYTES / 2


# A quarter of the pages is read.

LENGTHS, TOKENS = (85, 64, 30), 31
TOTAL, HELD = 16, 12  # pages that a row, and a prompt, has room for
COUNTS = (4, 3, 2)  # a quarter of 15, 12 and 8 pages
HEADS = 4  # of two layers
PAGE_BYTES = 2 * SIZE * 8 * 4

WINDOWS = [
    (None, "lookahead"),
    (0, "lookahead"),
    (1, "lookahead"),
    (2, "lookahead"),
    (1, "lru"),
    (2, "lfu"),
]
every_window = pytest.mark.parametrize(("times", "evict"), WINDOWS)


@functools.cache
def plainly():
    """The three sequences in NumPy, by the exact attention of a quarter of the pages."""
    ids, _, _ = split(LENGTHS, TOKENS)
    return [
        PlainTiers(made(), row, prompt=n, size=SIZE, count=count)
        for row, n, count in zip(ids, LENGTHS, COUNTS, strict=True)
    ]


@functools.cache
def a_quarter(times, evict):
    _, prompts, given = split(LENGTHS, TOKENS)
    return forced_logits(made(), prompts, given, over_tiers(times=times, evict=evict))


@pytest.mark.slow
def test_the_oracle_reads_less_than_everything():
    ids, _, _ = split(LENGTHS, TOKENS)
    for row, n, sparse in zip(ids, LENGTHS, plainly(), strict=True):
        exact = PlainTiers(made(), row, prompt=n, size=SIZE, count=TOTAL)
        want = no_cache_logits(made(), row)[n - 1 :]
        np.testing.assert_allclose(exact.logits, want, atol=1e-5, rtol=1e-5)
        assert np.abs(sparse.logits - want).max() > 1


@every_window
def test_a_quarter_equals_the_oracle(times, evict):
    """The same pages are read wherever they were, as pages fill and some are fetched again."""
    got, _, call = a_quarter(times, evict)
    assert (call.shapes.pages, call.shapes.tokens // SIZE) == (TOTAL, HELD)
    for row, want in zip(got, plainly(), strict=True):
        np.testing.assert_allclose(row, want.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_pages_chosen_by_a_sketch_do_not_depend_on_where_they_are():
    _, prompts, given = split(LENGTHS, TOKENS)
    near, fetched = (
        forced_logits(made("one layer"), prompts, given, over_tiers("mean", times=times))
        for times in (None, 1)
    )
    assert fetched.stats.misses > near.stats.misses == 0
    for one, other in zip(near.logits, fetched.logits, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)


@every_window
def test_what_moves_is_what_was_not_near(times, evict):
    """Every miss, and nothing else, crosses; and the window has kept what its rule keeps."""
    stats = a_quarter(times, evict).stats
    reads = HEADS * sum(
        min(count, (n + t) // SIZE)
        for n, count in zip(LENGTHS, COUNTS, strict=True)
        for t in range(TOKENS)
    )
    assert stats.reads == reads
    assert stats.bytes_moved == stats.misses * PAGE_BYTES
    assert stats.slots == {None: TOTAL, 0: 5, 1: 5, 2: 9}[times]
    expected = 0
    if times is not None:
        window = {"slots": stats.slots, "total": TOTAL, "held": HELD, "evict": evict}
        expected = sum(plain.misses(keeps=times > 0, **window) for plain in plainly())
    assert stats.misses == expected
    assert stats.hit_ratio == 1 - expected / reads


def test_without_a_window_everything_is_fetched():
    """All but the page that the step before was filling, when it is full."""
    stats = a_quarter(0, "lookahead").stats
    just_filled = sum((n + t) % SIZE == 0 for n in LENGTHS for t in range(1, TOKENS))
    assert stats.misses == stats.reads - HEADS * just_filled


def test_a_larger_window_misses_less():
    misses = [a_quarter(times, "lookahead").stats.misses for times in (0, 1, 2)]
    assert misses == sorted(misses, reverse=True)
    assert misses[0] > 4 * misses[2]


@every_window
def test_pages_are_kept_as_they_were_computed(times, evict):
    """The prompt's pages and those that filled since, of every layer, head and row."""
    call = a_quarter(times, evict).call
    if times is None:
        assert call._pages is None
        return
    ids = np.arange(TOTAL, dtype=np.int32)[None, None].repeat(4, 0).repeat(2, 1)
    for layer, row in itertools.product(range(2), range(3)):
        full = (LENGTHS[row] + TOKENS) // SIZE
        both = np.zeros((2, 4, TOTAL, 2, *call._pages._page), np.float32)
        call._pages.collect(0, layer, ids, out=tuple(both))
        plain = plainly()[row]
        both = both[:, row, :full]
        for got, want in zip(both, (plain.keys[layer], plain.values[layer]), strict=True):
            want = want[: full * SIZE].reshape(full, SIZE, *want.shape[1:]).swapaxes(1, 2)
            np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_few_pages_of_latents_equal_the_oracle(tmp_path):
    """Which expands them; they are in a store, and the second time found there."""
    of = made("latents")
    _, prompts, given = split(LENGTHS[:1], TOKENS)
    ids, sizes = prompts[0] + given[0], {"count": COUNTS[0], "size": SIZE}
    want = PlainTiers(of, ids, prompt=LENGTHS[0], **sizes)
    assert np.abs(want.logits - no_cache_logits(of, ids)[LENGTHS[0] - 1 :]).max() > 0.1
    cache = over_tiers(times=1, store=str(tmp_path), host_bytes=0)
    for _ in range(2):
        (got,), stats, _ = forced_logits(of, prompts, given, cache)
        np.testing.assert_allclose(got, want.logits, atol=1e-4, rtol=1e-4)
        # Both halves of a page's rows, each as wide as the largest layer needs.
        width = -(-max(sum(x.pool_dims[1:]) for x in of.spec.layers) // 2)
        assert stats.bytes_moved == stats.misses * 2 * SIZE * width * 4
        assert stats.slots == 5
        window = {"slots": 5, "total": TOTAL, "held": HELD}
        assert stats.misses == want.misses(**window)
        assert stats.device_bytes == 5 * of.spec.bytes_per_page(SIZE)
        assert stats.store.bytes_read == stats.store.units * 2 * SIZE * width * 4 > 0


@pytest.mark.parametrize(("times", "elements"), [(None, 14 + 19), (1, 2 * 2 * 10)])
def test_a_token_of_latents_takes_what_is_kept_of_it(times, elements):
    """Away from the device, of every layer two halves of the larger one's row."""
    shapes, _ = tiered_plan(made("latents"), LENGTHS[:1], TOKENS, over_tiers(times=times))
    tiers = TierStats(
        pages_chosen=1,
        slots=5,
        least_slots=5,
        reads=0,
        misses=0,
        bytes_moved=0,
        index_bytes=0,
        device_bytes=0,
        host_bytes=0,
    )
    stats = Meter().stats(shapes, prompt_tokens=9, new_tokens=1, pages_used=2, tiers=tiers)
    assert stats.bytes_per_token == elements * 4


# Prompts in a page store.


@pytest.mark.parametrize("host_bytes", [None, 0, 5 * PAGE_BYTES])
def test_a_store_changes_nothing(tmp_path, host_bytes):
    """Not the logits, not what was near; a prompt shorter than a page has nothing to store."""
    want, stats, _ = a_quarter(1, "lookahead")
    _, prompts, given = split(LENGTHS, TOKENS)
    place = {"store": str(tmp_path), "host_bytes": host_bytes}
    for _ in range(2):  # the second time they are found
        got, stored, _ = forced_logits(made(), prompts, given, over_tiers(times=1, **place))
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)
        assert (stored.misses, stored.bytes_moved) == (stats.misses, stats.bytes_moved)
        assert stored.host_bytes < stats.host_bytes
        assert 0 < stored.store.units <= stored.misses
        if host_bytes == 0:
            assert stored.store.host_hits == 0
            assert stored.store.bytes_read == stored.store.units * PAGE_BYTES


def test_prompts_that_share_a_beginning_share_a_store(tmp_path):
    """Whichever is written first; one that has grown may replace what it grew from."""
    ids = prompt(max(LENGTHS) + TOKENS)
    for lengths in (LENGTHS, (64, 85, 85)):
        prompts = [ids[:n] for n in lengths]
        given = [ids[n : n + TOKENS] for n in lengths]
        want = forced_logits(made(), prompts, given, over_tiers(times=1)).logits
        cache = over_tiers(times=1, store=str(tmp_path), host_bytes=0)
        got = forced_logits(made(), prompts, given, cache).logits
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)


# generate


@pytest.mark.slow
def test_generate_draws_what_it_draws_without_tiers():
    """With a key, at 100 %; rows end on their own."""
    prompts = [prompt(n, seed) for seed, n in enumerate(BATCHES[0])]
    options = {
        "max_new_tokens": NEW,
        "sampling": Sampling(temperature=1.5, top_k=20),
        "stop_tokens": [7, 8, 9],
    }
    reasons = []
    for key in range(3):
        want = generate(made(), prompts, key=key, cache=CacheConfig(page_size=SIZE), **options)
        got = generate(
            made(), prompts, key=key, cache=over_tiers("low-bit", "100%", times=0), **options
        )
        assert got.tokens == want.tokens
        assert got.finish_reasons == want.finish_reasons
        assert got.stats.prompt_tokens == sum(map(len, prompts))
        assert got.stats.new_tokens == sum(map(len, got.tokens))
        reasons += got.finish_reasons
    assert set(reasons) == {"stop", "length"}


def test_calls_at_once_do_not_see_each_other():
    """Each reads its own pages, whichever thread is first."""
    batches = [[prompt(n, seed) for n in BATCHES[0]] for seed in range(6)]
    cache = over_tiers("low-bit", "100%", times=0)

    def draw(prompts):
        options = {"sampling": Sampling(temperature=1.5, top_k=20), "cache": cache}
        return generate(made(), prompts, max_new_tokens=NEW, **options).tokens

    alone = [draw(prompts) for prompts in batches]
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        assert list(threads.map(draw, batches)) == alone


def test_one_set_of_programs_serves_every_prompt_of_a_shape():
    for _ in range(2):
        before = compilations()
        for lengths in BATCHES:
            _, prompts, _ = split(lengths, 0)
            cache = over_tiers("low-bit", "100%", times=0)
            generate(made(), prompts, max_new_tokens=NEW, sampling=Sampling(0.7, 20), cache=cache)
    assert compilations() == before


# What goes wrong.


class Unreachable:
    """Pages that can be neither read nor written."""

    nbytes = 0

    def __getitem__(self, at):
        raise OSError("host memory is on fire")

    def __setitem__(self, at, pages):
        raise OSError("host memory is on fire")


@pytest.fixture
def failing(monkeypatch):
    """Makes a method of `SequencePages` fail inside, from its n-th call on."""

    def fail(method, after):
        whole, calls = getattr(SequencePages, method), itertools.count(1)

        def broken(pages, *args, **options):
            if next(calls) == after:
                for row in pages._rows:
                    row.layers = [Unreachable()] * len(row.layers)
            return whole(pages, *args, **options)

        monkeypatch.setattr(SequencePages, method, broken)

    return fail


@pytest.mark.parametrize(
    ("method", "after"), [("put", 3), ("collect", 1), ("collect", 9), ("append", 2)]
)
def test_host_memory_that_fails_is_an_error_and_no_text(failing, method, after):
    """All rows end, and say so."""
    prompts = [prompt(n, seed) for seed, n in enumerate(BATCHES[0])]
    options = {"max_new_tokens": NEW, "cache": over_tiers("low-bit", "100%", times=0)}
    options["sampling"] = Sampling(temperature=1.5, top_k=20)
    failing(method, after)
    with pytest.raises(
        KvjaxError, match=r"prompt \d: its pages could not be written or read again: .*fire"
    ) as error:
        generate(made(), prompts, **options)
    assert isinstance(error.value.__cause__, OSError)


@pytest.mark.parametrize("fault", ["fails", "stalls"])
def test_a_store_that_fails_or_stalls_while_decoding(monkeypatch, tmp_path, fault):
    """The error says which page; the next call is as if nothing had been."""
    _, prompts, given = split(LENGTHS, TOKENS)
    whole, well = Segment.read, [True]

    def read(segment, units):
        if well[0]:
            return whole(segment, units)
        if fault == "stalls":
            return [concurrent.futures.Future() for _ in units]
        raise OSError("disk on fire")

    monkeypatch.setattr(Segment, "read", read)
    timeout = {"timeout_s": 0.2} if fault == "stalls" else {}
    cache = over_tiers(times=1, store=str(tmp_path), host_bytes=0, **timeout)
    with prefilled(made(), prompts, new_tokens=TOKENS + 1, cache=cache) as (call, state, rules):
        well[0] = False
        began = time.monotonic()
        for offset in range(3):
            state, _ = step(made(), call, state, rules, [row[offset] for row in given])
        assert time.monotonic() - began < 60  # the longest wait is 0.2 s, compiling takes longer
        with pytest.raises(KvjaxError, match=r"page \d+ of layer 0, KV head [01]") as error:
            call.check()
    assert ("on fire" if fault == "fails" else "in time") in str(error.value)
    well[0] = True
    cache = over_tiers(times=1, store=str(tmp_path), host_bytes=0)
    got = forced_logits(made(), prompts, given, cache).logits
    for one, other in zip(got, a_quarter(1, "lookahead").logits, strict=True):
        np.testing.assert_array_equal(one, other)


def test_nothing_of_another_batch_is_left_behind():
    """Handles end with their call, also when it raises."""
    before = dict(handles._held)
    _, prompts, _ = split(BATCHES[0], 0)
    cache = over_tiers("low-bit", "100%", times=0)

    def interrupted():
        with prefilled(made(), prompts, new_tokens=NEW + 1, cache=cache):
            assert len(handles._held) == len(before) + 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert handles._held == before


NAN = {"max_new_tokens": NEW, "sampling": Sampling(temperature=1.5, top_k=20)}


@pytest.mark.parametrize("weight", ["q", "k", "v"])
def test_weights_that_are_not_finite_are_an_error_and_no_text(weight):
    _, prompts, _ = split(BATCHES[0], 0)

    def poisoned(path, array):
        return array * jnp.nan if f"'{weight}'" in jax.tree_util.keystr(path) else array

    of = made()
    of = dataclasses.replace(of, params=jax.tree_util.tree_map_with_path(poisoned, of.params))
    cache = over_tiers("low-bit", "100%", times=0)
    with pytest.raises(KvjaxError, match="prompt 0: the logits of llama are not finite"):
        generate(of, prompts, cache=cache, **NAN)


@pytest.mark.parametrize("flat", ["q", "k"])
def test_pages_of_equal_scores(flat):
    """Queries or keys of zeros give all pages the same mass: the earlier ones are read."""
    ids, prompts, given = split(LENGTHS, TOKENS)
    checkpoint = random_checkpoint(config(), seed=7)
    for name, value in checkpoint.weights.items():
        if name.endswith(f"{flat}.weight"):
            value[:] = 0
    of = from_checkpoint(checkpoint, name="llama", dtype="float32")
    got = forced_logits(of, prompts, given, over_tiers(times=1)).logits
    for row, (n, count) in enumerate(zip(LENGTHS, COUNTS, strict=True)):
        plain = PlainTiers(of, ids[row], prompt=n, size=SIZE, count=count)
        assert plain.steps[0][-1][1] == [*range(count - 1), (n + TOKENS - 1) // SIZE - 1]
        np.testing.assert_allclose(got[row], plain.logits, atol=1e-4, rtol=1e-4)
