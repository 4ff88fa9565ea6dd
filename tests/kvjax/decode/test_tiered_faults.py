"""One row of a batch whose pages cannot be read: it alone ends, and the error names the page."""

import copy
import dataclasses
import functools
import pickle
import threading
import time

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax.config import CacheConfig
from kvjax.decode import RowsFailedError, Sampling, generate, stream
from kvjax.errors import KvjaxError
from kvjax.model import from_checkpoint
from kvjax.models import random_checkpoint
from kvjax.policies import Place, Select, Window
from kvjax.storage.segment import Segment
from tests.kvjax.decode.tiny import VOCAB, attention, config, prompt

SIZE = 8
PROMPTS = [prompt(n, seed) for seed, n in enumerate((85, 64, 72))]
BAD = 1
DRAW = {"max_new_tokens": 12, "sampling": Sampling(temperature=1.5, top_k=20), "stop_at_eos": False}


@functools.cache
def tiny():
    return from_checkpoint(
        random_checkpoint(config(attention()), seed=3), name="tiny", dtype="float32"
    )


def cache_in(folder, timeout_s=30.0):
    place = Place(store=folder, host_bytes=0, timeout_s=timeout_s)
    return CacheConfig(
        page_size=SIZE, select=Select("25%", by="mean"), window=Window(0), place=place
    )


@functools.cache
def undisturbed():
    cache = CacheConfig(
        page_size=SIZE, select=Select("25%", by="mean"), window=Window(0), place=Place()
    )
    return generate(tiny(), PROMPTS, cache=cache, **DRAW)


@pytest.fixture
def faulty(monkeypatch):
    """Gives the n-th and later reads of one prompt's pages a fault, `times` of them."""
    whole = Segment.read

    def inject(fault, after, times):
        count, ended = [0], threading.Event()

        def read(segment, units):
            first = segment.tokens[:SIZE].tolist() == PROMPTS[BAD][:SIZE]
            if not first:
                return whole(segment, units)
            count[0] += 1
            if not after <= count[0] < after + times:
                return whole(segment, units)
            if fault == "fails":
                raise OSError("disk on fire")
            return [Late(ended) for _ in units]

        monkeypatch.setattr(Segment, "read", read)

    return inject


class Late:
    """A read that never returns."""

    def __init__(self, ended):
        self._ended = ended

    def done(self):
        return False

    def result(self, timeout=None):
        self._ended.wait(timeout)
        raise TimeoutError

    def add_done_callback(self, callback):
        pass


ALWAYS = 1 << 30


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "after"), [("fails", 5), ("never returns", 1)])
def test_one_row_ends_and_the_others_are_unharmed(faulty, tmp_path, fault, after):
    generate(tiny(), PROMPTS, cache=cache_in(tmp_path / "other"), **DRAW)  # compiles
    faulty(fault, after, ALWAYS)
    timeout_s = 0.5 if fault == "never returns" else 30.0
    began = time.monotonic()
    cache = cache_in(tmp_path / "pages", timeout_s)
    with pytest.raises(RowsFailedError) as caught:
        generate(tiny(), PROMPTS, cache=cache, **DRAW)
    assert time.monotonic() - began < 60
    error, want = caught.value, undisturbed()
    assert list(error.failures) == [BAD]
    assert f"prompt {BAD}: page " in str(error)
    assert "of layer 0, KV head " in str(error)
    assert "the other 2 answers are in this error's generation" in str(error)
    said = "longer Place.timeout_s" if fault == "never returns" else "disk on fire"
    assert said in str(error)
    got = error.generation
    assert got.finish_reasons == ["length", "error", "length"]
    for row in (0, 2):
        assert got.tokens[row] == want.tokens[row]
    assert got.tokens[BAD] == want.tokens[BAD][:after]
    assert got.stats.new_tokens == sum(map(len, got.tokens))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["fails", "never returns"])
def test_one_fault_is_none(faulty, tmp_path, fault):
    """A read that fails, or does not return in time, is made again."""
    faulty(fault, 3, 1)
    timeout_s = 0.5 if fault == "never returns" else 30.0
    got = generate(tiny(), PROMPTS, cache=cache_in(tmp_path, timeout_s), **DRAW)
    assert got.tokens == undisturbed().tokens
    assert got.finish_reasons == ["length"] * 3


@pytest.mark.slow
def test_a_prompt_alone_raises_too(faulty, tmp_path):
    faulty("fails", 2, ALWAYS)
    with pytest.raises(RowsFailedError, match=r"prompt 0: page \d+ of layer 0") as caught:
        generate(tiny(), PROMPTS[BAD], cache=cache_in(tmp_path), **DRAW)
    assert "other" not in str(caught.value)
    assert caught.value.generation.finish_reasons == ["error"]


@pytest.mark.slow
def test_a_stream_raises_after_the_tokens_that_were_drawn(faulty, tmp_path):
    faulty("fails", 2, ALWAYS)
    drawn = []
    with pytest.raises(KvjaxError, match=r"page \d+ of layer 0, KV head") as caught:  # noqa: PT012
        for event in stream(tiny(), PROMPTS[BAD], cache=cache_in(tmp_path), **DRAW):
            drawn.append(event.token)
    assert isinstance(caught.value.__cause__, OSError)
    assert len(drawn) == 2


def test_the_next_call_is_as_if_nothing_had_been(faulty, tmp_path):
    faulty("fails", 1, ALWAYS)
    with pytest.raises(RowsFailedError):
        generate(tiny(), PROMPTS, cache=cache_in(tmp_path), **DRAW)
    faulty("fails", ALWAYS, 1)
    got = generate(tiny(), PROMPTS, cache=cache_in(tmp_path), **DRAW)
    assert got.tokens == undisturbed().tokens


@pytest.mark.slow
@pytest.mark.parametrize("tiers", [True, False])
def test_logits_that_are_not_finite_end_their_row_only(tiers):
    """A token whose embedding is NaN stands in one prompt."""
    of = from_checkpoint(
        random_checkpoint(config(attention(), tie_embeddings=False), seed=3),
        name="untied",
        dtype="float32",
    )
    bad = VOCAB - 1

    def poison(path, array):
        embed = "embed" in jax.tree_util.keystr(path)
        return array.at[bad].set(jnp.nan) if embed else array

    params = jax.tree_util.tree_map_with_path(poison, of.params)
    prompts = [[token % bad for token in ids] for ids in PROMPTS]
    select = {"select": Select("25%", by="mean"), "place": Place()} if tiers else {}
    options = {"cache": CacheConfig(page_size=SIZE, **select), "max_new_tokens": 6}
    want = generate(of, prompts, **options).tokens
    assert bad not in [token for row in want for token in row]
    prompts[BAD][40] = bad
    with pytest.raises(RowsFailedError, match=r"prompt 1: the logits of .* not finite") as caught:
        generate(dataclasses.replace(of, params=params), prompts, **options)
    got = caught.value.generation
    assert got.finish_reasons == ["length", "error", "length"]
    assert got.tokens == [want[0], [], want[2]]


def test_the_error_can_be_copied_and_sent(faulty, tmp_path):
    """Process pools pickle what a call raises."""
    faulty("fails", 1, ALWAYS)
    with pytest.raises(RowsFailedError) as caught:
        generate(tiny(), PROMPTS, cache=cache_in(tmp_path), **DRAW)
    for again in (copy.copy(caught.value), pickle.loads(pickle.dumps(caught.value))):
        assert str(again) == str(caught.value)
        assert again.generation == caught.value.generation
        assert list(again.failures) == [BAD]
    assert issubclass(RowsFailedError, kvjax.KvjaxError)
