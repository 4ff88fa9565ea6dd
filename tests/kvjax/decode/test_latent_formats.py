"""Latents in packed pages: equal to NumPy's float64, which unpacks and attends for itself."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax import CacheConfig, KvjaxError
from kvjax.decode import PrefixCache, PrefixConfig
from kvjax.decode.meter import Meter
from kvjax.decode.shapes import plan
from kvjax.formats import NAMED, Format, StaticFloat8, int4, int8, kivi
from kvjax.formats.constant import Constant
from kvjax.pallas_kernels import encoded_before
from kvjax.policies import Place, Select, Window
from kvjax.storage.sessions import PageReads
from tests.kvjax.decode import tiny
from tests.kvjax.decode.forced import forced_logits
from tests.kvjax.decode.test_latent_pages import model, paged_logits
from tests.kvjax.decode.tiny import logprobs, prompt
from tests.pallas_kernels.latent_conformance import unpacked

TOKENS = 150


class Oracle:
    """Absorbed attention: each query sees as codes what was encoded when it came.

    Of layers in `read` it sees what is marked there.
    """

    def __init__(self, of, format, tokens, page):
        self.of, self.format, self.page, self.read = of, format, page, {}
        positions = np.arange(tokens)
        limit = [encoded_before(int(t), format.recent(page), page) for t in positions]
        self.seen = positions[None] <= positions[:, None]
        self.coded = (positions[None] < np.asarray(limit)[:, None]) & (
            positions[None] >= format.sink_tokens(page)
        )

    def __call__(self, *args):
        raise AssertionError("layers with latents attend to these")

    def latents(self, layer, q, q_rope, latent, rotated, state):
        chosen = self.format.layer(self.of.spec, layer)
        parts = []
        for packing, rows in ((chosen.values, latent), (chosen.keys, rotated)):
            pages = rows.reshape(-1, 1, self.page, rows.shape[1])
            first = jnp.arange(0, rows.shape[0], self.page, dtype=jnp.int32)
            parts.append((rows, packing.encode(pages, first)))
        attend = functools.partial(self.attend, layer)
        shape = jax.ShapeDtypeStruct(q.shape, jnp.float32)
        return jax.pure_callback(attend, shape, q, q_rope, *parts), state

    def attend(self, layer, q, q_rope, latents, ropes):
        scale, seen = self.of.config.scale(layer), self.seen & self.read.get(layer, True)
        q, q_rope = np.asarray(q, np.float64), np.asarray(q_rope, np.float64)
        both = [
            (np.asarray(rows, np.float64), unpacked(pages).reshape(rows.shape))
            for rows, pages in (latents, ropes)
        ]
        scores = [
            scale * (np.einsum("thc,sc->hts", q, c) + np.einsum("thr,sr->hts", q_rope, r))
            for c, r in zip(*both, strict=True)
        ]
        scores = np.where(seen, np.where(self.coded, scores[1], scores[0]), -np.inf)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        exact = np.einsum("hts,sc->thc", weights * ~self.coded, both[0][0])
        return (exact + np.einsum("hts,sc->thc", weights * self.coded, both[0][1])).astype("f4")

    @functools.cached_property
    def logits(self):
        """From token ids to float32 [T, V]; what is `coded` counts when it is called."""

        @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
        def run(params, tokens):
            decoder = nnx.merge(self.of.graphdef, params)
            positions = jnp.arange(tokens.size, dtype=jnp.int32)
            return decoder.logits(decoder(tokens, positions, self, None)[0])

        return lambda ids: np.asarray(run(self.of.params, jnp.asarray(ids, jnp.int32)))


FORMATS = {
    "int8, newest 35 tokens": ("yarn", dataclasses.replace(int8(), residual=35)),
    "int4": ("deepseek_v3", int4()),
    "kivi4, newest 32 tokens": ("yarn", kivi(4, residual=32)),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * ("kivi" in name)) for name in FORMATS],
)
def test_scores_are_those_of_numpy(name):
    of, format = model(FORMATS[name][0]), FORMATS[name][1]
    ids = np.asarray(prompt(160)) % of.config.vocab_size
    cache = CacheConfig(format=format, page_size=32 if "kivi" in name else 16)
    got = kvjax.score(of, ids[:TOKENS].tolist(), cache=cache, prefill_chunk=64)
    oracle = Oracle(of, format, 160, cache.page_size)
    want = logprobs(oracle.logits(ids)[:TOKENS], ids[:TOKENS])
    np.testing.assert_allclose(got.logprobs[1:], want, atol=2e-5)
    oracle.coded[:] = False
    exact = logprobs(oracle.logits(ids)[:TOKENS], ids[:TOKENS])
    assert np.abs(exact - want).max() > 1e-3
    assert got.stats.bytes_per_token == format.bytes_per_token(of.spec, cache.page_size)


@pytest.mark.slow
def test_steps_and_forks_are_those_of_numpy():
    """Chunks, then tokens one by one, over scattered pages; the third row is a fork."""
    prompts, more = [prompt(37), prompt(12, seed=1)], [prompt(16, seed=n) for n in (2, 3, 4)]
    of, format = model("yarn"), int4()
    got = paged_logits(of, prompts, more, format=format)
    oracle = Oracle(of, format, 56, 8)
    for logits, ids, rest in zip(got, [*prompts, prompts[1]], more, strict=True):
        whole = [*ids, *rest]
        want = oracle.logits(np.pad(whole, (0, 56 - len(whole))))[: len(whole)]
        np.testing.assert_allclose(logits, want, atol=1e-4)


@pytest.mark.slow
def test_steps_over_tiers_are_those_of_numpy():
    """A prompt is seen as it was made; after it, full pages behind the first two are codes."""
    of, format = tiny.model("latents"), dataclasses.replace(int4(), sinks=9)
    ids, length, page = prompt(64), 41, 8
    cache = CacheConfig(
        page_size=page,
        format=format,
        select=Select("100%", "keys"),
        window=Window(0),
        place=Place(),
    )
    (got,), stats, _ = forced_logits(of, [ids[:length]], [ids[length:]], cache)
    oracle, position = Oracle(of, format, 64, page), np.arange(64)
    full = position[:, None] // page * page
    oracle.coded = (position >= 16) & (position < full) & (position[:, None] >= length)
    want = oracle.logits(ids)[length - 1 :]
    np.testing.assert_allclose(got, want, atol=1e-5)
    oracle.coded = np.zeros_like(oracle.coded)
    assert np.abs(oracle.logits(ids)[length - 1 :] - want).max() > 0.1
    # The larger layer's latents and position keys, of 13 and 6 elements: 4-bit codes, a scale and
    # a middle a channel, two units each: 122 bytes, in 8 rows of 16.
    assert stats.bytes_moved == 128 * stats.misses > 0


@pytest.mark.slow
@pytest.mark.parametrize("by", ["low-bit", "quest"])
def test_few_pages_of_a_stored_prefix_are_those_of_numpy(tmp_path, monkeypatch, by):
    """Half of twelve; the first and the last are exact, and always among them."""
    of, format, page, pages = tiny.model("latents"), int4(), 8, 12
    ids, prefix = prompt(120), 8 * 12
    cache = CacheConfig(page_size=page, format=format)
    config = PrefixConfig(
        load_policy="load", budget="6 pages", by=by, pooling=0.0, host_bytes=0, who="head"
    )
    PrefixCache(tmp_path, config=config).add(of, ids[:prefix], cache=cache)
    asked, issue = {}, PageReads.issue

    def noted(self, layer, ids, **rest):
        asked[layer] = np.array(ids)
        return issue(self, layer, ids, **rest)

    monkeypatch.setattr(PageReads, "issue", noted)
    prefixes = PrefixCache(tmp_path, config=config)  # as another process would
    limits, meter = jnp.ones((1,), jnp.int32), Meter()
    shapes = plan(of.config, of.spec, [105], new_tokens=1, prefill_chunk=512, cache=cache)
    options = {"cache": cache, "limits": limits, "meter": meter}
    found = prefixes.prefill(of, ids[:105], shapes, **options)
    assert found.stats.pages_chosen == 6
    oracle = Oracle(of, format, 120, page)
    for layer, ((*chosen,),) in asked.items():
        marked = np.ones((120, 120), bool)
        chosen = {page for page in chosen if page < pages}
        assert len(chosen) == 4
        assert chosen.isdisjoint({0, 11})
        unread = set(range(1, 11)) - chosen
        marked[prefix:, [page * 8 + slot for page in unread for slot in range(8)]] = False
        oracle.read[layer] = marked
    assert sorted(oracle.read) == [0, 1]
    got = np.asarray(nnx.merge(of.graphdef, of.params).logits(found.state.hidden))[0]
    np.testing.assert_allclose(got, oracle.logits(ids)[104], atol=1e-4)
    oracle.read = {}
    assert np.abs(got - oracle.logits(ids)[104]).max() > 1e-2


def test_what_a_page_takes():
    """Of two layers, with latents of 16 elements and position keys of 8."""
    spec = model("deepseek_v3").spec
    units = 2 * 4  # in both pools, of scales and of middles
    assert int8().bytes_per_page(spec, 16) == 2 * (16 * 24 + 24 + units)
    assert int4().bytes_per_page(spec, 16) == 2 * (16 * 24 // 2 + 2 * 24 + units)
    other = dataclasses.replace(int8(), latents=None)  # by token
    assert other.bytes_per_page(spec, 16) == 2 * (16 * 24 + 16 * 2 * 2)


ROTATED_BACK = StaticFloat8(
    Constant([1.0]), middle=Constant(np.zeros((1, 8))), frequencies=Constant(np.ones(4))
)


@pytest.mark.parametrize(
    ("name", "format", "message"),
    [
        ("deepseek_v3", NAMED["fp8-products"], "layer 0 keeps latents, which are scored as well"),
        ("deepseek_v3", Format(ROTATED_BACK, int8().values), "packs position keys of layer 0 befo"),
        ("deepseek_v32", int8(), "layer 0, which chooses tokens by an indexer"),
    ],
)
def test_what_latents_have_not_is_refused(name, format, message):
    with pytest.raises(KvjaxError, match=message):
        kvjax.score(model(name), prompt(20), cache=CacheConfig(page_size=8, format=format))


@pytest.mark.parametrize("latents", [5, "int4"])
def test_what_packs_no_pages_is_refused(latents):
    with pytest.raises(
        KvjaxError, match=f"latents is {latents!r}: must be a kvjax.formats.LayerFormat"
    ):
        dataclasses.replace(int8(), latents=latents)
