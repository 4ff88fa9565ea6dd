"""Prompts of tiered calls in a store: damage is mended, beginnings are shared, ends differ."""

import pytest

from kvjax.config import CacheConfig
from kvjax.decode import PrefixCache, PrefixConfig, generate
from kvjax.decode.open_prefixes import PREFILL_S
from kvjax.errors import KvjaxError
from kvjax.policies import Place, Select, Window
from kvjax.storage.page_store import PageStore
from tests.kvjax.decode.tiny import model, prompt

PROMPT = prompt(112, 0)


@pytest.fixture(scope="module")
def tiny():
    return model()


def answer(tiny, ids, folder):
    place = Place(store=folder, host_bytes=0)
    cache = CacheConfig(select=Select("25%", by="mean"), window=Window(0), place=place)
    return generate(tiny, ids, max_new_tokens=8, stop_at_eos=False, cache=cache)


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


def test_of_documents_that_differ_at_the_end_the_one_asked_about_is_used(tiny, tmp_path):
    prefixes = PrefixCache(tmp_path)
    ends = [[*PROMPT, 3, 4, 5], [*PROMPT, 6, 7]]
    keys = [prefixes.add(tiny, ids).key for ids in ends]
    for ids, key in zip(ends, keys, strict=True):
        used = generate(tiny, [*ids, 8, 9], max_new_tokens=2, prefixes=prefixes).stats.prefix
        assert used is not None and used.key == key  # noqa: PT018
