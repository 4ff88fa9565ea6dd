"""Conversion to latents: exact in the limit, close where little is left out, refused by name."""

import numpy as np
import pytest

import kvjax
from kvjax import CacheConfig, KvjaxError, Place, PrefixCache, PrefixConfig, Select, Window
from kvjax.convert import Healing, convert_mla, heal, judged, save_folder, split_texts
from kvjax.convert.checkpoint import checkpoint_of
from kvjax.convert.share_out import shared_out
from kvjax.model import from_checkpoint
from kvjax.models import LayerConfig, RopeScaling, random_checkpoint
from tests.kvjax.decode.tiny import config, no_cache_logits, prompt

YARN = RopeScaling("yarn", factor=4.0, original_context=32)


@pytest.fixture(scope="module")
def model():
    """Three KV heads, biases, yarn, and layers of two sizes."""
    layers = (
        LayerConfig(num_heads=6, num_kv_heads=3, head_dim=8, rope_scaling=YARN),
        LayerConfig(num_heads=6, num_kv_heads=3, head_dim=8, rope_theta=500.0),
    )
    checkpoint = random_checkpoint(config(*layers, qkv_bias=True), seed=5)
    return from_checkpoint(checkpoint, name="small", dtype="float32")


@pytest.fixture(scope="module")
def windows(model):
    return split_texts(model, [prompt(300), prompt(300, seed=1)], window=64)


@pytest.fixture(scope="module")
def exact(model, windows):
    made = convert_mla(model, windows.learnt, rank=24, rope_dim=24)
    return from_checkpoint(made.checkpoint, name="exact", dtype="float32")


def test_all_pairs_rotated_is_the_same_model(model, exact):
    ids = prompt(60, seed=3)
    expected = no_cache_logits(model, ids)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(no_cache_logits(exact, ids), expected, atol=1e-4)
    assert exact.spec.bytes_per_token == model.spec.bytes_per_token


def test_latent_pages_give_what_keys_and_values_give(model, exact):
    ids, cache = prompt(45, seed=4), CacheConfig(page_size=8)
    mine, theirs = (kvjax.score(m, ids, cache=cache) for m in (model, exact))
    np.testing.assert_allclose(theirs.logprobs[1:], mine.logprobs[1:], atol=1e-4)
    assert theirs.stats.bytes_per_token == 2 * 48 * 4


@pytest.mark.slow
def test_latents_from_a_store_and_over_tiers_give_what_keys_and_values_give(model, exact, tmp_path):
    ids, cache = prompt(60, seed=5), CacheConfig(page_size=8)
    options = {"max_new_tokens": 12, "stop_tokens": ()}
    expected = kvjax.generate(model, ids, cache=cache, **options).tokens
    prefixes = PrefixCache(tmp_path, config=PrefixConfig(load_policy="load", budget="100%"))
    prefixes.add(exact, ids[:50], cache=cache)
    stored = kvjax.generate(exact, ids, cache=cache, prefixes=prefixes, **options)
    assert stored.stats.prefix.bytes_used == 6 * exact.spec.bytes_per_page(8)
    tiers = CacheConfig(page_size=8, select=Select("100%"), window=Window(0), place=Place())
    fetched = kvjax.generate(exact, ids, cache=tiers, **options)
    assert fetched.stats.tiers.bytes_moved > 11 * 7 * exact.spec.bytes_per_page(8)
    assert stored.tokens == fetched.tokens == expected


@pytest.mark.slow
def test_less_costs_more_and_little_costs_little(model, windows):
    """Of 48 elements 40, 32 and 16, the same share of them rotated."""
    found = []
    for rank, rope_dim in ((24, 16), (16, 16), (8, 8)):
        made = convert_mla(model, windows.learnt, rank=rank, rope_dim=rope_dim)
        other = from_checkpoint(made.checkpoint, name="other", dtype="float32")
        assert other.spec.bytes_per_token == 2 * (rank + rope_dim) * 4
        found.append(judged(model, other, windows.held_out))
        assert sum(layer.rank for layer in made.layers) == 2 * rank
        assert sum(layer.rope_dim for layer in made.layers) == 2 * rope_dim
        for layer in made.layers:
            assert 0 < layer.energy <= 1
            assert 0 < layer.rotation <= 1
    losses = [one.kl for one in found]
    assert 0 < losses[0] < losses[1] < losses[2]
    assert losses[0] < 0.1 * losses[2]
    assert found[0].original_perplexity == found[2].original_perplexity


def test_room_goes_where_it_is_worth_most():
    worth = [np.array([9.0, 8.0, 1.0, 1.0]), np.array([7.0, 6.0, 5.0, 4.0]), np.full(4, 0.1)]
    assert shared_out(worth, 2, 1) == [2, 3, 1]
    assert shared_out(worth, 2, 2) == [2, 2, 2]
    assert shared_out(worth, 3, 2) == [3, 3, 3]
    assert shared_out(worth, 4, 1) == [4, 4, 4]
    assert shared_out([np.ones(3), np.ones(3)], 2, 1) == [3, 1]


REFUSED = [
    ({}, {"rank": 0, "rope_dim": 8}, "rank is 0: must be an integer of at least 1"),
    ({}, {"rank": 8, "rope_dim": 0}, "rope_dim is 0"),
    ({}, {"rank": 8, "rope_dim": 7}, "rope_dim is 7: must be even and at most 24"),
    ({}, {"rank": 8, "rope_dim": 26}, "rope_dim is 26: must be even and at most 24"),
    ({}, {"rank": 41, "rope_dim": 8}, "rank is 41: must be at most 40"),
    ({"qk_norm": True}, {"rank": 8, "rope_dim": 8}, "normalises every head's keys"),
    ({"attn_soft_cap": 5.0}, {"rank": 8, "rope_dim": 8}, "a soft cap of 5.0"),
    ({"window": 16}, {"rank": 8, "rope_dim": 8}, "a sliding window of 16 tokens in layer 0"),
]


@pytest.mark.parametrize(("change", "sizes", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_what_cannot_be_converted_is_refused(change, sizes, message):
    change = dict(change)
    layer = LayerConfig(6, 3, 8, change.pop("window", None))
    other = from_checkpoint(random_checkpoint(config(layer, **change)), name="other")
    with pytest.raises(KvjaxError, match=message):
        convert_mla(other, np.zeros((1, 16), np.int32), **sizes)


def test_a_model_with_latents_is_refused(exact):
    with pytest.raises(KvjaxError, match=r"exact keeps latents already \(layer 0: 24 elements"):
        convert_mla(exact, np.zeros((1, 16), np.int32), rank=8, rope_dim=8)


@pytest.mark.parametrize(
    ("windows", "changed", "message"),
    [
        (np.zeros((0, 16), np.int32), {}, r"windows has shape \(0, 16\): must be \[n, W\]"),
        (np.full((1, 16), 64, np.int32), {}, "token id 64 at index 0 is outside the vocabulary"),
        (np.zeros((1, 16), np.int32), {"seed": -1}, "seed is -1: must be an integer of at least 0"),
    ],
)
def test_windows_and_seeds_that_make_no_sense_are_refused(model, windows, changed, message):
    with pytest.raises(KvjaxError, match=message):
        convert_mla(model, windows, rank=8, rope_dim=8, **changed)
    with pytest.raises(KvjaxError, match=message):
        heal(model, checkpoint_of(model), windows, Healing(1, **changed))


def test_texts_are_split_and_short_ones_refused(model):
    both = split_texts(model, [prompt(640), prompt(160, seed=1)], window=64)
    assert (
        both.learnt.tolist()
        == np.reshape(prompt(640)[:560] + prompt(160, seed=1)[:80], (10, 64)).tolist()
    )
    assert both.held_out.tolist() == [prompt(640)[560:624]]
    with pytest.raises(KvjaxError, match=r"text 1 has 15 tokens: at least 64 \(four pages\)"):
        split_texts(model, [prompt(100), prompt(15)])
    with pytest.raises(KvjaxError, match="texts is empty"):
        split_texts(model, [])
    with pytest.raises(KvjaxError, match="small came without a tokenizer"):
        split_texts(model, "a text")
    with pytest.raises(KvjaxError, match="token id 64 at index 70"):
        split_texts(model, [*prompt(70), 64])
    with pytest.raises(KvjaxError, match=r"text 0 is .*: must be a list of token ids"):
        split_texts(model, [[prompt(70), prompt(70)]])
    with pytest.raises(KvjaxError, match="model is None: must be what"):
        split_texts(None, "a text")
    with pytest.raises(KvjaxError, match="window is 0: must be an integer of at least 2"):
        split_texts(model, prompt(100), window=0)


def test_a_folder_is_read_again(exact, tmp_path):
    made = checkpoint_of(exact)
    save_folder(tmp_path / "mla", made, more=lambda folder: (folder / "told").touch())
    assert (tmp_path / "mla" / "told").exists()
    again = kvjax.load(tmp_path / "mla", dtype="float32")
    assert again.config == exact.config
    ids = prompt(30, seed=6)
    np.testing.assert_array_equal(no_cache_logits(again, ids), no_cache_logits(exact, ids))
    with pytest.raises(KvjaxError, match="mla is already there"):
        save_folder(tmp_path / "mla", made)


def test_a_folder_is_written_whole_or_not(exact, tmp_path):
    def fail(folder):
        assert (folder / "model.safetensors").exists()
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        save_folder(tmp_path / "mla", checkpoint_of(exact), more=fail)
    assert list(tmp_path.iterdir()) == []
