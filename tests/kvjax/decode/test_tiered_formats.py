"""Pages over tiers in fewer bits: what is fetched, and that where a page is does not matter."""

import dataclasses
import functools
import itertools

import jax
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
from kvjax.storage.page_order import PAGE_PLACES
from kvjax.storage.page_store import PageStore
from tests.kvjax.decode.forced import forced_logits
from tests.kvjax.decode.plain_tiers import PlainTiers
from tests.kvjax.decode.test_tiered_sliding import made as windowed
from tests.kvjax.decode.tiny import attention, config, model, no_cache_logits, prompt
from tests.kvjax.formats import plain_codes

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
    "kvquant": plain_codes.kvquant(),
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


@pytest.mark.slow
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


class PackedTiers(PlainTiers):
    """The same where pages that are full are read as what a format's codes stand for.

    That is so for tokens after the prompt, but for the first pages if the format leaves these;
    pages are chosen by what the model made.
    """

    def __init__(self, of, ids, format, **options):
        self._format = format
        super().__init__(of, ids, **options)

    def _attend(self, layer, q, k, v, cache):
        if self._of.config.layers[layer].window is not None:
            return super()._attend(layer, q, k, v, cache)
        q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
        chosen = self._format.layer(self._of.spec, layer)
        codes = plain_codes.of_tokens(chosen, k, v, self._size, 0)
        out, group = np.zeros((*q.shape[:2], v.shape[2])), q.shape[1] // k.shape[1]
        for t, head in itertools.product(range(len(q)), range(k.shape[1])):
            rows, full = slice(head * group, (head + 1) * group), t // self._size
            scale, position = self._of.config.scale(layer), np.arange(t + 1)
            seen = is_code = np.zeros(t + 1, bool)
            if t < self._prompt:
                seen = ~seen
            else:
                _, pages = self._choose(scale * q[t, rows] @ k[: t + 1, head].T, full)
                seen = np.isin(position // self._size, [*pages, full])
                is_code = (position >= self._format.sink_tokens(self._size)) & (
                    position < full * self._size
                )
            keys, values = (
                np.where(is_code[:, None], kept[: t + 1, head], made[: t + 1, head])
                for kept, made in zip(codes, (k, v), strict=True)
            )
            scores = np.where(seen, scale * q[t, rows] @ keys.T, -np.inf)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out[t, rows] = weights / weights.sum(1, keepdims=True) @ values
        return jnp.asarray(out, jnp.float32), cache


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "name", "times"),
    [
        ("int4, first 9 tokens", "one layer", 0),
        ("int4, first 9 tokens", "one layer", 2),
        ("int4, first 9 tokens", "windows", 1),
        ("kvquant", "one layer", 0),
    ],
)
def test_half_the_pages_equal_what_their_codes_say_in_numpy(format, name, times):
    """Chosen by exact keys and read as codes, but for the first pages and the open one."""
    of, chosen = made() if name == "one layer" else windowed(), FORMATS[format]
    lengths, new = (85, 30), 20
    ids = [prompt(n + new, row) for row, n in enumerate(lengths)]
    heads = [row[:n] for row, n in zip(ids, lengths, strict=True)]
    tails = [row[n:] for row, n in zip(ids, lengths, strict=True)]
    got, stats, _ = forced_logits(of, heads, tails, over_tiers(format, times))
    half = {"size": SIZE, "count": 7}, {"size": SIZE, "count": 4}  # of 14 pages and of 7
    for row, n in enumerate(lengths):
        codes = PackedTiers(of, ids[row], chosen, prompt=n, **half[row]).logits
        np.testing.assert_allclose(got[row], codes, atol=1e-4, rtol=1e-4)
        exact = PlainTiers(of, ids[row], prompt=n, **half[row]).logits
        assert np.abs(codes - exact)[1:].max() > 1e-2
    assert stats.misses > 0


@pytest.mark.slow
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
def test_pages_of_near_keys_lie_next_to_each_other_in_the_store(tmp_path):
    """As the keys say that the bytes stand for; and each page is found where it lies."""
    near = run(over_tiers("int4", 0))[1]
    cache = over_tiers("int4", 0, store=str(tmp_path), order="cluster")
    for _ in range(2):  # written, then found
        ids, got, _ = run(cache)
        for x, y in zip(got, near, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)
    of, full, ids = made(), PROMPTS[0] // SIZE, ids[0][: PROMPTS[0]]
    made_keys = PlainTiers(of, ids, prompt=len(ids), size=SIZE, count=1)
    chosen = FORMATS["int4"].layer(of.spec, 0)
    keys, _ = plain_codes.of_tokens(chosen, made_keys.keys[0], made_keys.values[0], SIZE, 0)
    means = keys[: full * SIZE].reshape(full, SIZE, *keys.shape[1:]).mean(1)
    store = PageStore.open(tmp_path)
    (written,) = (info.key for info in store.segments() if info.tokens == len(ids))
    with store.open_segment(written) as segment:
        places = segment.sketch(PAGE_PLACES)[0]
    for head, order in enumerate(np.argsort(places, axis=1)):
        assert sorted(order) == list(range(full))
        assert order[0] == 0
        for i, page in enumerate(order[:-1]):
            apart = np.square(means[order[i + 1 :], head] - means[page, head]).sum(1)
            assert apart.argmin() == 0


@pytest.mark.parametrize("part", ["k", "v"])
def test_a_prompt_that_is_not_finite_is_not_stored(tmp_path, part):
    """Bytes of a format say nothing of it."""

    def grown(path, weight):
        own = f"['layers'][0]['attention']['{part}']['weight']"
        return weight * 1e9 if jax.tree_util.keystr(path) == own else weight

    params = jax.tree_util.tree_map_with_path(grown, made().params)
    of = dataclasses.replace(made(), params=params)
    cache = over_tiers("int8", 1, store=str(tmp_path))
    cache = dataclasses.replace(cache, dtype="float16")
    with pytest.raises(KvjaxError, match="are not finite in float16"):
        generate(of, prompt(20), cache=cache, max_new_tokens=2)
    assert not PageStore.open(tmp_path).segments()


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
    with pytest.raises(KvjaxError, match=r"place\.keep_generated is True"):
        over_tiers("int4", 1, store=str(tmp_path), keep_generated=True)
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
