"""Faults that offloading is known for; each test's docstring says the fault and the rule.

All run the same programs: three sequences whose steps choose a quarter of the pages, with slots for
little more than a step's.
"""

import dataclasses
import functools
import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.config import CacheConfig
from kvjax.decode.identity import fingerprint
from kvjax.decode.stream import _tiered_step
from kvjax.decode.tiered import TieredCall
from kvjax.errors import KvjaxError
from kvjax.policies import Place, Select, Window, WindowPlan
from kvjax.storage.sequence_pages import SequencePages
from tests.kvjax.decode.forced import forced_logits, prefilled, step
from tests.kvjax.decode.tiny import config, model, prompt

SIZE, LENGTHS, TOKENS = 8, (85, 64, 5), 24
CACHE = CacheConfig(page_size=SIZE, select=Select("25%"), place=Place(), window=Window(1))


@functools.cache
def tiny():
    return model()


@functools.cache
def sequences():
    """Prompts, and what follows them."""
    ids = [prompt(n + TOKENS, seed) for seed, n in enumerate(LENGTHS)]
    return tuple(
        tuple(rows)
        for rows in zip(*((r[:n], r[n:]) for r, n in zip(ids, LENGTHS, strict=True)), strict=True)
    )


@functools.cache
def undisturbed():
    return forced_logits(tiny(), *sequences(), CACHE).logits


def decoding():
    return prefilled(tiny(), sequences()[0], new_tokens=TOKENS + 1, cache=CACHE)


def column(offset):
    return [row[offset] for row in sequences()[1]]


def by_row(call, pool):
    """A pool as [B, S, Hkv, P, D]."""
    layer = call.shapes.slots[0]  # as every other
    rows = np.asarray(pool).reshape(call.shapes.batch, len(layer), layer[0], *pool.shape[2:])
    return rows.swapaxes(1, 2)


def with_pools(call, state, change):
    """The state with `change` made to each pool, [B, S, Hkv, P, D]."""
    cache = state.cache

    def changed(layer, pool):
        rows = by_row(call, pool).copy()
        change(layer, rows)
        return jnp.asarray(rows.swapaxes(1, 2).reshape(pool.shape))

    pools = {
        name: tuple(changed(layer, pool) for layer, pool in enumerate(getattr(cache, name)))
        for name in ("keys", "values")
    }
    return dataclasses.replace(state, cache=dataclasses.replace(cache, **pools))


def slots_of(cache):
    return [(near.slot_of, near.page_in) for near in cache.near]


def host(call):
    """All rows' pages in host memory, copied."""
    return [[array.copy() for array in row.layers] for row in call._pages._rows]


@pytest.mark.slow
def test_what_holds_no_token_is_never_read():
    """Padding points at some page, and a weight of zero does not save from the NaN in it: slots
    without a page, the rest of the open page, and host memory past the last page."""
    with decoding() as (call, state, rules):
        for row, length in enumerate(LENGTHS):
            for layer in range(2):
                call._pages._rows[row].layers[layer][:, :, length // SIZE :] = np.nan

        def poison(layer, rows):
            near = jax.device_get(state.cache.near[layer])
            batch, heads, slots = near.page_in.shape
            for b, h, s in np.ndindex(batch, heads, slots):
                page = near.page_in[b, h, s]
                if page >= call.shapes.pages:
                    rows[b, s, h] = np.nan
                elif b < 3 and page == LENGTHS[b] // SIZE:
                    rows[b, s, h, LENGTHS[b] % SIZE :] = np.nan

        state = with_pools(call, state, poison)
        for offset in range(3):
            state, logits = step(tiny(), call, state, rules, column(offset))
            for row, want in enumerate(undisturbed()):
                np.testing.assert_array_equal(logits[row], want[offset + 1])


@pytest.mark.slow
def test_rows_that_do_not_run_write_nothing():
    """A warm-up or a padded batch that writes through what is left of a sequence destroys it: a row
    that stands still keeps its slots, its index and its pages, and goes on as if nothing was."""
    with decoding() as (call, state, rules):
        for _ in range(SIZE + 1):  # row 1 begins a page, fills it, and row 0 fills one too
            before, pages = jax.device_get(state.cache), host(call)
            state, _ = step(tiny(), call, state, rules, [None, column(0)[1], None])
            after = jax.device_get(state.cache)
            for old, new in zip(
                jax.tree.leaves((slots_of(before), before.index)),
                jax.tree.leaves((slots_of(after), after.index)),
                strict=True,
            ):
                np.testing.assert_array_equal(np.delete(old, 1, 0), np.delete(new, 1, 0))
            for name in ("keys", "values"):
                for old, new in zip(getattr(before, name), getattr(after, name), strict=True):
                    old, new = (np.delete(by_row(call, x), 1, 0) for x in (old, new))
                    np.testing.assert_array_equal(old, new)
            for row in (0, 2):
                for old, new in zip(pages[row], host(call)[row], strict=True):
                    np.testing.assert_array_equal(old, new)
        assert after.lengths.tolist() == [85, 64 + SIZE + 1, 5, 0]
        _, logits = step(tiny(), call, state, rules, column(0))
    for row in (0, 2):
        np.testing.assert_allclose(logits[row], undisturbed()[row][1], atol=1e-5)


def test_a_damaged_sequence_stays_alone():
    """NaN in one sequence must not reach the others, in a product with zero or in a transfer that
    they share; and what it would have written is not kept."""
    with decoding() as (call, state, rules):

        def poison(layer, rows):
            rows[1] = np.nan

        state = with_pools(call, state, poison)
        pages = host(call)
        for offset in range(3):
            state, logits = step(tiny(), call, state, rules, column(offset))
            assert np.isnan(logits[1]).all()
            for row in (0, 2):
                np.testing.assert_allclose(logits[row], undisturbed()[row][offset + 1], atol=1e-5)
        for old, new in zip(pages[1], host(call)[1], strict=True):
            np.testing.assert_array_equal(old, new)
        assert state.finite.tolist() == [True, False, True, True]


def test_a_slot_holds_the_page_that_it_is_said_to_hold():
    """Page numbers and places in a pool drift apart as pages go out and come in: after every step,
    each slot has the very page, bit for bit, that host memory has under its number."""
    moved = 0
    with decoding() as (call, state, rules):
        for offset in range(TOKENS):
            state, _ = step(tiny(), call, state, rules, column(offset))
            cache = jax.device_get(state.cache)
            for layer in range(2):
                near = cache.near[layer]
                pools = [by_row(call, getattr(cache, name)[layer]) for name in ("keys", "values")]
                for b, h in np.ndindex(3, 2):
                    slots = near.slot_of[b, h]
                    held = np.flatnonzero(slots < call.shapes.slots[layer][h])
                    assert near.page_in[b, h, slots[held]].tolist() == held.tolist()
                    assert (near.page_in[b, h] < call.shapes.pages).sum() == len(held)
                    full = held[held < cache.lengths[b] // SIZE]
                    for kind, pool in enumerate(pools):
                        want = call._pages._rows[b].layers[layer][kind, h, full]
                        np.testing.assert_array_equal(pool[b, slots[full], h], want)
                    moved += len(full)
    assert moved > 900


@pytest.mark.parametrize("late", ["put", "append", "collect"])
def test_timing_changes_nothing(monkeypatch, late):
    """A copy that reads a page before it is written, or one that lands in pages that were given
    away meanwhile: whichever callback is late, every step's logits are the same, to the bit."""
    whole = getattr(SequencePages, late)
    calls = []

    def slow(pages, *args, **options):
        calls.append(late)
        if len(calls) % 3 == 0:
            time.sleep(0.01)
        return whole(pages, *args, **options)

    monkeypatch.setattr(SequencePages, late, slow)
    got = forced_logits(tiny(), *sequences(), CACHE).logits
    assert len(calls) > 5
    for one, other in zip(got, undisturbed(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_nothing_chosen_is_no_hit():
    """0 of 0 reported as a full hit hides that nothing was there."""
    of = sequences()[0][2:], [sequences()[1][2][:2]]  # 7 tokens: no page is full
    stats = forced_logits(tiny(), *of, CACHE).stats
    assert (stats.reads, stats.misses, stats.bytes_moved, stats.hit_ratio) == (0, 0, 0, None)


def test_threads_end_with_their_call(tmp_path):
    """Readers that outlive what they read for take the next call's requests, and write into its
    memory: calls leave no thread, not even those that end in an error."""
    cache = dataclasses.replace(CACHE, place=Place(store=str(tmp_path)))
    before = set(threading.enumerate())

    def call(fault):
        with prefilled(tiny(), sequences()[0], new_tokens=TOKENS + 1, cache=cache):
            assert set(threading.enumerate()) > before
            raise fault

    for number in range(5):
        with pytest.raises(KeyboardInterrupt):
            call(KeyboardInterrupt(number))
        assert set(threading.enumerate()) == before


def test_a_pool_is_no_larger_than_int32_can_index():
    """Offsets past 2^31 elements wrap around, into another sequence's pages."""
    long = dataclasses.replace(tiny(), config=config(max_context=1 << 28))
    for place in (None, Place()):
        cache = CacheConfig(select=Select("100%"), place=place)
        with pytest.raises(KvjaxError, match="pool"):
            TieredCall(long, [[1]], new_tokens=(1 << 28) - 1, cache=cache)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, "equal", "planned"])
def test_a_step_copies_no_pool(window):
    """A pool that is read after it was written in the same step is copied whole, each step: all its
    bytes are updated in place."""
    cache = CACHE
    if window is None:
        cache = dataclasses.replace(CACHE, place=None, window=None)
    elif window == "planned":
        plan = WindowPlan(((4, 11), (7, 5)), fingerprint(tiny()), SIZE)
        cache = dataclasses.replace(CACHE, window=Window(plan=plan))
    with prefilled(tiny(), sequences()[0], new_tokens=TOKENS + 1, cache=cache) as (
        call,
        state,
        rules,
    ):
        static = (tiny().graphdef, call.shapes)

        def program(params, state, rules):
            return _tiered_step(static, params, state, rules)

        made = jax.jit(program, donate_argnums=1).lower(tiny().params, state, rules).compile()
        pools = (*state.cache.keys, *state.cache.values)
        assert made.memory_analysis().alias_size_in_bytes >= sum(pool.nbytes for pool in pools)
        for shape in {",".join(map(str, pool.shape)) for pool in pools}:
            copies = re.findall(rf"= \w+\[{shape}\]\S* copy(?:-start)?\(.*", made.as_text())
            assert not copies, copies[0]
