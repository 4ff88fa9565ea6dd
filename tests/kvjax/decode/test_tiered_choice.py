"""Models that choose tokens by an indexer (DSA), over tiers: as without tiers, page by page."""

import dataclasses
import functools

import numpy as np
import pytest

from kvjax.config import CacheConfig
from kvjax.decode import generate, stream
from kvjax.errors import KvjaxError
from kvjax.load import load
from kvjax.model import from_checkpoint, kv_spec
from kvjax.policies import Place, Select, Window
from tests.kvjax.decode.forced import forced_logits
from tests.kvjax.decode.test_latent_pages import paged_logits
from tests.kvjax.decode.test_sparse_latents import DATA, assert_greedy, checkpoint, with_layers
from tests.kvjax.decode.tiny import model as tiny
from tests.kvjax.decode.tiny import no_cache_logits, prompt

SIZE, LENGTHS, NEW = 8, (61, 20), 14


@functools.cache
def made():
    """Two layers, of which the second shares the choice of nine tokens that the first makes."""
    return from_checkpoint(checkpoint(), name="tiny", dtype="float32")


def over_tiers(times=1, index_dtype=None, **place):
    return CacheConfig(
        page_size=SIZE,
        index_dtype=index_dtype,
        select=Select(by="indexer"),
        window=None if times is None else Window(times),
        place=None if times is None else Place(**place),
    )


@pytest.mark.parametrize(
    ("times", "top_k"),
    [
        pytest.param(0, 9, marks=pytest.mark.slow),
        (1, 3),
        pytest.param(None, 9, marks=pytest.mark.slow),
    ],
)
def test_steps_attend_to_what_the_indexer_chooses(times, top_k):
    """With three tokens a step slots have room for three pages of nine, and the open one."""
    of, ids = with_layers(top_k=top_k), [prompt(n + NEW, row) for row, n in enumerate(LENGTHS)]
    heads = [row[:n] for row, n in zip(ids, LENGTHS, strict=True)]
    tails = [row[n:] for row, n in zip(ids, LENGTHS, strict=True)]
    got, stats, _ = forced_logits(of, heads, tails, over_tiers(times))
    for row, n in enumerate(LENGTHS):
        want = no_cache_logits(of, ids[row])[n - 1 : n - 1 + len(got[row])]
        np.testing.assert_allclose(got[row], want, atol=1e-5, rtol=1e-5)
    # Some of a step's tokens are in the open page, which is always near; of both layers.
    steps = len(LENGTHS) * NEW * 2
    assert steps * top_k / 2 < stats.tokens <= steps * top_k
    assert stats.amplification == stats.reads * SIZE / stats.tokens > 1
    assert stats.index_bytes == 2 * 12 * SIZE * 6 * 4  # of one layer, for all pages of both rows
    if times is not None:
        assert 0 < stats.misses <= stats.reads * (1 if times == 0 else 0.8)
        assert stats.bytes_moved == stats.misses * SIZE * (16 + 4) * 4


@pytest.mark.slow
def test_logits_equal_those_of_transformers():
    """GLM-5's form: of four layers two choose and two share, and the new token competes."""
    folder = DATA / "glm_moe_dsa"
    of, expected = load(folder, dtype="float32"), np.load(folder / "expected.npz")
    ids = expected["tokens"].tolist()
    got, stats, _ = forced_logits(of, [ids[:32]], [ids[32:]], over_tiers(0))
    np.testing.assert_allclose(got[0], expected["logits"][31:], atol=1e-4, rtol=0)
    assert 0.9 * stats.reads < stats.misses <= stats.reads  # a page that has just filled is near
    assert stats.tokens <= 16 * 4 * 9


@pytest.mark.slow
def test_a_choice_of_all_tokens_reads_all_pages():
    of = with_layers(top_k=1000)
    ids = prompt(LENGTHS[0] + 5)
    for times in (0, 2):
        got, stats, _ = forced_logits(of, [ids[:61]], [ids[61:]], over_tiers(times))
        np.testing.assert_allclose(got[0], no_cache_logits(of, ids)[60:], atol=1e-5, rtol=1e-5)
        assert stats.tokens == 0  # of all tokens none is chosen
        assert stats.amplification is None
        assert stats.reads == 2 * (3 * 7 + 2 * 8)  # full pages of steps 61 to 65, of both layers


@pytest.mark.slow
@pytest.mark.parametrize("index_dtype", ["fp8", "fp4"])
def test_index_keys_of_few_bits_choose_as_they_do_in_pages(index_dtype):
    spec = kv_spec(made().config, "float32", index_dtype=over_tiers(1, index_dtype).index_dtype)
    ids = prompt(48, seed=4)
    paged, *_ = paged_logits(made(), [ids[:32], ids[:3]], [ids[32:], ids[:16], ids[:16]], spec)
    got, stats, _ = forced_logits(made(), [ids[:32]], [ids[32:]], over_tiers(0, index_dtype))
    np.testing.assert_allclose(got[0][1:], paged[-16:], atol=1e-5, rtol=1e-5)
    assert np.abs(got[0] - no_cache_logits(made(), ids)[31:]).max() > 1e-3
    assert stats.index_bytes == 6 * SIZE * (6 if index_dtype == "fp8" else 3) + 6 * SIZE * 4


@pytest.mark.slow
def test_calls_of_several_rows_from_memory_and_a_store(tmp_path):
    """Of three tokens' pages some are near and some come, three rows at once."""
    of = with_layers(top_k=3)
    prompts = [prompt(n, row) for row, n in enumerate((37, 20, 29))]
    for place in ({}, {"micro_batches": 4}, {"store": tmp_path}, {"store": tmp_path}):
        cache = over_tiers(1, **place)
        result = generate(of, prompts, max_new_tokens=10, stop_tokens=(), cache=cache)
        for ids, tokens in zip(prompts, result.tokens, strict=True):
            assert len(tokens) == 10
            assert_greedy(of, ids, tokens)
        tiers = result.stats.tiers
        assert 0 < tiers.misses < tiers.reads
        if "store" in place:
            assert 0 < tiers.store.units_read <= tiers.misses
    stored = len(list(tmp_path.rglob("*")))
    generate(of, prompts, max_new_tokens=2, cache=over_tiers(1, "fp8", store=tmp_path))
    assert len(list(tmp_path.rglob("*"))) > stored  # what other index keys chose serves no other


@pytest.mark.slow
def test_a_stream_equals_one_forward():
    ids = prompt(37)
    events = stream(made(), ids, max_new_tokens=8, stop_tokens=(), cache=over_tiers())
    assert_greedy(made(), ids, [event.token for event in events])


def test_index_keys_count_as_device_memory():
    """Slots for nine pages and the open one of a row, and keys of all pages."""
    slots = 10 * 2 * SIZE * (16 + 4) * 4
    need = slots + 12 * SIZE * 6 * 4  # there is room for 12 pages
    cache = over_tiers(device_bytes=need - 1)
    with pytest.raises(KvjaxError, match=f"device_bytes is {need - 1}: .* need {need} bytes"):
        generate(made(), prompt(61), max_new_tokens=8, cache=cache)


def test_what_is_not_the_models_own_choice_is_refused():
    for options, message in (
        ({"budget": "50%"}, "budget is '50%' and by is 'indexer'"),
        ({"aggregate": "max"}, "aggregate is 'max' and by is 'indexer'"),
        ({"pooling": 0.5}, r"pooling is 0\.5 and by is 'indexer'"),
    ):
        with pytest.raises(KvjaxError, match=message):
            Select(by="indexer", **options)
    assert Select(by="indexer").budget == "100%"
    assert Select().budget == "6.25%"
    for of, select, message in (
        (made(), Select("50%"), r"take Select\(by='indexer'\)"),
        (tiny("llama"), Select(by="indexer"), "by is 'indexer' and llama has no indexer"),
    ):
        cache = dataclasses.replace(over_tiers(), select=select)
        with pytest.raises(KvjaxError, match=message):
            generate(of, prompt(20), max_new_tokens=4, cache=cache)
