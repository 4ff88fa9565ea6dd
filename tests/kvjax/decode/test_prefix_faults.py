"""Stored prefixes under bad luck: wrong guesses, damage, threads, interruptions, tight memory."""

import concurrent.futures
import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.config import CacheConfig
from kvjax.decode import PrefixCache, PrefixConfig, memory
from kvjax.errors import KvjaxError
from kvjax.storage.prefetch import Prefetcher
from kvjax.storage.tiers import Tiers
from tests.kvjax.decode import tiny

PAGE = 8
CACHE = CacheConfig(page_size=PAGE)
DOCUMENT, QUESTION = 12 * PAGE + 3, 9
LOAD = PrefixConfig(load_policy="load", budget="100%")


@pytest.fixture(scope="module")
def model(request):
    return tiny.model(getattr(request, "param", "llama"))


@pytest.fixture(scope="module")
def ids():
    return tiny.prompt(DOCUMENT + QUESTION)


def answer(model, ids, prefixes, cache=CACHE):
    result = kvjax.generate(
        model, ids, max_new_tokens=6, stop_at_eos=False, cache=cache, prefixes=prefixes
    )
    return result.tokens[0], result.stats


@pytest.fixture(scope="module")
def plain(model, ids):
    return answer(model, ids, None)[0]


def stored(folder, model, ids, config=LOAD, **options):
    prefixes = PrefixCache(folder, config=config, **options)
    prefixes.add(model, ids[:DOCUMENT], cache=CACHE)
    return prefixes


class BadGuesses(Prefetcher):
    """Reads of what nobody has demanded yet go wrong."""

    kind = "raises"

    def __init__(self, read, *arguments, **options):
        self.demanded = set()

        def faulty(units):
            if all(tuple(unit) in self.demanded for unit in units.tolist()):
                return read(units)
            if self.kind == "raises":
                raise OSError("a cable was cut")
            futures = [concurrent.futures.Future() for _ in units]
            for future in futures:
                if self.kind == "fails":
                    future.set_exception(OSError("a cable was cut"))
                elif self.kind == "another shape":
                    future.set_result(np.zeros((1, 2), np.float32))
            return futures  # or it never returns

        super().__init__(faulty, *arguments, **options)

    def issue(self, units, *, demand):
        if demand:
            self.demanded |= {tuple(unit) for unit in np.asarray(units).tolist()}
        return super().issue(units, demand=demand)


@pytest.mark.parametrize("kind", ["raises", "fails", "another shape", "never returns"])
def test_guesses_that_go_wrong_change_nothing(tmp_path, model, ids, monkeypatch, kind):
    half = dataclasses.replace(LOAD, budget="50%", host_bytes=0, timeout_s=4.0)
    expected, quiet = answer(
        model, ids, stored(tmp_path, model, ids, dataclasses.replace(half, prefetch=False))
    )
    monkeypatch.setattr(BadGuesses, "kind", kind)
    monkeypatch.setattr(memory, "Prefetcher", BadGuesses)
    tokens, stats = answer(model, ids, PrefixCache(tmp_path, config=half))
    assert tokens == expected
    assert stats.prefix.bytes_used == quiet.prefix.bytes_used
    assert stats.prefix.bytes_prefetched == 0


@pytest.mark.slow
def test_a_prompt_may_share_one_page(tmp_path, model, ids):
    prefixes = stored(tmp_path, model, ids)
    other = [*ids[: PAGE + 2], *tiny.prompt(20, seed=3)]
    tokens, stats = answer(model, other, prefixes)
    assert tokens == answer(model, other, None)[0]
    assert (stats.prefix.pages, stats.prefix.pages_chosen) == (1, 1)


@pytest.mark.slow
def test_a_document_may_have_one_page(tmp_path, model, ids):
    prefixes = PrefixCache(tmp_path, config=LOAD)
    prefixes.add(model, ids[: PAGE + 1], cache=CACHE)
    tokens, stats = answer(model, ids, prefixes)
    assert tokens == answer(model, ids, None)[0]
    assert stats.prefix.pages == 1


def test_what_follows_may_be_too_long_for_one_program(tmp_path, model, ids, plain, monkeypatch):
    monkeypatch.setattr("kvjax.decode.prefix_call.LARGEST_SUFFIX", 8)
    tokens, stats = answer(model, ids, stored(tmp_path, model, ids))
    assert tokens == plain
    assert stats.prefix is None
    assert "too long" in stats.prefix_unused


@pytest.mark.parametrize("name", ["low-bit-3-1", "prefill_s"])
@pytest.mark.parametrize("load_policy", ["load", "auto"])
def test_a_damaged_sketch_is_recomputed(tmp_path, model, ids, plain, name, load_policy):
    prefixes = stored(tmp_path, model, ids, dataclasses.replace(LOAD, load_policy=load_policy))
    damaged = [path for path in tmp_path.glob("data/*/sketches/*") if path.name.startswith(name)]
    assert damaged
    for path in damaged:
        content = bytearray(path.read_bytes())
        content[0] ^= 1
        path.write_bytes(content)
    tokens, stats = answer(model, ids, prefixes)
    assert tokens == plain
    if name == "low-bit-3-1" and load_policy == "load":
        assert stats.prefix is None
        assert "could not be read" in stats.prefix_unused
    refusing = PrefixCache(tmp_path, config=dataclasses.replace(LOAD, on_read_failure="fail"))
    if name == "low-bit-3-1":
        with pytest.raises(KvjaxError, match="could not be read"):
            answer(model, ids, refusing)


def test_damage_is_counted_and_mended_by_adding_again(tmp_path, model, ids, plain):
    prefixes = stored(tmp_path, model, ids)
    for path in tmp_path.glob("data/*/c/**/*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-9])
    assert answer(model, ids, prefixes)[1].prefix is None
    assert sum(prefixes.store.stats().misses.values()) > 0
    assert answer(model, ids, prefixes)[1].prefix_unused == "nothing of the prompt is stored"
    prefixes.add(model, ids[:DOCUMENT], cache=CACHE)
    tokens, stats = answer(model, ids, prefixes)
    assert tokens == plain
    assert stats.prefix is not None


def test_another_sketch_is_added_to_what_is_stored(tmp_path, model, ids, plain):
    stored(tmp_path, model, ids)
    means = dataclasses.replace(LOAD, by="mean")
    other = stored(tmp_path, model, ids, means)
    assert len(other.store.segments()) == 1
    for config in (LOAD, means):
        tokens, stats = answer(model, ids, PrefixCache(tmp_path, config=config))
        assert tokens == plain
        assert stats.prefix is not None


def test_every_page_is_every_page(tmp_path, model, ids, plain):
    prefixes = stored(tmp_path, model, ids, dataclasses.replace(LOAD, by="all", budget="25%"))
    tokens, stats = answer(model, ids, prefixes)
    assert tokens == plain
    assert stats.prefix.pages_chosen == stats.prefix.pages


def test_a_call_says_why_nothing_stored_was_used(tmp_path, model, ids):
    prefixes = stored(tmp_path, model, ids)
    _, stats = answer(model, tiny.prompt(40, seed=5), prefixes)
    assert stats.prefix_unused == "nothing of the prompt is stored"
    never = PrefixCache(tmp_path, config=dataclasses.replace(LOAD, load_policy="recompute"))
    assert answer(model, ids, never)[1].prefix_unused == "load_policy is 'recompute'"
    assert answer(model, ids, None)[1].prefix_unused is None


@pytest.mark.slow
def test_threads_share_a_cache(tmp_path, model, ids):
    """Each asks about a document of its own; memory of both is the same."""
    prompts = [tiny.prompt(DOCUMENT + QUESTION, seed=seed) for seed in range(4)]
    expected = [answer(model, prompt, None)[0] for prompt in prompts]
    config = dataclasses.replace(LOAD, device_bytes=40_000, host_bytes=40_000)
    prefixes = PrefixCache(tmp_path, config=config)
    for prompt in prompts:
        prefixes.add(model, prompt[:DOCUMENT], cache=CACHE)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda prompt: answer(model, prompt, prefixes), prompts * 3))
    assert [tokens for tokens, _ in found] == expected * 3
    assert [stats.prefix_unused for _, stats in found] == [None] * 12
    assert not [t for t in threading.enumerate() if "kvjax" in t.name]


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["take_changes", "write"])
def test_device_memory_that_could_not_be_updated_is_not_trusted(
    tmp_path, model, ids, plain, monkeypatch, error, place
):
    config = dataclasses.replace(LOAD, device_bytes=1 << 20, host_bytes=1 << 20, pin_host=True)
    prefixes = stored(tmp_path, model, ids, config)
    other = tiny.prompt(DOCUMENT + QUESTION, seed=9)
    prefixes.add(model, other[:DOCUMENT], cache=CACHE)
    other_plain = answer(model, other, None)[0]
    with monkeypatch.context() as patched:

        def fail(*_, **__):
            raise error

        if place == "take_changes":
            patched.setattr(Tiers, "take_changes", fail)
        else:
            patched.setattr("kvjax.decode.near_memory._with_rows", fail)
        with pytest.raises(error):
            answer(model, ids, prefixes)
    for _ in range(2):
        assert answer(model, other, prefixes)[0] == other_plain
        tokens, stats = answer(model, ids, prefixes)
        assert tokens == plain
    assert stats.prefix.device_hits == stats.prefix.units


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "latents"], indirect=True)
def test_open_prefixes_make_room_for_a_new_one(tmp_path, model, ids):
    first = stored(tmp_path / "one", model, ids)
    size = first.store.segments()[0].bytes
    prefixes = PrefixCache(tmp_path / "two", config=LOAD, max_bytes=2 * size + size // 2)
    for seed in range(4):
        prompt = tiny.prompt(DOCUMENT + QUESTION, seed=seed)
        prefixes.add(model, prompt[:DOCUMENT], cache=CACHE)
        assert answer(model, prompt, prefixes)[1].prefix is not None
    assert len(prefixes.store.segments()) == 2


def test_what_is_stored_is_not_prefilled_again(tmp_path, model, ids, monkeypatch):
    prefixes = stored(tmp_path, model, ids)
    (info,) = prefixes.store.segments()
    monkeypatch.setattr("kvjax.decode.prefixes.prefilled_pages", None)
    assert prefixes.add(model, ids[:DOCUMENT], cache=CACHE).key == info.key


def test_a_document_belongs_to_its_model_and_tenant(tmp_path, model, ids):
    stored(tmp_path, model, ids, tenant="a")
    key = PrefixCache(tmp_path, tenant="a").store.segments()[0].key
    assert PrefixCache(tmp_path, tenant="a").tokens(model, key) == ids[:DOCUMENT]
    with pytest.raises(KvjaxError, match="another tenant"):
        PrefixCache(tmp_path, tenant="b").tokens(model, key)
    scaled = jax.tree.map(lambda x: x * 2, model.params)
    with pytest.raises(KvjaxError, match="another model"):
        PrefixCache(tmp_path, tenant="a").tokens(dataclasses.replace(model, params=scaled), key)


def test_weights_that_change_in_place_are_another_model(tmp_path, model, ids):
    own = dataclasses.replace(model, params=jax.tree.map(jnp.array, model.params))
    prefixes = stored(tmp_path, own, ids)
    assert answer(own, ids, prefixes)[1].prefix is not None
    own.params["norm"]["weight"] = own.params["norm"]["weight"] * 2
    tokens, stats = answer(own, ids, prefixes)
    assert stats.prefix is None
    assert tokens == answer(own, ids, None)[0]


@pytest.mark.slow
def test_a_pool_of_given_size_is_kept_to(tmp_path, model, ids, plain):
    prefixes = stored(tmp_path, model, ids, dataclasses.replace(LOAD, budget="25%"))
    _, stats = answer(model, ids, prefixes, CacheConfig(page_size=PAGE, num_pages=30))
    assert stats.prefix is not None
    assert stats.pages_total == 30


def test_keys_that_overflow_are_not_stored(tmp_path, model, ids):
    large = dataclasses.replace(model, params=jax.tree.map(lambda x: x * 300, model.params))
    cache = CacheConfig(page_size=PAGE, dtype="float16")
    prefixes = PrefixCache(tmp_path, config=LOAD)
    with pytest.raises(KvjaxError, match="are not finite in float16"):
        prefixes.add(large, ids[:DOCUMENT], cache=cache)
    assert not prefixes.store.segments()
