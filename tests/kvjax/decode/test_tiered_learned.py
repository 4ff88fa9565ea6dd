"""Decoding over pages that a distilled indexer chooses."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.config import CacheConfig
from kvjax.decode import distill_indexer, generate
from kvjax.decode.program import compilations
from kvjax.decode.tiered_index import build_index, page_mass
from kvjax.errors import KvjaxError
from kvjax.policies import Place, Select, Window
from tests.kvjax.decode.forced import forced_logits
from tests.kvjax.decode.plain_tiers import PlainTiers
from tests.kvjax.decode.tiny import model, no_cache_logits, prompt

SIZE = 8
LENGTHS, TOKENS = (85, 64, 30), 19  # pages begin, end, and fill while decoding


@functools.cache
def indexer(name, seed=0):
    return distill_indexer(model(name), prompt(256), tokens=256, heads=2, dim=8, steps=3, seed=seed)


class ByIndexer(PlainTiers):
    """The oracle with the pages that each layer's own indexer, built anew in each step, ranks."""

    def __init__(self, of, learned, ids, **options):
        self._learned = learned
        super().__init__(of, ids, **options)

    def _attend(self, layer, q, k, v, cache):
        self._now, self._asked = (self._learned.layers[layer], q, k), 0
        return super()._attend(layer, q, k, v, cache)

    def _choose(self, scores, full):
        index, q, k = self._now
        t = self._prompt + self._asked % (len(q) - self._prompt)  # head after head
        self._asked += 1
        pages = jnp.asarray(k)[: full * SIZE].reshape(full, SIZE, *k.shape[1:]).swapaxes(1, 2)
        live = jnp.int32(full)
        arrays = index.build(pages, live)
        mass = np.asarray(index.page_mass(arrays, q[t], live, 1.0, position=jnp.int32(t)))[0]
        order = sorted(range(full), key=lambda page: (page not in (0, full - 1), -mass[page], page))
        return mass, sorted(order[: self._count])


def decoded(name, budget, lengths):
    """Each row's ids, and its logits as decoded over tiers."""
    ids = [prompt(n + TOKENS, row) for row, n in enumerate(lengths)]
    prompts = [row[:n] for row, n in zip(ids, lengths, strict=True)]
    given = [row[n:] for row, n in zip(ids, lengths, strict=True)]
    cache = CacheConfig(
        page_size=SIZE, select=Select(budget, indexer(name)), window=Window(1), place=Place()
    )
    return ids, forced_logits(model(name), prompts, given, cache).logits


def test_all_pages_are_exact():
    """One of the two layers has a sliding window, and no indexer."""
    ids, got = decoded("gemma", "100%", LENGTHS)
    for row, n in enumerate(LENGTHS):
        want = no_cache_logits(model("gemma"), ids[row])[n - 1 :][: len(got[row])]
        np.testing.assert_allclose(got[row], want, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_pages_are_those_that_each_layers_indexer_chooses():
    """As pages fill, too; the layers swapped would choose others."""
    (ids,), (got,) = decoded("llama", "4 pages", (85,))
    options = {"prompt": 85, "size": SIZE, "count": 4}
    plain = ByIndexer(model(), indexer("llama"), ids, **options)
    np.testing.assert_allclose(got, plain.logits[: len(got)], atol=1e-4, rtol=1e-4)
    learned = indexer("llama")
    swapped = dataclasses.replace(learned, layers=learned.layers[::-1])
    other = ByIndexer(model(), swapped, ids, **options)
    assert np.abs(got - other.logits[: len(got)]).max() > 0.01


@pytest.mark.slow
def test_one_program_serves_all_that_were_learned():
    """Weights are its arguments: another indexer compiles nothing, and chooses its own pages."""
    ids, count = prompt(85 + TOKENS), {"prompt": 85, "size": SIZE, "count": 4}
    rows = []
    for seed in (0, 1):
        learned = indexer("llama", seed)
        by = Select("4 pages", learned)
        cache = CacheConfig(page_size=SIZE, select=by, window=Window(1), place=Place())
        before = compilations()
        (got,) = forced_logits(model(), [ids[:85]], [ids[85:]], cache).logits
        compiled = compilations() - before
        want = ByIndexer(model(), learned, ids, **count).logits[: len(got)]
        np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-4)
        rows.append(got)
    assert compiled == 0
    assert np.abs(rows[0] - rows[1]).max() > 1e-3


@pytest.mark.slow
def test_it_is_told_where_the_token_is():
    of, layer = model(), indexer("llama").layers[1]
    rng = np.random.default_rng(0)
    keys = jnp.asarray(rng.normal(size=(6, 2, 8, 8)), jnp.float32)
    queries = jnp.asarray(rng.normal(size=(4, 8)), jnp.float32)
    full = jnp.int32(6)
    arrays = build_index(layer, keys, keys, full)
    masses = [
        page_mass(layer, of.config, 1, queries, arrays, jnp.int32(length), full)
        for length in (48, 53)
    ]
    for length, mass in zip((48, 53), masses, strict=True):
        wanted = layer.page_mass(arrays, queries, full, 1.0, position=jnp.int32(length))
        np.testing.assert_array_equal(mass, wanted)
    assert np.abs(masses[0] - masses[1]).max() > 1e-3


def test_an_indexer_of_another_model_is_refused():
    cache = CacheConfig(select=Select("25%", indexer("llama")))
    with pytest.raises(KvjaxError, match=r"by is an indexer of model .* and mha is"):
        generate(model("mha"), prompt(40), max_new_tokens=2, cache=cache)
