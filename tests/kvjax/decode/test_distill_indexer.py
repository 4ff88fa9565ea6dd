"""Distilling an indexer from a tiny model: that it learns, what it learns from, what is refused."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.decode import attention_kept, distill_indexer, learn_and_hold_out
from kvjax.decode.layer_attention import AttentionRule, layer_attention, read_attention
from kvjax.errors import KvjaxError
from kvjax.models import causal_attend
from tests.kvjax.decode.tiny import model, prompt

STEPS = 60


@functools.cache
def distilled(name="llama", seed=0):
    return distill_indexer(
        model(name),
        prompt(512),
        tokens=512,
        heads=2,
        dim=8,
        steps=STEPS,
        learning_rate=1e-2,
        seed=seed,
    )


@functools.cache
def kept():
    return {
        (each.method, each.one_of): each
        for each in attention_kept(model(), distilled(), prompt(1024, seed=1), tokens=1024)
    }


def dense(of, layer, ids, rows):
    """What some queries attend to, by NumPy, of the queries and keys that the model makes."""
    tokens, positions = jnp.asarray(ids, jnp.int32), jnp.arange(len(ids), dtype=jnp.int32)
    plain = causal_attend(of.config, jnp.zeros_like(tokens), positions)
    seen = []

    def attend(index, q, k, v, state):
        seen.append((np.asarray(q, np.float64), np.asarray(k, np.float64)))
        return plain(index, q, k, v, state)

    nnx.merge(of.graphdef, of.params)(tokens, positions, attend, None)
    q, k = seen[layer]
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    scores = np.einsum("thd,shd->ths", q[rows], k) * of.config.scale(layer)
    if cap := of.config.attn_soft_cap:
        scores = cap * np.tanh(scores / cap)
    after = np.arange(len(ids))[None, None] > np.array(rows)[:, None, None]
    weights = np.exp(np.where(after, -np.inf, scores - scores.max(axis=2, keepdims=True)))
    return weights / weights.sum(axis=2, keepdims=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "soft_caps", "groups_of_3"])
def test_attention_that_is_learned_is_the_models(name):
    of, ids, rows = model(name), prompt(128, seed=2), [0, 7, 127]
    for layer, seen in enumerate(read_attention(of, ids, 128)):
        text = type(seen)(*(jnp.asarray(x[0]) for x in seen))
        found = layer_attention(AttentionRule.of(of, layer), text, jnp.array(rows, jnp.int32))
        np.testing.assert_allclose(found, dense(of, layer, ids, rows), atol=1e-5)


@pytest.mark.slow
def test_it_learns():
    for losses in distilled().losses:
        assert len(losses) == STEPS
        assert np.mean(losses[-10:]) < 0.7 * np.mean(losses[:3])


@pytest.mark.slow
def test_what_it_chooses_keeps_more_of_the_attention_than_page_means():
    tokens = kept()["indexer, tokens", 16].attention
    assert tokens > kept()["page means", 16].attention
    assert tokens <= kept()["the best tokens for all heads", 16].attention


@pytest.mark.slow
def test_more_pages_keep_more_and_bytes_are_those_that_are_read():
    for method in ("page means", "Quest's bounds", "exact keys"):
        assert kept()[method, 8].attention >= kept()[method, 16].attention
    pair = 2 * 2 * 2 * 8  # a token's key and value, two KV heads of 8, two bytes each
    assert kept()["page means", 8].read_bytes == pytest.approx(2 * 2 * 8 / 16 + pair * 8 / 62)
    assert kept()["indexer, tokens", 16].read_bytes == pytest.approx(8 + 4 / 16 + pair * 4 / 62)


def test_the_same_seed_gives_the_same_indexer_and_another_another():
    again = distill_indexer(
        model(), prompt(512), tokens=512, heads=2, dim=8, steps=STEPS, learning_rate=1e-2
    )
    assert again == distilled()
    assert again.losses == distilled().losses
    assert distilled(seed=1) != distilled()


@pytest.mark.slow
def test_layers_with_windows_have_none():
    of = distilled("gemma")
    assert of.layers[0] is None
    assert of.losses[0] == ()
    assert of.learned == (of.layers[1],)


def test_the_end_of_every_text_is_held_out():
    texts = [prompt(600), prompt(512, seed=1)]
    learned, held_out = learn_and_hold_out(model(), texts, 1200)
    assert [a + b for a, b in zip(learned, held_out, strict=True)] == texts
    assert [len(each) for each in held_out] == [150, 128]
    assert learn_and_hold_out(model(), texts[0], 512) == ([texts[0][:384]], [texts[0][384:512]])


@pytest.mark.parametrize(
    ("name", "length", "options", "fault"),
    [
        ("llama", 100, {}, "text 0 has 100 tokens: at least 128"),
        ("llama", 512, {"dim": 6}, "dim is 6: must be a multiple of 4"),
        ("llama", 512, {"heads": 0}, "heads is 0"),
        ("llama", 512, {"steps": 0}, "steps is 0"),
        ("llama", 512, {"tokens": 64}, "tokens is 64"),
        ("llama", 512, {"learning_rate": 2.0}, r"learning_rate is 2\.0"),
        ("llama", 512, {"learning_rate": "1e-3"}, "learning_rate is '1e-3'"),
        ("mistral", 512, {}, "all layers of mistral have sliding windows"),
    ],
)
def test_what_cannot_be_learned_is_refused(name, length, options, fault):
    with pytest.raises(KvjaxError, match=fault):
        distill_indexer(model(name), prompt(length), **options)


def test_an_indexer_of_another_model_is_refused():
    with pytest.raises(KvjaxError, match=r"by is an indexer of model .* and soft_caps is"):
        attention_kept(model("soft_caps"), distilled(), prompt(512))
    with pytest.raises(KvjaxError, match="text 1 has 500 tokens of 4096"):
        learn_and_hold_out(model(), [prompt(600), prompt(500)], 4096)
