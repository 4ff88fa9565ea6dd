"""Stored prefixes in a format: the bytes of its codes, and the answers of plain prefill."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import kvjax
from kvjax import cache as paged
from kvjax.config import CacheConfig
from kvjax.decode import PrefixCache, PrefixConfig
from kvjax.decode.kept_numbers import format_words, kept_in
from kvjax.decode.meter import Meter
from kvjax.decode.opening import empty_state, prefill_program
from kvjax.decode.prefilled_pages import PrefilledPages, prefilled_pages
from kvjax.decode.prefixes import NotLoaded
from kvjax.decode.shapes import plan
from kvjax.errors import KvjaxError
from kvjax.formats import Format, KVQuantKeys, KVQuantValues, float8, int4, int8
from kvjax.formats.constant import Constant
from tests.kvjax.decode import tiny

PAGE, PAGES = 16, 12
DOCUMENT, QUESTION = PAGES * PAGE + 3, 9
LOAD = PrefixConfig(load_policy="load", budget="100%", by="mean", who="head")
INT8 = CacheConfig(page_size=PAGE, format="int8")


def kvquant(reach=4.0):
    """A calibration of the tiny model: 2 KV heads of 8 elements."""
    middle, levels = np.zeros((2, 8)), Constant(np.linspace(-1, 1, 8))
    ranges = [Constant(middle), Constant(middle + reach)]
    frequencies = Constant(10_000 ** -(np.arange(4) / 4))
    return Format(KVQuantKeys(3, *ranges, *ranges, levels, frequencies), KVQuantValues(3, levels))


@pytest.fixture(scope="module")
def ids():
    return tiny.prompt(DOCUMENT + QUESTION)


@pytest.fixture(scope="module")
def model():
    return tiny.model()


@pytest.fixture(scope="module")
def stored(tmp_path_factory, model, ids):
    """Prefixes whose only one is in int8, its folder, and what is known of it."""
    folder = tmp_path_factory.mktemp("pages")
    prefixes = PrefixCache(folder, config=LOAD)
    return prefixes, folder, prefixes.add(model, ids[:DOCUMENT], cache=INT8)


def prefilled(model, ids, prefixes, cache):
    """The state after prefill, from what is stored or, where that is None, from nothing."""
    limits, meter = jnp.ones((1,), jnp.int32), Meter()
    shapes = plan(
        model.config, model.spec, [len(ids)], new_tokens=1, prefill_chunk=512, cache=cache
    )
    if prefixes is not None:
        found = prefixes.prefill(model, ids, shapes, cache=cache, limits=limits, meter=meter)
        return found if isinstance(found, NotLoaded) else found.state, found
    state = empty_state(model, shapes, limits, meter)
    return prefill_program(model, ids, shapes, state, meter)(state, lambda *_: None), None


@pytest.fixture(scope="module")
def plain(model, ids):
    return prefilled(model, ids, None, INT8)[0]


def test_files_hold_the_bytes_of_the_codes(model, ids, stored):
    """Counted from the files; what the bytes mean, by NumPy alone."""
    prefixes, folder, info = stored
    assert info.dtype == "uint8"
    layers, pages, heads, size, width = info.shape
    unit = 2 * size * width
    assert layers * heads * unit == int8().bytes_per_page(model.spec, PAGE)
    assert unit * 3 < layers * heads * size * 8 * 4  # float32: 8 elements, keys and values
    shards = [x for x in folder.glob("data/*/c/**/*") if x.is_file()]
    beside = 16 + 4 + 16  # a unit's tag, checksum and place in the index; then the index's checksum
    assert len(shards) == layers * heads
    assert {x.stat().st_size for x in shards} == {pages * (unit + beside) + 4}
    files = [x for x in folder.rglob("*") if x.is_file() and x.parent.name not in ("use", "pages")]
    written = sum(x.stat().st_size for x in files if x.name != "store.json")
    assert written == info.bytes

    exact = prefilled_pages(
        model, ids[:DOCUMENT], CacheConfig(page_size=PAGE), 512, lambda *_: None
    )
    with prefixes.store.open_segment(info.key) as segment:
        units = np.array([[0, 1, 0, page] for page in range(pages)], np.int32)
        raw = np.stack([np.asarray(read.result()).reshape(-1) for read in segment.read(units)])
    # The first layer's keys and values do not depend on the format; those of KV head 1:
    for begin, numbers in ((0, exact.keys), (unit // 2, exact.values)):
        codes = raw[:, begin : begin + size * 8].view(np.int8).reshape(pages, size, 8)
        scales = raw[:, begin + size * 8 : begin + unit // 2].view(ml_dtypes.bfloat16)
        scales = scales.astype(np.float32).reshape(pages, size, 1)
        error = np.abs(codes * scales - numbers[0, :, 1])
        assert (error <= scales / 2 * 1.001).all()
        assert error.max() > 0


def test_all_of_a_prefix_is_what_prefill_makes(model, ids, stored, plain):
    """The same state, so that everything after it is the same."""
    prefixes, _, _ = stored
    state, found = prefilled(model, ids, prefixes, INT8)
    assert found.stats.pages == found.stats.pages_chosen == PAGES
    # The newest page is kept apart, as it was made.
    unread = int8().bytes_per_page(model.spec, PAGE)
    assert found.stats.bytes_used == found.stats.bytes_read == (PAGES - 1) * unread
    np.testing.assert_allclose(state.hidden, plain.hidden, rtol=1e-5, atol=1e-5)
    assert int(state.cache.next_positions[0]) == len(ids)
    for layer in range(2):
        got, want = (paged.gather(x.cache, layer) for x in (state, plain))
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one[:, : len(ids)], other[:, : len(ids)], atol=1e-5)


@pytest.mark.slow
def test_a_budget_reads_as_much_of_the_codes(model, ids, stored, plain, tmp_path):
    """A third of the pages: near what the same budget gives without a format."""
    _, folder, _ = stored
    third = dataclasses.replace(LOAD, budget="4 pages", host_bytes=0, prefetch=False)
    state, found = prefilled(model, ids, PrefixCache(folder, config=third), INT8)
    assert found.stats.pages_chosen == 4
    assert found.stats.bytes_read == 3 * int8().bytes_per_page(model.spec, PAGE)
    assert int(state.cache.next_positions[0]) == len(ids)
    exact, cache = PrefixCache(tmp_path, config=third), CacheConfig(page_size=PAGE)
    exact.add(model, ids[:DOCUMENT], cache=cache)
    expected, _ = prefilled(model, ids, exact, cache)
    apart = np.abs(state.hidden - expected.hidden).max()
    assert 0 < apart < 0.1 * np.abs(plain.hidden - expected.hidden).max()


def test_no_other_call_is_served(model, ids, stored):
    prefixes, _, info = stored
    for other in (None, "int4", float8(scale=1.0), kvquant()):
        cache = CacheConfig(page_size=PAGE, format=other)
        found, _ = prefilled(model, ids, prefixes, cache)
        assert isinstance(found, NotLoaded)
        assert "is stored" in found.reason
        with pytest.raises(KvjaxError, match=r"was stored in format 'int8'; ask with this"):
            prefixes.tokens(model, info.key, cache=cache)
    assert prefixes.tokens(model, info.key, cache=INT8) == ids[:DOCUMENT]
    # Of a prompt that leaves it half-way, the newest tokens before that are codes.
    found, _ = prefilled(model, [*ids[: 5 * PAGE], 1, 2, 3], prefixes, INT8)
    assert "begins with the whole of" in found.reason


def test_keys_stored_with_their_values_are_not_read_alone(model, ids, stored):
    prefixes = PrefixCache(stored[1], config=dataclasses.replace(LOAD, by="keys"))
    with pytest.raises(KvjaxError, match=r"by is 'keys' .* has keys and values together; choose"):
        prefilled(model, ids, prefixes, INT8)


def test_calibrations_are_told_apart():
    formats = (kvquant(), kvquant(5.0), float8(scale=1.0), float8(scale=2.0), int8(), None)
    stored = [kept_in("float32", format) for format in formats]
    stored += [kept_in("float32", format, prefilled_exactly=True) for format in formats[:-1]]
    assert len(set(stored)) == len(stored)
    assert kept_in("float32", kvquant()) == stored[0]


def test_pages_that_tiers_kept_are_called_by_the_name_of_their_format(model, ids, tmp_path):
    kept = kept_in("float32", int8(), prefilled_exactly=True)
    assert format_words(kept) == format_words(kept_in("float32", int8())) == "format 'int8'"
    calibrated = kept_in("float32", kvquant(), prefilled_exactly=True)
    assert format_words(calibrated) == "a format that has no name"
    assert format_words("float32") == "no format"
    prefixes = PrefixCache(tmp_path, config=dataclasses.replace(LOAD, by="all"))
    codes = np.zeros((2, 1, 2, PAGE, 9), np.uint8)
    info = prefixes.put(model, ids[:PAGE], PrefilledPages(codes, codes, 1.0), numbers=kept)
    with pytest.raises(KvjaxError, match=r"was stored over tiers: .* in format 'int8', which"):
        prefixes.tokens(model, info.key, cache=INT8)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"by": "h2o"}, r"by is 'h2o' and cache\.format is given: tokens that are chosen"),
        ({"by": "impress", "who": "layer"}, r"by is 'impress' and cache\.format is given"),
        ({"codec": "splitzip"}, r"codec is 'splitzip' and cache\.format is given"),
    ],
    ids=str,
)
def test_what_takes_numbers_is_refused(model, ids, tmp_path, changes, match):
    prefixes = PrefixCache(tmp_path, config=dataclasses.replace(LOAD, **changes))
    with pytest.raises(KvjaxError, match=match):
        prefixes.add(model, ids, cache=INT8)
    with pytest.raises(KvjaxError, match=match):
        kvjax.generate(model, ids, cache=INT8, prefixes=prefixes)


def test_what_a_format_cannot_pack_is_refused_before_prefill(model, ids, tmp_path):
    with pytest.raises(KvjaxError, match="page_size is 16: groups of 32 tokens"):
        PrefixCache(tmp_path).add(model, ids, cache=CacheConfig(page_size=PAGE, format="kivi2"))


@pytest.mark.parametrize("part", ["k", "v"])
def test_what_a_layer_keeps_as_it_is_must_be_finite(model, ids, tmp_path, part):
    """The last layer's numbers, which nothing that is packed depends on."""

    def grown(path, weight):
        own = f"['layers'][1]['attention']['{part}']['weight']"
        return weight * 1e6 if jax.tree_util.keystr(path) == own else weight

    params = jax.tree_util.tree_map_with_path(grown, model.params)
    plain_last = dataclasses.replace(int8(), skip_layers=(-1,))
    cache = CacheConfig(page_size=PAGE, dtype="float16", format=plain_last)
    prefixes = PrefixCache(tmp_path, config=LOAD)
    with pytest.raises(KvjaxError, match="are not finite in float16"):
        prefixes.add(dataclasses.replace(model, params=params), ids[:DOCUMENT], cache=cache)
    assert not prefixes.store.segments()


CASES = {
    "int4, 20 first and 35 newest tokens": (
        "llama",
        dataclasses.replace(int4(sinks=20), residual=35),
        {"by": "keys", "who": "layer"},
    ),
    "windows": ("gemma", dataclasses.replace(int8(), skip_windows=False, sinks=1), {}),
    "windows skipped": ("gemma", int8(), {"who": "period", "period": 2, "device_bytes": 1 << 20}),
    "kvquant": ("llama", kvquant(), {"by": "low-bit", "pin_host": True}),
    "more is newest than there is": ("llama", dataclasses.replace(int8(), residual=400), {}),
    "latents": ("latents", dataclasses.replace(int8(), sinks=1), {"by": "low-bit"}),
    "zstd": ("llama", int4(), {"codec": "zstd", "by": "all"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_plain_prefill(tmp_path, ids, case):
    name, format, changes = CASES[case]
    model, cache = tiny.model(name), CacheConfig(page_size=PAGE, format=format)
    prefixes = PrefixCache(tmp_path, config=dataclasses.replace(LOAD, **changes))
    info = prefixes.add(model, ids[:DOCUMENT], cache=cache)
    assert prefixes.add(model, ids[:DOCUMENT], cache=cache) == info
    options = {"max_new_tokens": 40, "stop_at_eos": False, "cache": cache}
    expected = kvjax.generate(model, ids, **options).tokens
    for _ in range(2):  # from disk, then from what stayed in memory
        result = kvjax.generate(model, ids, prefixes=prefixes, **options)
        assert result.stats.prefix is not None, result.stats.prefix_unused
        assert result.stats.prefix.pages_chosen == PAGES
        assert result.tokens == expected
    want = prefilled(model, ids, None, cache)[0].hidden
    got = prefilled(model, ids, prefixes, cache)[0].hidden
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_of_two_prefixes_the_longest_whole_one_serves(tmp_path, model, ids):
    prefixes = PrefixCache(tmp_path, config=LOAD)
    shorter = prefixes.add(model, ids[: 6 * PAGE], cache=INT8)
    longer = prefixes.add(model, ids[:DOCUMENT], cache=INT8)
    other = [*ids[: 8 * PAGE], *tiny.prompt(20, seed=3)]
    for prompt, key in ((ids, longer.key), (other, shorter.key)):
        result = kvjax.generate(model, prompt, cache=INT8, prefixes=prefixes, max_new_tokens=2)
        assert result.stats.prefix.key == key
    assert prefixes.remove_shorter(longer.key) == []  # which would serve such prompts no more
