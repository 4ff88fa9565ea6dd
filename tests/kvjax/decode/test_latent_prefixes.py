"""Stored prefixes of latents: what is kept of a token, and what pages are chosen by."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax import CacheConfig, KvjaxError
from kvjax.decode import PrefixCache, PrefixConfig
from kvjax.decode.latent_rows import LatentRows
from kvjax.decode.prefilled_pages import prefilled_pages
from tests.kvjax.decode import tiny
from tests.kvjax.decode.test_prefixes import hidden

DATA = pathlib.Path(__file__).resolve().parents[2] / "models" / "data"
PAGE, PAGES, SUFFIX = 8, 12, 9
CACHE = CacheConfig(page_size=PAGE)
LOAD = PrefixConfig(load_policy="load", budget="100%", by="mean", pooling=0.0)


def forward(model, ids, attend):
    """The last token's state before the output matrix, and what `attend` made of all layers."""

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(params, tokens):
        decoder = nnx.merge(model.graphdef, params)
        positions = jnp.arange(tokens.size, dtype=jnp.int32)
        return decoder(tokens, positions, attend, ())

    states, seen = run(model.params, jnp.asarray(ids, jnp.int32))
    return np.asarray(states)[-1], jax.device_get(seen)


def few_pages(config, count):
    """Attention to expanded keys, where what follows the prefix sees few pages of it.

    Of each layer the first, the last and those that get most of a softmax over the pages' means,
    of all heads and queries together.
    """
    prefix = PAGES * PAGE

    def attend(layer, q, k, v, seen):
        scores = config.scale(layer) * jnp.einsum("qhd,khd->hqk", q, k)
        means = scores[:, prefix:, :prefix].reshape(q.shape[1], -1, PAGES, PAGE).mean(3)
        mass = jax.nn.softmax(means, axis=2).sum((0, 1))
        mass = mass.at[jnp.array([0, PAGES - 1])].set(jnp.inf)
        chosen = jnp.zeros(PAGES, bool).at[jax.lax.top_k(mass, count)[1]].set(True)
        position = jnp.arange(q.shape[0])
        visible = position[None, :] <= position[:, None]
        unread = jnp.pad(~jnp.repeat(chosen, PAGE), (0, q.shape[0] - prefix))
        visible &= ~(unread[None, :] & (position[:, None] >= prefix))
        weights = jax.nn.softmax(jnp.where(visible[None], scores, -jnp.inf), axis=2)
        return jnp.einsum("hqk,khd->qhd", weights, v), seen

    return attend


@pytest.fixture(scope="module")
def ids():
    return tiny.prompt(PAGES * PAGE + SUFFIX)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("deepseek_v3", PAGES), ("latents", 4)])
def test_few_pages_are_those_of_most_attention(tmp_path, ids, name, count):
    """By means of latents and position keys, for all heads together; the oracle expands."""
    model = tiny.model(name) if name == "latents" else kvjax.load(DATA / name, dtype="float32")
    PrefixCache(tmp_path, config=LOAD).add(model, ids[: PAGES * PAGE], cache=CACHE)
    config = dataclasses.replace(LOAD, budget=f"{count} pages")
    found = np.asarray(hidden(model, ids, PrefixCache(tmp_path, config=config)))[0]
    expected, _ = forward(model, ids, few_pages(model.config, count))
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=1e-5 * scale)
    if count < PAGES:
        every, _ = forward(model, ids, few_pages(model.config, PAGES))
        assert np.abs(found - every).max() > 1e-2 * scale


@pytest.mark.slow
def test_a_row_is_all_that_a_query_scores(ids):
    """Both halves together, of layers of two sizes, against expanded keys."""
    model = tiny.model("latents")
    _, scores = forward(
        model,
        ids,
        lambda layer, q, k, v, seen: (v, (*seen, jnp.einsum("qhd,khd->hqk", q, k))),
    )
    pages = prefilled_pages(model, ids, CACHE, 512, lambda *_: None)
    assert pages.keys.shape == pages.values.shape == (2, 13, 1, PAGE, 10)
    rows = np.stack([*pages.chosen_by]).reshape(2, 13 * PAGE, 20)
    assert not rows[0, :, 14:].any()
    assert not rows[1, :, 19:].any()
    form, seen = LatentRows(model.spec, PAGE), []

    class Absorbed:
        def __call__(self, *_):
            raise AssertionError("this layer keeps latents")

        def latents(self, layer, q, q_rope, latent, rotated, state):
            whole = form.padded(jnp.concatenate([q, q_rope], axis=-1))
            kept = jnp.asarray(rows[layer])
            return q, (*state, jnp.einsum("qhd,kd->hqk", whole, kept))

    _, seen = forward(model, ids[: 13 * PAGE], Absorbed())
    # Of later layers queries differ: here attention returns queries, above values.
    np.testing.assert_allclose(seen[0], scores[0][:, : 13 * PAGE, : 13 * PAGE], atol=1e-4)


def test_what_latents_are_not_chosen_by_is_refused(tmp_path, ids):
    model = tiny.model("latents")
    for by in ("keys", "h2o", "impress"):
        prefixes = PrefixCache(tmp_path, config=dataclasses.replace(LOAD, by=by))
        with pytest.raises(KvjaxError, match=f"by is '{by}' and latents keeps latents, of which"):
            prefixes.add(model, ids, cache=CACHE)
        with pytest.raises(KvjaxError, match=r"to read all keys is to read the prefix; choose by"):
            kvjax.generate(model, ids, cache=CACHE, prefixes=prefixes)
    sparse = kvjax.load(DATA / "deepseek_v32", dtype="float32")
    with pytest.raises(KvjaxError, match="chooses tokens by an indexer, whose keys are not stored"):
        PrefixCache(tmp_path).add(sparse, ids, cache=CACHE)
