"""Stored pages in fewer bytes: answers are the same, and what was read is what lay in the files."""

import numpy as np
import pytest

from kvjax.config import CacheConfig
from kvjax.decode import PrefixCache, PrefixConfig, generate
from kvjax.errors import KvjaxError
from kvjax.policies import Place, Select, Window
from kvjax.storage.page_store import PageStore
from tests.kvjax.decode.tiny import model, prompt

PROMPT = prompt(112, 0)
QUESTION = [*PROMPT, 1, 2]
CACHE = CacheConfig(dtype="bfloat16")


@pytest.fixture(scope="module")
def tiny():
    return model()


def asked(tiny, folder, codec):
    config = PrefixConfig(budget="100%", load_policy="load", codec=codec)
    prefixes = PrefixCache(folder, config=config)
    info = prefixes.add(tiny, PROMPT, cache=CACHE)
    result = generate(tiny, QUESTION, max_new_tokens=4, cache=CACHE, prefixes=prefixes)
    assert result.stats.prefix is not None
    return info, result, prefixes


@pytest.fixture(scope="module")
def unencoded(tiny, tmp_path_factory):
    return asked(tiny, tmp_path_factory.mktemp("plain"), "none")[1]


@pytest.mark.parametrize("codec", ["zstd", "blosc", "splitzip"])
def test_a_prefix_answers_as_it_does_unencoded(tiny, tmp_path, unencoded, codec):
    info, result, prefixes = asked(tiny, tmp_path, codec)
    assert result.tokens == unencoded.tokens
    assert info.codec == codec
    read, whole = result.stats.prefix, unencoded.stats.prefix
    assert read.bytes_read == prefixes._open._open[info.key].segment.bytes_read().payload
    if codec == "splitzip":  # the tiny model's units are too small for the others to gain
        assert read.bytes_read < 0.85 * whole.bytes_read
        assert read.read_amplification < whole.read_amplification


def test_what_is_reordered_stays_encoded(tiny, tmp_path):
    config = PrefixConfig(by="h2o", who="layer", reorder=True, codec="splitzip")
    prefixes = PrefixCache(tmp_path, config=config)
    info = prefixes.add(tiny, PROMPT, cache=CACHE)
    prefixes._uses._counts[info.key] = np.ones((info.shape[0], len(PROMPT)), np.int64)
    (reordered,) = prefixes.reorder()
    assert reordered.codec == "splitzip"


def tiered(tiny, folder, codec):
    place = Place(store=folder, host_bytes=0, codec=codec, keep_generated=True)
    select = Select("100%", by="mean")
    cache = CacheConfig(select=select, window=Window(0), place=place, dtype="bfloat16")
    return generate(tiny, PROMPT, max_new_tokens=18, stop_at_eos=False, cache=cache)


@pytest.mark.slow
def test_steps_over_encoded_pages_are_the_same(tiny, tmp_path):
    plain = tiered(tiny, tmp_path / "plain", "none")
    result = tiered(tiny, tmp_path / "pages", "splitzip")
    assert result.tokens == plain.tokens
    infos = PageStore.open(tmp_path / "pages").segments()
    assert [info.codec for info in infos] == ["splitzip"] * 2  # the prompt's, and the answer's
    read, whole = result.stats.tiers.store, plain.stats.tiers.store
    assert 0 < read.bytes_read < 0.85 * whole.bytes_read


def test_splitzip_of_another_dtype_is_refused_before_anything_runs(tiny, tmp_path):
    said = "codec is 'splitzip' and the cache is float32: it encodes bfloat16"
    prefixes = PrefixCache(tmp_path, config=PrefixConfig(codec="splitzip"))
    with pytest.raises(KvjaxError, match=said):
        prefixes.add(tiny, PROMPT, cache=CacheConfig(dtype="float32"))
    place = Place(store=tmp_path, codec="splitzip")
    cache = CacheConfig(select=Select(), place=place, dtype="float32")
    with pytest.raises(KvjaxError, match=said):
        generate(tiny, PROMPT, max_new_tokens=1, cache=cache)
    assert prefixes.store.segments() == []
