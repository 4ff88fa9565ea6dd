"""What pages are chosen by, in the decode loop: estimates of what is not read, and hard cases."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.config import CacheConfig
from kvjax.decode.tiered_index import index_for
from kvjax.model import from_checkpoint
from kvjax.models import random_checkpoint
from kvjax.policies import (
    EstimatingIndex,
    ExactKeys,
    LowRank,
    PerPage,
    Place,
    RetroInfer,
    Select,
    Window,
)
from kvjax.policies.index import live_keys
from kvjax.policies.tiering import NAMES
from tests.kvjax.decode.forced import forced_logits
from tests.kvjax.decode.tiny import CONFIGS, attention, config, model, no_cache_logits, prompt

SIZE = 8
LENGTHS, TOKENS = (85, 64, 30), 27  # pages begin, end, and fill while decoding


@functools.cache
def made(name="one layer", flat=None):
    """A model; `flat` names a projection that is 0, so that all scores are equal."""
    if name != "one layer":
        return model(name)
    checkpoint = random_checkpoint(config(attention()), seed=3)
    for weight, value in checkpoint.weights.items():
        if weight.endswith(f"{flat}.weight"):
            value[:] = 0
    return from_checkpoint(checkpoint, name=name, dtype="float32")


def decoded(of, by, budget="25%", times=1, lengths=LENGTHS):
    """Each row's logits as decoded over tiers, and as without a cache."""
    ids = [prompt(n + TOKENS, row) for row, n in enumerate(lengths)]
    prompts = [row[:n] for row, n in zip(ids, lengths, strict=True)]
    given = [row[n:] for row, n in zip(ids, lengths, strict=True)]
    cache = CacheConfig(
        page_size=SIZE, select=Select(budget, by), window=Window(times), place=Place()
    )
    got = forced_logits(of, prompts, given, cache).logits
    want = [no_cache_logits(of, row)[n - 1 :] for row, n in zip(ids, lengths, strict=True)]
    return got, want


@dataclasses.dataclass(frozen=True)
class Whole(PerPage):
    """Keeps keys and values, and estimates what is not read by attention to it."""

    sketch: ExactKeys = dataclasses.field(default_factory=ExactKeys)

    def build(self, keys, pages, values=None):
        values = live_keys(values, pages).swapaxes(0, 1)
        return {**super().build(keys, pages), "values": values}

    def extend(self, arrays, page, keys, values=None):
        grown = super().extend(arrays, page, keys)
        return {**grown, "values": arrays["values"].at[:, page].set(values, mode="drop")}

    def estimate(self, arrays, queries, chosen, pages, scale, *, soft_cap=None):
        keys, values = arrays["keys"], arrays["values"]
        heads, num_pages, size, _ = keys.shape
        unread = (jnp.arange(num_pages, dtype=jnp.int32) < pages)[None] & ~chosen
        unread = jnp.repeat(unread, size, axis=1)[:, None]
        grouped = queries.reshape(heads, -1, queries.shape[1])
        scores = jnp.einsum("hgd,htd->hgt", grouped, keys.reshape(heads, num_pages * size, -1))
        scores = scores * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(unread, scores, -jnp.inf)
        lse = jax.nn.logsumexp(scores, axis=2)
        weights = jnp.where(unread, jnp.exp(scores - lse[..., None]), 0)
        out = jnp.einsum("hgt,htv->hgv", weights, values.reshape(heads, num_pages * size, -1))
        return out.reshape(len(queries), -1), lse.reshape(-1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "times"), [("one layer", 1), ("llama", 0), ("soft_caps", 2)])
def test_an_estimate_that_is_exact_makes_every_budget_exact(name, times):
    """Values reach the index with the prompt and with every page that fills."""
    assert isinstance(Whole(), EstimatingIndex)
    for got, want in zip(*decoded(made(name), Whole(), times=times), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


@dataclasses.dataclass(frozen=True)
class Unestimated:
    """RetroInfer's pages, and nothing in place of the others."""

    of: RetroInfer

    def build(self, keys, pages):
        return self.of.build(keys, pages)

    def extend(self, arrays, page, keys):
        return self.of.extend(arrays, page, keys)

    def page_mass(self, arrays, queries, pages, scale, *, soft_cap=None):
        return self.of.page_mass(arrays, queries, pages, scale, soft_cap=soft_cap)

    def bytes_per_page(self, kv_heads, head_dim, page_size):
        return self.of.bytes_per_page(kv_heads, head_dim, page_size)

    scanned_bytes_per_page = bytes_per_page


@pytest.mark.slow
def test_retroinfers_estimate_brings_attention_nearer():
    retro = RetroInfer(4, 64, covered=1.0)
    errors = []
    for index in (retro, Unestimated(retro)):
        pairs = zip(*decoded(made(), index), strict=True)
        errors.append(np.mean([np.abs(got - want).mean() for got, want in pairs]))
    assert errors[0] < 0.8 * errors[1], errors


@pytest.mark.slow
@pytest.mark.parametrize("by", [name for name in NAMES if name != "indexer"])  # a model's own
def test_all_pages_are_exact_whatever_the_scores(by):
    """Of a prompt shorter than a page too, which has nothing to build an index of."""
    for flat in (None, "q", "k"):
        for got, want in zip(*decoded(made(flat=flat), by, "100%", lengths=(3, 45)), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("of", "theta"),
    [
        (CONFIGS["llama"], 1e4),
        (CONFIGS["gemma"], 1e6),  # of the layer that has no window
        (config(attention(rope_theta=1e4), attention(rope_theta=1e6)), None),
    ],
    ids=["llama", "gemma", "two rotations"],
)
def test_low_rank_keys_are_those_before_the_models_rotation(of, theta):
    """Unless layers that choose pages rotate differently."""
    index = index_for(Select(by="low-rank"), of)
    wanted = [] if theta is None else theta ** (-np.arange(4) / 4)
    np.testing.assert_allclose(index.frequencies, wanted, rtol=1e-6)
    assert index_for(Select(by=LowRank(3)), of) == LowRank(3)
