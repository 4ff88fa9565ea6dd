"""Prompts of tiered calls in a store: damage is mended, beginnings are shared, ends differ."""

import contextlib
import tracemalloc

import numpy as np
import pytest

from kvjax.config import CacheConfig
from kvjax.decode import PrefixCache, PrefixConfig, generate
from kvjax.decode.open_prefixes import PREFILL_S
from kvjax.decode.tiered_store import PromptStore
from kvjax.errors import KvjaxError
from kvjax.policies import Place, Select, Window
from kvjax.storage.page_store import PageStore
from kvjax.storage.sequence_pages import SequencePages
from tests.kvjax.decode.tiny import model, prompt

PROMPT = prompt(112, 0)


@pytest.fixture(scope="module")
def tiny():
    return model()


def answer(tiny, ids, folder):
    place = Place(store=folder, host_bytes=0)
    cache = CacheConfig(select=Select("25%", by="mean"), window=Window(0), place=place)
    return generate(tiny, ids, max_new_tokens=8, stop_at_eos=False, cache=cache)


@pytest.mark.slow
def test_a_damaged_prompt_fails_once_and_is_written_anew(tiny, tmp_path):
    first = answer(tiny, PROMPT, tmp_path / "pages")
    shards = [x for x in (tmp_path / "pages" / "data").rglob("0") if x.is_file()]
    for shard in shards:
        content = bytearray(shard.read_bytes())
        for place in range(0, len(content) // 2, 64):
            content[place] ^= 1
        shard.write_bytes(bytes(content))
    assert shards
    with pytest.raises(KvjaxError, match="call again, which writes damaged pages anew"):
        answer(tiny, PROMPT, tmp_path / "pages")
    assert answer(tiny, PROMPT, tmp_path / "pages").tokens == first.tokens
    assert not PageStore.open(tmp_path / "pages").verify()


@pytest.mark.slow
def test_host_memory_while_a_prompt_is_prefilled(tiny, tmp_path, monkeypatch):
    """All pages of one that is new; of one that is found only those that are to be generated."""
    whole, held = SequencePages.put, []

    def put(pages, *args):
        held.append(pages.bytes_held)
        whole(pages, *args)

    monkeypatch.setattr(SequencePages, "put", put)
    tokens = [answer(tiny, PROMPT, tmp_path).tokens for _ in range(2)]
    assert tokens[0] == tokens[1]
    new, found = held[:2], held[2:]
    a_page = tiny.spec.bytes_per_page(16)  # of all layers
    assert set(new) == {8 * a_page}  # pages that a row has room for
    assert set(found) == {(8 - 112 // 16) * a_page}


def test_a_prompt_is_written_without_a_copy_of_it(tiny, tmp_path):
    place = Place(store=tmp_path, host_bytes=0)
    cache = CacheConfig(select=Select("25%", by="mean"), place=place)
    store = PromptStore(cache, most=0, layers=tuple(range(16)))
    pages = SequencePages(
        rows=1, layers=16, heads=2, pages=128, page_shape=(16, 32), dtype=np.dtype(np.float32)
    )
    for layer in range(16):
        pages.put(layer, 0, *np.ones((2, 128, 2, 16, 32), np.float32))
    before = pages.bytes_held
    with contextlib.ExitStack() as during:
        tracemalloc.start()
        store.keep(tiny, prompt(128 * 16), 0, pages, during, seconds=1.0, finite=True)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert pages.bytes_held == 0
    assert peak < before / 2


@pytest.mark.slow
def test_what_is_stored_serves_calls_that_read_prefixes(tiny, tmp_path):
    """With what prefilling took, or it would be estimated to be faster than any read."""
    answer(tiny, PROMPT, tmp_path)
    prefixes = PrefixCache(tmp_path, config=PrefixConfig(budget="100%", load_policy="load"))
    (info,) = prefixes.store.segments()
    with prefixes.store.open_segment(info.key) as segment:
        assert segment.sketches(PREFILL_S)[PREFILL_S] > 0
    used = generate(tiny, [*PROMPT, 1, 2], max_new_tokens=4, prefixes=prefixes)
    plain = generate(tiny, [*PROMPT, 1, 2], max_new_tokens=4)
    assert used.tokens == plain.tokens
    assert used.stats.prefix is not None


@pytest.mark.slow
def test_questions_about_one_document_share_its_pages(tiny, tmp_path):
    place = tmp_path / "pages"
    alone = [answer(tiny, PROMPT + tail, tmp_path / f"{tail[0]}") for tail in ([1] * 20, [2] * 20)]
    together = [answer(tiny, PROMPT + tail, place) for tail in ([1] * 20, [2] * 20)]
    assert [a.tokens for a in together] == [a.tokens for a in alone]
    assert len(PageStore.open(place).segments()) == 1


def test_a_prompt_that_shares_little_is_stored_of_its_own(tiny, tmp_path):
    answer(tiny, PROMPT, tmp_path)
    answer(tiny, PROMPT[:48] + prompt(64, 5), tmp_path)
    assert len(PageStore.open(tmp_path).segments()) == 2


@pytest.mark.slow
def test_of_documents_that_differ_at_the_end_the_one_asked_about_is_used(tiny, tmp_path):
    prefixes = PrefixCache(tmp_path)
    ends = [[*PROMPT, 3, 4, 5], [*PROMPT, 6, 7]]
    keys = [prefixes.add(tiny, ids).key for ids in ends]
    for ids, key in zip(ends, keys, strict=True):
        used = generate(tiny, [*ids, 8, 9], max_new_tokens=2, prefixes=prefixes).stats.prefix
        assert used is not None and used.key == key  # noqa: PT018
