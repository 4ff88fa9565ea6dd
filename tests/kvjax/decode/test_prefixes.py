"""Stored prefixes end to end: a small model, a real store in a folder, restarts and damage."""

import dataclasses
import importlib.resources
import itertools
import time

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

import kvjax
from kvjax.config import CacheConfig
from kvjax.decode import PrefixCache, PrefixConfig
from kvjax.decode.meter import Meter
from kvjax.decode.open_prefixes import TAIL
from kvjax.decode.opening import empty_state, prefill_program
from kvjax.decode.shapes import plan
from kvjax.errors import KvjaxError
from kvjax.storage import manifest
from kvjax.storage.errors import UnknownKeyError
from tests.kvjax.decode import tiny

PAGE = 8
CACHE = CacheConfig(page_size=PAGE)
DOCUMENT, QUESTION = 12 * PAGE + 3, 9
LOAD = PrefixConfig(load_policy="load", budget="100%")


@pytest.fixture(scope="module")
def model(request):
    return tiny.model(getattr(request, "param", "llama"))


BOTH = pytest.mark.parametrize("model", ["llama", "latents"], indirect=True)
"""Of keys and values, and of latents."""


@pytest.fixture(scope="module")
def ids():
    return tiny.prompt(DOCUMENT + QUESTION)


def answer(model, ids, prefixes):
    result = kvjax.generate(
        model, ids, max_new_tokens=6, stop_at_eos=False, cache=CACHE, prefixes=prefixes
    )
    return result.tokens[0], result.stats.prefix


@pytest.fixture(scope="module")
def plain(model, ids):
    return answer(model, ids, None)[0]


def stored(folder, model, ids, config=LOAD, **options):
    prefixes = PrefixCache(folder, config=config, **options)
    prefixes.add(model, ids[:DOCUMENT], cache=CACHE)
    return prefixes


SETTINGS = [
    {},
    {"by": "mean"},
    {"by": "quest", "who": "layer"},
    {"by": "low-bit", "who": "period", "period": 2, "bits": 2},
    {"by": "keys", "who": "period", "period": 2},
    {"by": "h2o", "who": "layer"},
    {"by": "impress", "who": "layer"},
    {"by": "all"},
    {"placement": "lru", "host_bytes": 0},
    {"placement": "lfu", "host_bytes": 4000},
    {"placement": "impress", "host_bytes": 20_000, "prefetch": False},
    {"device_bytes": 1 << 20, "host_bytes": 0},
    {"pin_host": True, "who": "layer"},
    {"device_bytes": 9_000, "host_bytes": 9_000, "pin_host": True, "by": "h2o", "who": "layer"},
    {"device_bytes": 9_000, "host_bytes": 9_000, "who": "period", "period": 2},
    {"device_bytes": 20_000, "by": "keys", "who": "period", "period": 2},
    {"device_bytes": 20_000, "by": "impress", "who": "layer", "placement": "impress"},
]
OF_LATENTS = [
    {},
    {"by": "mean", "device_bytes": 3_000, "host_bytes": 3_000, "pin_host": True},
    {"by": "quest", "who": "period", "period": 2, "host_bytes": 0},
]


@pytest.mark.parametrize(
    ("model", "changes"),
    [*itertools.product(["llama"], SETTINGS), *itertools.product(["latents"], OF_LATENTS)],
    ids=str,
    indirect=["model"],
)
def test_everything_equals_plain_prefill(tmp_path, model, ids, plain, exact, changes):
    prefixes = stored(tmp_path, model, ids, dataclasses.replace(LOAD, **changes))
    for _ in range(2):  # from disk, then from what stayed in memory
        tokens, stats = answer(model, ids, prefixes)
        assert tokens == plain
        assert stats.pages == stats.pages_chosen == 12
    np.testing.assert_allclose(hidden(model, ids, prefixes), exact, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def exact(model, ids):
    return hidden(model, ids, None)


def hidden(model, ids, prefixes, cache=CACHE):
    """The last token's state before the output matrix, from what is stored or from none of it."""
    limits, meter = jnp.ones((1,), jnp.int32), Meter()
    shapes = plan(
        model.config, model.spec, [len(ids)], new_tokens=1, prefill_chunk=512, cache=cache
    )
    if prefixes is not None:
        return prefixes.prefill(
            model, ids, shapes, cache=cache, limits=limits, meter=meter
        ).state.hidden
    state = empty_state(model, shapes, limits, meter)
    return prefill_program(model, ids, shapes, state, meter)(state, lambda *_: None).hidden


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma", {}),
        ("gemma", {"by": "impress", "who": "layer"}),
        ("gemma", {"device_bytes": 3_000, "host_bytes": 2_000, "pin_host": True, "who": "layer"}),
        ("mistral", {"by": "mean", "budget": "1 page"}),  # no layer sees anything else
    ],
    ids=str,
)
def test_layers_with_a_window_attend_to_all_that_is_in_it(tmp_path, ids, name, changes):
    model = tiny.model(name)
    expected, exact = answer(model, ids, None)[0], hidden(model, ids, None)
    prefixes = stored(tmp_path, model, ids, dataclasses.replace(LOAD, **changes))
    for _ in range(2):  # from disk, then from what stayed in memory
        tokens, stats = answer(model, ids, prefixes)
        assert tokens == expected
    np.testing.assert_allclose(hidden(model, ids, prefixes), exact, rtol=1e-5, atol=1e-5)
    short = [*ids[: 4 * PAGE + 2], *tiny.prompt(20, seed=3)]  # the window lies elsewhere
    tokens, stats = answer(model, short, prefixes)
    assert stats.pages == 4
    assert tokens == answer(model, short, None)[0]


@pytest.mark.slow
def test_of_a_layer_with_a_window_only_the_window_is_read(tmp_path, ids):
    model = tiny.model("gemma")  # a window of 12 tokens, then a layer that sees everything
    layer_page = model.spec.bytes_per_page(PAGE) // 2
    for budget, pages in (("100%", 12), ("50%", 6), ("1 page", 2)):
        config = dataclasses.replace(LOAD, budget=budget, host_bytes=0)
        stats = answer(model, ids, stored(tmp_path, model, ids, config))[1]
        assert stats.pages_chosen == pages  # no fewer than the window has
        assert stats.bytes_used == stats.bytes_read == (pages + 2) * layer_page
        assert stats.bytes_wasted == 0


@pytest.mark.slow
def test_gemma_answers_from_stored_pages(tmp_path, gguf_file):
    model = kvjax.load(gguf_file("gemma3-270m"), dtype="float32")
    text = (importlib.resources.files("kvjax") / "data" / "state_of_the_union_1790.txt").read_text()
    document = model.tokenizer.encode(text)[:1100]
    asked = [*document, *model.tokenizer.encode("\n\nIn short,", add_bos=False)]
    prefixes = PrefixCache(tmp_path, config=LOAD)
    prefixes.add(model, document)
    cache = CacheConfig()
    warm, cold = (hidden(model, asked, store, cache) for store in (prefixes, None))
    np.testing.assert_allclose(warm, cold, rtol=1e-4, atol=1e-5 * np.abs(cold).max())


@pytest.mark.slow
@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
def test_pages_stay_in_device_memory_and_only_changes_go_there(tmp_path, model, ids, host_bytes):
    half = dataclasses.replace(LOAD, budget="50%", host_bytes=host_bytes)
    expected, cold = answer(model, ids, stored(tmp_path, model, ids, half))
    assert cold.device_hits == 0
    prefixes = PrefixCache(tmp_path, config=dataclasses.replace(half, device_bytes=1 << 20))
    for hits in (0, cold.units, cold.units):
        tokens, stats = answer(model, ids, prefixes)
        assert tokens == expected
        assert stats.device_hits == hits
        assert stats.units == cold.units
        assert stats.bytes_used == cold.bytes_used
    assert stats.bytes_read == stats.bytes_wasted  # what a layer guessed for the next
    assert stats.read_amplification is None
    for pin_host in (False, True):
        few = dataclasses.replace(half, device_bytes=10_000, pin_host=pin_host)
        small = PrefixCache(tmp_path, config=few)
        answer(model, ids, small)
        tokens, stats = answer(model, ids, small)
        assert tokens == expected
        assert 0 < stats.device_hits < stats.units
        assert (stats.device_hits + stats.host_hits == stats.units) == (host_bytes > 0)


def test_reads_bring_what_a_period_chooses_where_it_divides_the_layers():
    period = PrefixConfig(who="period", period=4)
    assert [period.layout(16, layers, 3).layers for layers in (32, 30, 27)] == [4, 2, 1]
    assert period.layout(16, 30, 3).heads == 3
    assert PrefixConfig(who="head").layout(16, 30, 3).heads == 1


@BOTH
def test_a_restart_changes_nothing(tmp_path, model, ids):
    half = dataclasses.replace(LOAD, budget="50%")
    first = answer(model, ids, stored(tmp_path, model, ids, half))
    second = answer(model, ids, PrefixCache(tmp_path, config=half, read_only=True))
    assert first[0] == second[0]
    assert second[1].pages_chosen == 6
    assert first[1].bytes_used == second[1].bytes_used


@pytest.mark.slow
def test_a_prefix_serves_a_prompt_that_shares_only_its_beginning(tmp_path, model, ids):
    prefixes = stored(tmp_path, model, ids)
    other = [*ids[: 5 * PAGE + 4], *tiny.prompt(20, seed=3)]
    tokens, stats = answer(model, other, prefixes)
    assert tokens == answer(model, other, None)[0]
    assert stats.pages == 5


@pytest.mark.slow
def test_prompts_that_differ_after_their_last_page_are_both_kept(tmp_path, model, ids):
    prefixes = PrefixCache(tmp_path, config=LOAD)
    prompts = [[*ids[: 3 * PAGE], *ending] for ending in ([], [1], [1, 2], [3, 2])]
    keys = [prefixes.add(model, prompt, cache=CACHE).key for prompt in prompts]
    assert len(set(keys)) == 4
    for key, prompt in zip(keys, prompts, strict=True):
        assert prefixes.tokens(model, key) == prompt
        assert prefixes.add(model, prompt, cache=CACHE).key == key
        tokens, stats = answer(model, [*prompt, *ids[:9]], prefixes)
        assert tokens == answer(model, [*prompt, *ids[:9]], None)[0]
        assert stats.pages == 3


@pytest.mark.slow
def test_a_growing_prompt_need_not_leave_what_it_grew_from(tmp_path, model, ids, plain):
    prefixes = PrefixCache(tmp_path, config=LOAD)
    for length in (2 * PAGE + 1, 5 * PAGE, DOCUMENT):
        info = prefixes.add(model, ids[:length], cache=CACHE)
        shorter = prefixes.remove_shorter(info.key[:9])
        assert len(shorter) == (length > 2 * PAGE + 1)
        tokens, stats = answer(model, ids, prefixes)
        assert tokens == plain
        assert stats.pages == length // PAGE
        assert [other.key for other in prefixes.store.segments()] == [info.key]
    short = [*ids[: 2 * PAGE + 1], *tiny.prompt(9, seed=4)]
    tokens, stats = answer(model, short, prefixes)
    assert tokens == answer(model, short, None)[0]
    assert stats.pages == 2
    assert len([path for path in (tmp_path / "data").iterdir() if any(path.iterdir())]) == 1


def test_a_prompt_stored_by_the_former_version_has_its_tokens(tmp_path, model, ids, monkeypatch):
    with monkeypatch.context() as former:
        former.setattr(manifest, "VERSION", 2)
        prefixes = PrefixCache(tmp_path, config=LOAD)
        put, tail = prefixes.store.put, np.asarray(ids[3 * PAGE : 3 * PAGE + 3], np.int32)

        def as_before(name, tokens, *pages, sketches, **rest):
            return put(name, tokens[: 3 * PAGE], *pages, sketches={**sketches, TAIL: tail}, **rest)

        former.setattr(prefixes.store, "put", as_before)
        key = prefixes.add(model, ids[: 3 * PAGE + 3], cache=CACHE).key
    assert PrefixCache(tmp_path).tokens(model, key) == ids[: 3 * PAGE + 3]
    assert answer(model, ids, PrefixCache(tmp_path, config=LOAD))[1].pages == 3


def test_memory_may_be_cleared(tmp_path, model, ids, plain):
    prefixes = stored(tmp_path, model, ids)
    first = answer(model, ids, prefixes)[1]
    assert answer(model, ids, prefixes)[1].bytes_read == 0
    prefixes.clear_memory()
    tokens, again = answer(model, ids, prefixes)
    assert tokens == plain
    assert again.bytes_read == first.bytes_read
    assert again.sketch_bytes == 0


@pytest.mark.slow
def test_a_prompt_may_fill_the_context(tmp_path, model):
    document = tiny.prompt(1024 - 6 - QUESTION)
    prefixes = PrefixCache(tmp_path, config=dataclasses.replace(LOAD, by="all"))
    prefixes.add(model, document, cache=CACHE)
    tokens, stats = answer(model, document + tiny.prompt(QUESTION, seed=3), prefixes)
    assert tokens == answer(model, document + tiny.prompt(QUESTION, seed=3), None)[0]
    assert stats.pages == 126


def test_the_last_token_is_always_computed(tmp_path, model, ids):
    prefixes = stored(tmp_path, model, ids)
    whole = ids[: 12 * PAGE]
    tokens, stats = answer(model, whole, prefixes)
    assert stats.pages == 11
    assert tokens == answer(model, whole, None)[0]


def shards(folder):
    """The files that hold keys and values."""
    found = [path for path in folder.glob("data/*/c/**/*") if path.is_file()]
    assert found
    return found


@pytest.mark.parametrize(
    ("model", "load_policy", "damage"),
    [
        *itertools.product(["llama"], ["load", "auto"], ["flipped", "cut", "empty", "gone"]),
        ("latents", "load", "flipped"),
    ],
    indirect=["model"],
)
def test_damaged_pages_are_recomputed_never_attended_to(
    tmp_path, model, ids, plain, damage, load_policy
):
    prefixes = stored(tmp_path, model, ids, dataclasses.replace(LOAD, load_policy=load_policy))
    for path in shards(tmp_path):
        content = bytearray(path.read_bytes())
        if damage == "flipped":
            content[len(content) // 3] ^= 64
        elif damage == "cut":
            content = content[: len(content) // 2]
        elif damage == "empty":
            content = b""
        path.write_bytes(content) if damage != "gone" else path.unlink()
    tokens, stats = answer(model, ids, prefixes)
    assert tokens == plain
    assert stats is None


@pytest.mark.parametrize("load_policy", ["load", "auto"])
def test_a_failed_read_can_be_an_error(tmp_path, model, ids, load_policy):
    config = dataclasses.replace(LOAD, on_read_failure="fail", load_policy=load_policy)
    prefixes = stored(tmp_path, model, ids, config)
    for path in shards(tmp_path):
        path.write_bytes(b"")
    with pytest.raises(KvjaxError, match="could not be read"):
        answer(model, ids, prefixes)


@pytest.mark.parametrize("other", ["weights", "rope", "dtype", "tenant", "page size"])
def test_pages_of_something_else_are_never_found(tmp_path, model, ids, other):
    prefixes, cache = stored(tmp_path, model, ids), CACHE
    if other == "weights":
        scaled = {**model.params, "norm": {"weight": model.params["norm"]["weight"] * 2}}
        model = dataclasses.replace(model, params=scaled)
    elif other == "rope":
        layers = tuple(dataclasses.replace(x, rope_theta=5e5) for x in model.config.layers)
        model = dataclasses.replace(model, config=dataclasses.replace(model.config, layers=layers))
    elif other == "dtype":
        cache = dataclasses.replace(cache, dtype="bfloat16")
    elif other == "tenant":
        prefixes = PrefixCache(tmp_path, config=LOAD, tenant="somebody else")
    else:
        cache = CacheConfig(page_size=16)
    result = kvjax.generate(model, ids, max_new_tokens=2, cache=cache, prefixes=prefixes)
    assert result.stats.prefix is None


def test_the_tokens_after_the_last_page_are_kept(tmp_path, model, ids):
    prefixes = stored(tmp_path, model, ids)
    key = prefixes.store.segments()[0].key
    assert prefixes.tokens(model, key[:8]) == ids[:DOCUMENT]
    with pytest.raises(UnknownKeyError, match="no stored prefix has a key that starts with 'ff"):
        prefixes.tokens(model, "ff" * 32)


def test_recompute_is_chosen_where_reading_is_slower(tmp_path, model, ids, plain, monkeypatch):
    from kvjax.decode import open_prefixes as module

    prefixes = stored(tmp_path, model, ids, dataclasses.replace(LOAD, load_policy="auto"))
    monkeypatch.setattr(module, "measure_reads", lambda *_: (1e9, 1.0))
    tokens, stats = answer(model, ids, prefixes)
    assert stats is None
    assert tokens == plain
    always = PrefixCache(tmp_path, config=dataclasses.replace(LOAD, load_policy="recompute"))
    assert answer(model, ids, always)[1] is None


def test_a_store_that_does_not_answer_is_measured_no_longer_than_a_read_may_take(
    tmp_path, model, ids, plain, monkeypatch
):
    """Weighing reading against prefill reads too."""
    config = dataclasses.replace(LOAD, load_policy="auto", timeout_s=0.5)
    prefixes = stored(tmp_path, model, ids, config)
    promise, future = ts.Promise.new()
    monkeypatch.setattr("kvjax.storage.stored_array.read_places", lambda *_: future)
    began = time.monotonic()
    tokens, stats = answer(model, ids, prefixes)
    assert (tokens, stats) == (plain, None)
    assert time.monotonic() - began < 60  # prefill may compile
    promise.set_exception(OSError("late"))


def test_a_sketch_that_was_not_stored_is_named(tmp_path, model, ids):
    stored(tmp_path, model, ids)
    other = PrefixCache(tmp_path, config=dataclasses.replace(LOAD, by="mean"))
    with pytest.raises(KvjaxError, match="has no mean sketch"):
        answer(model, ids, other)


def test_bad_input_is_refused_before_anything_runs(tmp_path, model, ids):
    for wrong in ("0%", "101%", "much", "5 parsecs"):
        with pytest.raises(KvjaxError, match="budget is"):
            PrefixConfig(budget=wrong)
    for field, value in (
        ("by", "luck"),
        ("who", "me"),
        ("load_policy", "never"),
        ("placement", "here"),
        ("on_read_failure", "cry"),
        ("host_bytes", -1),
        ("timeout_s", 0),
        ("bits", 5),
    ):
        with pytest.raises(KvjaxError, match=field):
            PrefixConfig(**{field: value})
    prefixes = PrefixCache(tmp_path, config=LOAD)
    with pytest.raises(KvjaxError, match="needs a page of 8 or more"):
        prefixes.add(model, ids[: PAGE - 1], cache=CACHE)
    with pytest.raises(KvjaxError, match="one prompt at a time"):
        kvjax.generate(model, [ids, ids], prefixes=prefixes)
    with pytest.raises(KvjaxError, match="layers of different shapes"):
        prefixes.add(tiny.model("groups_of_3"), ids, cache=CACHE)


def test_the_distribution_comes_nearer_as_the_budget_grows(tmp_path, model, ids):
    """Bytes used are exactly those of the chosen pages."""
    used = []
    for budget in ("2 pages", "50%", "100%"):
        config = dataclasses.replace(LOAD, budget=budget, host_bytes=0)
        _, stats = answer(model, ids, stored(tmp_path, model, ids, config))
        assert stats.bytes_used == stats.pages_chosen * model.spec.bytes_per_page(PAGE)
        assert stats.read_amplification == pytest.approx(1, abs=0.02)
        used.append(stats.bytes_used)
    assert used == sorted(used)
    assert np.isfinite(used).all()
