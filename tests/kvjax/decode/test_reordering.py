"""Tokens that were chosen lie together afterwards, and nothing is answered otherwise."""

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.config import CacheConfig
from kvjax.decode import PrefixCache, PrefixConfig
from kvjax.decode.reordering import ORDER, USES, order_of, pages_of
from kvjax.errors import KvjaxError
from tests.kvjax.decode import tiny

PAGE = 8
CACHE = CacheConfig(page_size=PAGE)
PAGES, QUESTION = 64, 9
CONFIG = PrefixConfig(by="impress", who="layer", reorder=True, load_policy="load", host_bytes=0)


@pytest.fixture(scope="module")
def model():
    return tiny.model()


@pytest.fixture(scope="module")
def ids():
    return tiny.prompt(PAGES * PAGE + 3 + QUESTION)


def answer(model, ids, prefixes):
    result = kvjax.generate(
        model, ids, max_new_tokens=6, stop_at_eos=False, cache=CACHE, prefixes=prefixes
    )
    return result.tokens[0], result.stats.prefix


def stored(folder, model, ids, **changes):
    prefixes = PrefixCache(folder, config=dataclasses.replace(CONFIG, **changes))
    prefixes.add(model, ids[: PAGES * PAGE + 3], cache=CACHE)
    return prefixes


@pytest.mark.slow
def test_all_tokens_in_another_order_are_exact_prefill(tmp_path, model, ids):
    expected = answer(model, ids, None)[0]
    prefixes = stored(tmp_path, model, ids, budget="100%")
    uneven = np.random.default_rng(0).integers(0, 9, (2, PAGES * PAGE))
    assert answer(model, ids, prefixes)[0] == expected
    (counts,) = prefixes._uses._counts.values()
    assert (counts == 1).all()
    counts += uneven
    (info,) = prefixes.reorder()
    tokens, stats = answer(model, ids, prefixes)
    assert tokens == expected
    assert stats.key == info.key
    assert stats.pages_chosen == PAGES
    with prefixes.store.open_segment(info.key) as packed:
        order = order_of(packed)
    assert not np.array_equal(order[0], np.arange(PAGES * PAGE))


@pytest.mark.parametrize("by", ["impress", "h2o"])
def test_scattered_tokens_are_read_from_fewer_chunks(tmp_path, model, ids, by):
    prefixes = stored(tmp_path, model, ids, by=by, budget="10%")
    expected, scattered = answer(model, ids, prefixes)
    prefixes.reorder()
    tokens, packed = answer(model, ids, prefixes)
    assert tokens == expected
    assert packed.bytes_used == scattered.bytes_used
    assert packed.read_amplification < scattered.read_amplification - 1
    # The 51 tokens of each layer lie in 1 of 8 chunks now; keys are read to choose by as before.
    chunk = 64 * 2 * 2 * 2 * 8 * 4  # layers, heads, keys and values, channels, float32
    assert scattered.bytes_read - packed.bytes_read > 4 * chunk
    assert packed.bytes_scored == scattered.bytes_scored


def test_each_layer_has_its_own_order_of_all_tokens(tmp_path, model, ids):
    prefixes = stored(tmp_path, model, ids, budget="10%")
    answer(model, ids, prefixes)
    (counts,) = prefixes._uses._counts.values()
    (info,) = prefixes.reorder()
    (plain,) = [other for other in prefixes.store.segments() if other.key != info.key]
    with (
        prefixes.store.open_segment(plain.key) as before,
        prefixes.store.open_segment(info.key) as after,
    ):
        order = after.sketches()[ORDER]
        assert np.array_equal(np.sort(order, axis=1), np.tile(np.arange(PAGES * PAGE), (2, 1)))
        for old, new in zip(pages_of(before), pages_of(after), strict=True):
            rows = [x.swapaxes(2, 3).reshape(2, PAGES * PAGE, 2, 8) for x in (old, new)]
            for layer in range(2):
                np.testing.assert_array_equal(rows[1][layer], rows[0][layer, order[layer]])
                chosen = counts[layer][order[layer]]
                assert (np.diff(chosen) <= 0).all()


@pytest.mark.slow
def test_a_prompt_that_shares_only_the_beginning_reads_tokens_in_their_own_order(
    tmp_path, model, ids
):
    prefixes = stored(tmp_path, model, ids, budget="100%")
    answer(model, ids, prefixes)
    (info,) = prefixes.reorder()
    other = [*ids[: 5 * PAGE + 4], *tiny.prompt(20, seed=3)]
    tokens, stats = answer(model, other, prefixes)
    assert tokens == answer(model, other, None)[0]
    assert stats.pages == 5
    assert stats.key != info.key


@pytest.mark.slow
def test_a_second_order_is_not_mixed_with_pages_of_the_first(tmp_path, model, ids):
    prefixes = stored(tmp_path, model, ids, budget="100%", host_bytes=1 << 24)
    expected = answer(model, ids, prefixes)[0]
    for seed in range(3):
        (counts,) = prefixes._uses._counts.values()
        counts[:] = np.random.default_rng(seed).integers(0, 99, counts.shape)
        prefixes.reorder()
        for _ in range(2):  # from disk, then from memory
            assert answer(model, ids, prefixes)[0] == expected
    assert len(prefixes.store.segments()) == 2
    assert answer(model, ids, PrefixCache(tmp_path, config=prefixes.config))[0] == expected


def test_uses_add_up_over_restarts(tmp_path, model, ids):
    total = 0
    for seed in range(3):
        prefixes = stored(tmp_path, model, ids, budget="10%")
        answer(model, [*ids[: -QUESTION + seed], *tiny.prompt(5, seed)], prefixes)
        (counts,) = prefixes._uses._counts.values()
        total = total + counts
        assert counts.any()
        (info,) = prefixes.reorder()
        assert prefixes.reorder() == []  # nothing was chosen since
    with prefixes.store.open_segment(info.key) as packed:
        uses, order = packed.sketch(USES), packed.sketch(ORDER)
    np.testing.assert_array_equal(uses, total)
    assert (np.diff(np.take_along_axis(uses, order, axis=1)) <= 0).all()


def test_others_do_not_see_what_is_reordered(tmp_path, model, ids):
    prefixes = stored(tmp_path, model, ids, budget="100%")
    expected = answer(model, ids, prefixes)[0]
    (info,) = prefixes.reorder()
    config = PrefixConfig(by="all", who="layer", load_policy="load", budget="100%")
    tokens, stats = answer(model, ids, PrefixCache(tmp_path, config=config))
    assert tokens == expected
    assert stats.key != info.key


@pytest.mark.slow
def test_a_window_is_measured_in_the_tokens_own_order(tmp_path, ids):
    model = tiny.model("gemma")
    expected = answer(model, ids, None)[0]
    prefixes = stored(tmp_path, model, ids, budget="10%")
    scattered = answer(model, ids, prefixes)[0]
    (info,) = prefixes.reorder()
    tokens, packed = answer(model, ids, prefixes)
    assert tokens == scattered
    assert packed.key == info.key
    with prefixes.store.open_segment(info.key) as segment:
        order = order_of(segment)
    assert np.array_equal(order[0], np.arange(PAGES * PAGE))
    assert not np.array_equal(order[1], order[0])
    whole = PrefixCache(tmp_path, config=dataclasses.replace(CONFIG, budget="100%"))
    tokens, stats = answer(model, ids, whole)
    assert tokens == expected
    assert stats.key == info.key


def test_only_tokens_are_reordered():
    with pytest.raises(KvjaxError, match="reorder is True and by is 'low-bit': only tokens"):
        PrefixConfig(reorder=True)
