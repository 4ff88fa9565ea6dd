"""Micro-batches say when pages are selected and read, never what comes of it."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest

from kvjax.config import CacheConfig
from kvjax.errors import KvjaxError
from kvjax.policies import Place, Select, Window
from kvjax.storage.sequence_pages import SequencePages
from tests.kvjax.decode.forced import forced_logits
from tests.kvjax.decode.tiny import model, no_cache_logits, prompt

SIZE, NEW = 8, 10
LENGTHS = (41, 17, 30)  # of a batch of 4; rows fill pages in different steps
PROMPTS = [prompt(length, row) for row, length in enumerate(LENGTHS)]
GIVEN = [prompt(NEW, 100 + row) for row in range(len(LENGTHS))]


def cache(budget, parts, **place):
    return CacheConfig(
        page_size=SIZE,
        select=Select(budget, "mean"),
        window=Window(1),
        place=Place(micro_batches=parts, **place),
    )


@functools.cache
def whole():
    """The batch in one part, from host memory."""
    return forced_logits(model(), PROMPTS, GIVEN, cache("25%", 1))


@pytest.mark.slow
@pytest.mark.parametrize("parts", [4, 64])
def test_parts_change_nothing(parts):
    found = forced_logits(model(), PROMPTS, GIVEN, cache("25%", parts))
    assert found.call.shapes.micro_batches == min(parts, 4)
    for mine, one in zip(found.logits, whole().logits, strict=True):
        np.testing.assert_allclose(mine, one, rtol=1e-5, atol=1e-5)
    same = ("reads", "misses", "bytes_moved")
    assert [getattr(found.stats, n) for n in same] == [getattr(whole().stats, n) for n in same]
    assert found.stats.misses > 0


@pytest.mark.slow
def test_all_pages_in_parts_are_exact():
    found = forced_logits(model(), PROMPTS, GIVEN, cache("100%", 4))
    for row, logits in enumerate(found.logits):
        exact = no_cache_logits(model(), PROMPTS[row] + GIVEN[row])
        np.testing.assert_allclose(logits, exact[-len(logits) :], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_every_part_is_asked_for_before_any_is_waited_for(tmp_path, monkeypatch):
    """From a store, whose reads go on meanwhile."""
    calls = []

    def noted(name, method):
        def call(pages, *arguments, first_row=0, **options):
            calls.append((name, first_row))
            return method(pages, *arguments, first_row=first_row, **options)

        return call

    for name in ("issue", "collect"):
        monkeypatch.setattr(SequencePages, name, noted(name, getattr(SequencePages, name)))
    stored = cache("25%", 2, store=str(tmp_path / "pages"), host_bytes=0)
    found = forced_logits(model(), PROMPTS, GIVEN, stored)
    for mine, one in zip(found.logits, whole().logits, strict=True):
        np.testing.assert_allclose(mine, one, rtol=1e-5, atol=1e-5)
    assert {row for _, row in calls} == {0, 2}
    both = [("issue", 0), ("issue", 2), ("collect", 0), ("collect", 2)]
    assert any(calls[at : at + 4] == both for at in range(len(calls)))
    assert (("collect", 0), ("issue", 2)) not in set(itertools.pairwise(calls))


def test_parts_are_powers_of_two():
    for parts in (3, 0, True, "2"):
        with pytest.raises(KvjaxError, match="micro_batches is"):
            Place(micro_batches=parts)
    assert dataclasses.replace(Place(), micro_batches=8).micro_batches == 8
