"""Pages over tiers in fewer bits: what is fetched, and that where a page is does not matter."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.config import CacheConfig
from kvjax.decode import generate
from kvjax.errors import KvjaxError
from kvjax.formats import Format, float8, int4, int8
from kvjax.model import from_checkpoint
from kvjax.models import random_checkpoint
from kvjax.pallas_kernels import PackedPages
from kvjax.policies import Place, Select, Window
from tests.kvjax.decode.forced import forced_logits
from tests.kvjax.decode.tiny import attention, config, model, no_cache_logits, prompt

SIZE, PROMPTS, NEW = 8, (41, 7), 12


@dataclasses.dataclass(frozen=True)
class Whole:
    """A packing that loses nothing and saves nothing: every element is its own group's scale."""

    def check(self, what, page_size, dim):
        pass

    def encode(self, pages, positions):
        del positions
        return PackedPages(
            planes={"codes": jnp.ones(pages.shape, jnp.int8)},
            scale=pages.astype(jnp.float32),
            middle=None,
            unit=None,
            levels=None,
            outlier_at=None,
            outlier_value=None,
            bits=8,
            centre=0.0,
        )

    def decode(self, packed):
        return packed.values()


FORMATS = {
    "whole": Format(Whole(), Whole()),
    "int4": int4(),
    "int4-int2": int4(value_bits=2),
    "int8": int8(),
    "int4, first 9 tokens": dataclasses.replace(int4(), sinks=9),
    "int4, all tokens": dataclasses.replace(int4(), sinks=64),
}


@functools.cache
def made():
    checkpoint = random_checkpoint(config(attention()), seed=3)
    return from_checkpoint(checkpoint, name="one layer", dtype="float32")


def over_tiers(format, times, budget="50%", **place):
    return CacheConfig(
        page_size=SIZE,
        format=None if format is None else FORMATS[format],
        select=Select(budget, "keys"),
        window=None if times is None else Window(times, "lru"),
        place=None if times is None else Place(**place),
    )


def run(cache):
    ids = [prompt(n + NEW, row) for row, n in enumerate(PROMPTS)]
    heads = [row[:n] for row, n in zip(ids, PROMPTS, strict=True)]
    tails = [row[n:] for row, n in zip(ids, PROMPTS, strict=True)]
    got, stats, _ = forced_logits(made(), heads, tails, cache)
    return ids, got, stats


@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize("format", ["whole", "int4, all tokens"])
def test_a_format_that_loses_nothing_changes_nothing(format, times):
    ids, got, _ = run(over_tiers(format, times, "100%"))
    for row, n in enumerate(PROMPTS):
        want = no_cache_logits(made(), ids[row])[n - 1 : n - 1 + len(got[row])]
        np.testing.assert_allclose(got[row], want, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int4", "int4, first 9 tokens"])
def test_where_a_page_is_does_not_matter(format):
    _, near, stats = run(over_tiers(format, 9))
    layer = made().spec.layers[0]
    a_page = SIZE * layer.elements_per_token * 4 * len(PROMPTS)  # of all heads and rows
    first = FORMATS[format].sink_tokens(SIZE) // SIZE
    assert stats.device_bytes == a_page * (stats.slots + first)
    for times in (0, 1):
        for x, y in zip(run(over_tiers(format, times))[1], near, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)


def test_fewer_bytes_are_fetched_and_kept():
    plain, packed = (run(over_tiers(name, 0))[2] for name in (None, "int8"))
    assert packed.misses == plain.misses
    # A float32 page of 8 tokens of 8 elements, against a byte an element and a scale a token.
    share = (64 + 8 * 2) / 256
    assert packed.bytes_moved == plain.bytes_moved * share
    assert packed.host_bytes == plain.host_bytes * share


@pytest.mark.slow
def test_a_store_keeps_the_same_bytes(tmp_path):
    near = run(over_tiers("int4", 0))[1]
    cache = over_tiers("int4", 0, store=str(tmp_path), codec="zstd")
    for _ in range(2):  # written, then found
        _, got, stats = run(cache)
        for x, y in zip(got, near, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)
        assert stats.store.units_read > 0
    files = len(list(tmp_path.rglob("*")))
    run(cache)
    assert len(list(tmp_path.rglob("*"))) == files
    run(over_tiers("int8", 0, store=str(tmp_path)))
    assert len(list(tmp_path.rglob("*"))) > files  # pages of one format serve no other


@pytest.mark.slow
def test_keys_and_values_of_different_bits_share_what_they_save():
    both, one = (run(over_tiers(name, 0))[2].bytes_moved for name in ("int4", "int4-int2"))
    # Of a page of 8 x 8: 4 bits a key, 2 a value, and scales, middles and units of a byte or two.
    assert one < both * 0.9


@pytest.mark.slow
def test_hot_pages_stay_exact_until_they_leave():
    exact = run(over_tiers(None, 9, "100%"))[1]
    hot = run(over_tiers("int4", 9, "100%", hot_exact=True))[1]
    cold = run(over_tiers("int4", 9, "100%"))[1]
    for x, y, z in zip(hot, exact, cold, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
        assert np.abs(z - y).max() > 1e-3


def test_what_does_not_go_together_is_refused(tmp_path):
    with pytest.raises(KvjaxError, match=r"place\.order is 'cluster'"):
        over_tiers("int4", 1, store=str(tmp_path), order="cluster")
    with pytest.raises(KvjaxError, match="place is None"):
        over_tiers("int4", None)
    with pytest.raises(KvjaxError, match=r"place\.codec is 'splitzip'"):
        over_tiers("int4", 1, store=str(tmp_path), codec="splitzip")
    for format, message in (
        (dataclasses.replace(int4(), skip_layers=(0,)), r"format\.skip_layers is \(0,\)"),
        (dataclasses.replace(int4(), residual=32), r"format\.residual is 32"),
        (float8(products="float8"), r"format\.products is 'float8'"),
    ):
        cache = dataclasses.replace(over_tiers("int4", 1), format=format)
        with pytest.raises(KvjaxError, match=message):
            generate(model("llama"), prompt(20), cache=cache)
    with pytest.raises(KvjaxError, match="hot_exact is True and format is None"):
        over_tiers(None, 1, hot_exact=True)
    cache = dataclasses.replace(over_tiers("int4", 1), format="kivi2")
    with pytest.raises(KvjaxError, match="page_size is 8: groups of 32 tokens"):
        generate(made(), prompt(20), cache=cache)
