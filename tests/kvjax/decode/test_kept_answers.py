"""Pages of generated tokens in the store: what prefill would store, found by what goes on."""

import functools

import numpy as np
import pytest

from kvjax.config import CacheConfig
from kvjax.decode import PrefixCache, PrefixConfig, RowsFailedError, Sampling, generate, stream
from kvjax.decode.reordering import pages_of
from kvjax.model import from_checkpoint
from kvjax.models import random_checkpoint
from kvjax.policies import Place, Select, Window
from kvjax.storage.errors import StoreError
from kvjax.storage.page_store import PageStore
from kvjax.storage.segment import Segment
from kvjax.storage.sequence_pages import SequencePages
from tests.kvjax.decode.tiny import attention, config, prompt
from tests.storage.pages import bytes_below

SIZE = 8
PROMPTS = [prompt(n, seed) for seed, n in enumerate((60, 41, 5))]
NEW = 30
DRAW = {"max_new_tokens": NEW, "sampling": Sampling(1.5, 20), "stop_at_eos": False}

pytestmark = pytest.mark.slow


@functools.cache
def tiny():
    return from_checkpoint(
        random_checkpoint(config(attention()), seed=3), name="tiny", dtype="float32"
    )


def cache_in(folder, budget="100%", **place):
    options = {"store": folder, "host_bytes": 0, "keep_generated": True, **place}
    return CacheConfig(
        page_size=SIZE, select=Select(budget, by="mean"), window=Window(0), place=Place(**options)
    )


def call(ids, folder, *, new=NEW, **options):
    return generate(
        tiny(), ids, cache=cache_in(folder, **options), **{**DRAW, "max_new_tokens": new}
    )


@functools.cache
def plain(length=NEW):
    cache = CacheConfig(page_size=SIZE)
    return generate(tiny(), PROMPTS, cache=cache, **{**DRAW, "max_new_tokens": length}).tokens


def test_what_is_kept_is_what_prefill_would_store(tmp_path):
    """Of every row: its prompt, what it drew, and the page in which they meet."""
    result = call(PROMPTS, tmp_path / "kept")
    assert result.tokens == plain()
    store = PageStore.open(tmp_path / "kept")
    assert not store.verify()
    tokens = [[*ids, *drawn[:-1]] for ids, drawn in zip(PROMPTS, plain(), strict=True)]
    kept = sum(len(ids) // SIZE for ids in tokens) - sum(len(ids) // SIZE for ids in PROMPTS)
    assert result.stats.tiers.store.pages_kept == kept
    assert result.stats.tiers.store.not_kept is None
    reference = PrefixCache(tmp_path / "prefilled")
    by_tokens = {info.tokens: info for info in store.segments()}
    for ids in tokens:
        want = reference.add(tiny(), ids, cache=CacheConfig(page_size=SIZE))
        info = by_tokens[len(ids)]
        assert (info.key, info.shape) == (want.key, want.shape)
        with store.open_segment(info.key) as one, reference.store.open_segment(want.key) as other:
            for got, exact in zip(pages_of(one), pages_of(other), strict=True):
                np.testing.assert_allclose(got, exact, atol=1e-5, rtol=1e-5)
            for name, array in other.sketches("low-bit").items():
                got = one.sketch(name)
                assert got.shape == array.shape
                assert got.dtype == array.dtype


def test_the_next_turn_reads_them_from_the_store(tmp_path, monkeypatch):
    """And writes no more than the pages that are new."""
    first = call(PROMPTS[0], tmp_path)
    asked = [*PROMPTS[0], *first.tokens[0], 1, 2, 3]
    size = bytes_below(tmp_path / "data")
    read, whole = [], Segment.read

    def noted(segment, units):
        read.extend(np.asarray(units)[:, 3].tolist())
        return whole(segment, units)

    monkeypatch.setattr(Segment, "read", noted)
    second = call(asked, tmp_path, new=12)
    assert max(read) == (60 + NEW - 1) // SIZE - 1
    want = generate(
        tiny(), asked, cache=CacheConfig(page_size=SIZE), **{**DRAW, "max_new_tokens": 12}
    )
    assert second.tokens == want.tokens
    pages = (len(asked) + 11) // SIZE
    assert second.stats.tiers.store.pages_kept == pages - (60 + NEW - 1) // SIZE
    assert bytes_below(tmp_path / "data") - size < size / 2
    third = call([*asked, *second.tokens[0]], tmp_path, new=10)
    assert third.stats.tiers.store.pages_kept > 0
    assert not PageStore.open(tmp_path).verify()


def test_calls_with_prefixes_find_them(tmp_path):
    first = call(PROMPTS[0], tmp_path)
    asked = [*PROMPTS[0], *first.tokens[0], 1, 2, 3]
    prefixes = PrefixCache(tmp_path, config=PrefixConfig(budget="100%", load_policy="load"))
    cache = CacheConfig(page_size=SIZE)
    used = generate(tiny(), asked, max_new_tokens=4, cache=cache, prefixes=prefixes)
    assert used.stats.prefix.pages == (60 + NEW - 1) // SIZE
    assert used.tokens == generate(tiny(), asked, max_new_tokens=4, cache=cache).tokens


def test_a_stream_keeps_them_too(tmp_path):
    events = list(stream(tiny(), PROMPTS[0], cache=cache_in(tmp_path), **DRAW))
    assert events[-1].stats.tiers.store.pages_kept == (60 + NEW - 1) // SIZE - 60 // SIZE
    alone = generate(tiny(), PROMPTS[0], cache=CacheConfig(page_size=SIZE), **DRAW)
    assert [event.token for event in events] == alone.tokens[0]
    longest = max(info.tokens for info in PageStore.open(tmp_path).segments())
    assert longest == 60 + NEW - 1


def test_an_order_of_pages_goes_on(tmp_path):
    first = call(PROMPTS[0], tmp_path, order="cluster")
    asked = [*PROMPTS[0], *first.tokens[0], 1, 2, 3]
    want = generate(tiny(), asked, cache=CacheConfig(page_size=SIZE), **DRAW).tokens
    assert call(asked, tmp_path, order="cluster").tokens == want
    assert call(asked, tmp_path).tokens == want


def test_nothing_is_kept_unasked(tmp_path):
    result = call(PROMPTS, tmp_path, keep_generated=False)
    assert len(PageStore.open(tmp_path).segments()) == 2  # one prompt is shorter than a page
    assert result.stats.tiers.store.pages_kept == 0
    assert result.stats.tiers.store.not_kept is None


def test_approximations_are_not_kept(tmp_path):
    """Calls that are to be exact would find them."""
    result = call(PROMPTS[:2], tmp_path, budget="25%")
    assert len(PageStore.open(tmp_path).segments()) == 2
    assert result.stats.tiers.store.pages_kept == 0
    assert result.stats.tiers.store.not_kept == "steps read 3 of 8 pages"


def test_pages_that_are_not_finite_are_not_kept(tmp_path, monkeypatch):
    whole = SequencePages.in_memory

    def poisoned(pages, row, count):
        keys, values = whole(pages, row, count)
        if pages._rows[row].reader is not None:
            values[0, -1, 0, 3, 2] = np.nan
        return keys, values

    monkeypatch.setattr(SequencePages, "in_memory", poisoned)
    result = call(PROMPTS[0], tmp_path)
    assert result.tokens[0] == plain()[0]
    assert "not finite" in result.stats.tiers.store.not_kept
    assert len(PageStore.open(tmp_path).segments()) == 1


def test_a_store_that_is_full_loses_no_answer(tmp_path, monkeypatch):
    whole = PageStore.put

    def full(store, *args, after=None, **options):
        if after is not None:
            raise StoreError(28, "no space left on device")
        return whole(store, *args, after=after, **options)

    monkeypatch.setattr(PageStore, "put", full)
    result = call(PROMPTS[0], tmp_path)
    assert result.tokens[0] == plain()[0]
    assert "no space left" in result.stats.tiers.store.not_kept
    assert not PageStore.open(tmp_path).verify()


def test_a_row_that_failed_is_not_kept_and_the_others_are(tmp_path, monkeypatch):
    whole, calls = Segment.read, [0]

    def read(segment, units):
        if segment.tokens[:SIZE].tolist() == PROMPTS[1][:SIZE]:
            calls[0] += 1
            if calls[0] > 2:
                raise OSError("disk on fire")
        return whole(segment, units)

    monkeypatch.setattr(Segment, "read", read)
    with pytest.raises(RowsFailedError) as caught:
        call(PROMPTS[:2], tmp_path)
    monkeypatch.undo()
    assert list(caught.value.failures) == [1]
    tokens = sorted(info.tokens for info in PageStore.open(tmp_path).segments())
    assert tokens == [41, 60, 60 + NEW - 1]


def test_equal_rows_are_kept_once(tmp_path):
    result = generate(
        tiny(), [PROMPTS[0]] * 2, max_new_tokens=NEW, stop_at_eos=False, cache=cache_in(tmp_path)
    )
    assert result.tokens[0] == result.tokens[1]
    assert len(PageStore.open(tmp_path).segments()) == 2


def test_damage_is_mended_by_one_more_call_wherever_it_lies(tmp_path):
    """In the prompt's pages that an answer's share: neither is found again."""
    first = call(PROMPTS[0], tmp_path)
    (prompt_info,) = [x for x in PageStore.open(tmp_path).segments() if x.tokens == 60]
    with PageStore.open(tmp_path).open_segment(prompt_info.key) as segment:
        folder = tmp_path / "data" / segment.arrays[0].folder
    for shard in (folder / "c").rglob("0"):
        if shard.is_file():
            content = bytearray(shard.read_bytes())
            content[: len(content) // 2 : 64] = bytes(len(content[: len(content) // 2 : 64]))
            shard.write_bytes(content)
    asked = [*PROMPTS[0], *first.tokens[0], 1, 2, 3]
    with pytest.raises(RowsFailedError, match="call again, which writes damaged pages anew"):
        call(asked, tmp_path)
    want = generate(tiny(), asked, cache=CacheConfig(page_size=SIZE), **DRAW).tokens
    assert call(asked, tmp_path).tokens == want
    assert not PageStore.open(tmp_path).verify()
