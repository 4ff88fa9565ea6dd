"""`reserve`, `append`, `fork` and `release` in any order, against an allocator in plain Python."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvjax.cache import init
from kvjax.errors import KvjaxError
from tests.kvjax.cache.plain import (
    SPEC,
    assert_gathers,
    assert_same,
    ceil_div,
    chunk,
    do_append,
    do_fork,
    do_gather,
    do_release,
    do_reserve,
    poisoned,
)

PAGES, BATCH, WIDTH, SIZE, ROOM = 7, 3, 4, 2, 12

rows = st.integers(0, BATCH - 1)
counts = st.lists(st.integers(0, 4), min_size=BATCH, max_size=BATCH)


class Allocator(RuleBasedStateMachine):
    """The oracle: lists of pages and of tokens, and the rules in their plainest form."""

    def __init__(self):
        super().__init__()
        self.cache = poisoned(
            init(SPEC, num_pages=PAGES, batch=BATCH, max_pages=WIDTH, page_size=SIZE)
        )
        self.pages = [[] for _ in range(BATCH)]
        self.tokens = [[] for _ in range(BATCH)]
        self.next_token = 1

    def owned(self, without=None):
        return {p for b, pages in enumerate(self.pages) if b != without for p in pages}

    def plan(self, wanted):
        """Whether the request can be met, and the outcome it must report."""
        totals = [ceil_div(len(t) + n, SIZE) for t, n in zip(self.tokens, wanted, strict=True)]
        extra = [
            max(total - len(pages), 0) if n else 0
            for total, pages, n in zip(totals, self.pages, wanted, strict=True)
        ]
        longest = max(
            total if n else len(pages)
            for total, pages, n in zip(totals, self.pages, wanted, strict=True)
        )
        free = sorted(set(range(PAGES)) - self.owned())
        ok = sum(extra) <= len(free) and longest <= WIDTH
        return ok, extra, free, (ok, sum(extra), len(free), longest)

    def settle(self, updated, reservation, outcome):
        """Check what was reported; a failure changed nothing and is raised by `check`."""
        assert tuple(x.item() for x in jax.tree.leaves(reservation)) == (*outcome, 0)
        ok, needed, free, longest = outcome
        if ok:
            reservation.check(self.cache)
        else:
            assert_same(updated, self.cache)
            message = f"needs {longest} pages" if longest > WIDTH else f"{needed} more pages"
            with pytest.raises(KvjaxError, match=message) as caught:
                reservation.check(self.cache)
            if longest <= WIDTH:
                assert (caught.value.needed, caught.value.free) == (needed, free)
        self.cache = updated

    def take(self, extra, free):
        for pages, count in zip(self.pages, extra, strict=True):
            pages += free[:count]
            free = free[count:]

    @rule(wanted=counts)
    def reserve(self, wanted):
        ok, extra, free, outcome = self.plan(wanted)
        self.settle(*do_reserve(self.cache, jnp.asarray(wanted, jnp.int32)), outcome)
        if ok:
            self.take(extra, free)

    @rule(wanted=counts)
    def append(self, wanted):
        ok, extra, free, outcome = self.plan(wanted)
        new = []
        for count in wanted:
            new.append(list(range(self.next_token, self.next_token + count)))
            self.next_token += count
        self.settle(*do_append(self.cache, *chunk(new, ROOM)), outcome)
        if ok:
            self.take(extra, free)
            self.tokens = [old + more for old, more in zip(self.tokens, new, strict=True)]

    @rule(source=rows, step=st.integers(1, BATCH - 1))
    def fork(self, source, step):
        target = (source + step) % BATCH
        free = sorted(set(range(PAGES)) - self.owned(without=target))
        full, tail = divmod(len(self.tokens[source]), SIZE)
        needed = int(tail > 0)
        longest = max(full + needed, *map(len, self.pages))
        outcome = (needed <= len(free), needed, len(free), longest)
        self.settle(*do_fork(self.cache, jnp.int32(source), jnp.int32(target)), outcome)
        if outcome[0]:
            self.pages[target] = self.pages[source][:full] + free[:needed]
            self.tokens[target] = list(self.tokens[source])

    @rule(marked=st.lists(st.booleans(), min_size=BATCH, max_size=BATCH))
    def release(self, marked):
        before = self.cache
        self.cache = do_release(self.cache, jnp.asarray(marked))
        if not any(mark and pages for mark, pages in zip(marked, self.pages, strict=True)):
            assert_same(self.cache, before)  # releasing the empty changes nothing
        for b, mark in enumerate(marked):
            if mark:
                self.pages[b], self.tokens[b] = [], []

    @invariant()
    def tables_and_references_agree(self):
        table = np.full((BATCH, WIDTH), PAGES)
        for b, pages in enumerate(self.pages):
            table[b, : len(pages)] = pages
        np.testing.assert_array_equal(self.cache.block_tables, table)
        refs = np.bincount(table.reshape(-1), minlength=PAGES + 1)[:PAGES]
        np.testing.assert_array_equal(self.cache.page_refs, refs)
        assert int(self.cache.pages_free) + len(self.owned()) == PAGES
        np.testing.assert_array_equal(self.cache.pages_held, [len(p) for p in self.pages])

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        assert_gathers(do_gather(self.cache, 1), self.tokens, 1)


TestAllocator = Allocator.TestCase
TestAllocator.settings = hypothesis.settings(
    max_examples=40,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)


def test_hundreds_of_requests_leave_every_page_free():
    rng = np.random.default_rng(5)
    cache = init(SPEC, num_pages=PAGES, batch=BATCH, max_pages=WIDTH, page_size=SIZE)
    refused = 0
    for token in range(1, 301):
        action = rng.integers(4)
        if action < 2:
            wanted = rng.integers(0, 5, BATCH)
            new = [[token] * int(n) for n in wanted]
            cache, reservation = do_append(cache, *chunk(new, ROOM))
            refused += not bool(reservation.ok)
        elif action == 2:
            source, step = rng.integers(BATCH), rng.integers(1, BATCH)
            cache, _ = do_fork(cache, jnp.int32(source), jnp.int32((source + step) % BATCH))
        else:
            cache = do_release(cache, jnp.asarray(rng.random(BATCH) < 0.5))
    assert 20 < refused < 280
    cache = do_release(cache, jnp.ones(BATCH, bool))
    assert int(cache.pages_free) == PAGES
    assert cache.lengths.tolist() == [0] * BATCH
