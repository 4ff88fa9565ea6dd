"""A lightning indexer against its formula in NumPy, and what every page index must keep to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.policies import DistilledIndexer, LayerIndexer
from kvjax.policies.lightning_indexer import initial_weights
from tests.kvjax.policies import indexes
from tests.kvjax.policies.indexes import DIM, HEADS, KV_HEADS, PAGES, SIZE, build, page_mass

RADIANS = tuple((100.0 ** (-np.arange(DIM // 2) / (DIM // 2))).tolist())


@functools.cache
def indexer(heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, sharpen=1.0):
    weights = initial_weights(
        jax.random.key(0),
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        heads=3,
        dim=8,
    )
    return LayerIndexer.of(weights, RADIANS[: head_dim // 2], sharpen)


def turn(vectors, angles):
    """Vectors [T, D] whose first pairs (i, i + pairs) are turned by angles [T, pairs]."""
    pairs = angles.shape[1]
    turned = (vectors[:, :pairs] + 1j * vectors[:, pairs : 2 * pairs]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag, vectors[:, 2 * pairs :]], axis=1)


def oracle(index, keys, queries, position):
    """Each page's share of softmax over tokens, in float64, from rotated keys and queries."""
    ask, answer, weigh, bias, scale, shift = (each.values.astype(float) for each in index.learned)
    pages, kv_heads, size, dim = keys.shape
    radians = np.array(index.frequencies)
    of_index = radians[[0, len(radians) // 2]]  # two pairs of 8 dimensions turn
    tokens = keys.transpose(0, 2, 1, 3).reshape(-1, kv_heads, dim).astype(float) / index.sharpen
    where = np.arange(pages * size)[:, None]
    plain = np.stack([turn(tokens[:, h], -where * radians) for h in range(kv_heads)], axis=1)
    made = plain.reshape(len(tokens), -1) @ answer
    made = (made - made.mean(1, keepdims=True)) / np.sqrt(made.var(1, keepdims=True) + 1e-6)
    made = turn(made * scale + shift, where * of_index)
    query = turn(
        queries.astype(float) / index.sharpen, np.full((len(queries), 1), -position) * radians
    )
    total = np.zeros(len(tokens))
    for head in range(ask.shape[1]):
        asked = turn((query.reshape(-1) @ ask[:, head])[None], position * of_index[None])[0]
        weight = query.reshape(-1) @ weigh[:, head] + bias[head]
        total += weight * np.maximum(made @ asked, 0)
    total *= (ask.shape[1] * ask.shape[2]) ** -0.5
    shares = np.exp(total - total.max())
    return (shares / shares.sum()).reshape(pages, size).sum(axis=1)


@pytest.mark.parametrize("sharpen", [1.0, 1.2])
def test_mass_is_what_the_formula_says(sharpen):
    rng = np.random.default_rng(0)
    keys = indexes.topical(rng)[0]
    queries = rng.normal(size=(HEADS, DIM)).astype(np.float32)
    index = indexer(sharpen=sharpen)
    arrays = build(index, jnp.asarray(keys), jnp.int32(PAGES))
    for position in (PAGES * SIZE, PAGES * SIZE + 5):
        mass = index.page_mass(
            arrays, jnp.asarray(queries), jnp.int32(PAGES), 0.5, position=jnp.int32(position)
        )
        wanted = oracle(index, keys, queries, position)
        np.testing.assert_allclose(mass, [wanted] * HEADS, rtol=0.1)  # keys are float8
    at_the_end = page_mass(index, arrays, jnp.asarray(queries), jnp.int32(PAGES))
    np.testing.assert_allclose(at_the_end[0], oracle(index, keys, queries, PAGES * SIZE), rtol=0.1)


def test_growing_equals_building():
    keys = jnp.asarray(indexes.topical(np.random.default_rng(0))[0])
    grown = build(indexer(), keys, jnp.int32(30))
    for page in range(30, 34):
        grown = indexes.extend(indexer(), grown, jnp.int32(page), keys[page])
    whole = build(indexer(), keys, jnp.int32(34))
    for name, array in whole.items():
        np.testing.assert_array_equal(grown[name][:, :34], array[:, :34])


@pytest.mark.slow
def test_it_keeps_to_the_protocol():
    indexes.keeps_to_the_protocol(indexer())


def test_it_chooses_whatever_the_scores():
    indexes.chooses_whatever_the_scores(indexer())


def test_it_grows_in_place():
    indexes.grows_in_place(indexer(1, 1, 32))


def test_bytes_are_those_of_the_arrays():
    index = indexer(4, 2, 32)
    assert index.bytes_per_page(2, 32, 16) == indexes.bytes_held(index)
    assert index.scanned_bytes_per_page(2, 32, 16) == index.bytes_per_page(2, 32, 16)


@pytest.mark.slow
def test_other_heads_are_refused():
    keys = jnp.zeros((2, 3, SIZE, DIM))
    with pytest.raises(KvjaxError, match=r"48 channels.*learned of 32.*kvjax distill indexer"):
        indexer().build(keys, jnp.int32(2))
    arrays = indexer().build(keys[:, :2], jnp.int32(2))
    with pytest.raises(KvjaxError, match="queries have shape"):
        indexer().page_mass(arrays, jnp.zeros((HEADS, 2 * DIM)), jnp.int32(2), 0.5)


def test_a_file_gives_back_what_was_saved_and_says_what_is_wrong(tmp_path):
    index = DistilledIndexer(
        "ab" * 32, (indexer(), None, indexer(sharpen=1.2)), ((2.0, 1.0), (), (3.0,))
    )
    index.save(tmp_path / "indexer.json")
    again = DistilledIndexer.load(tmp_path / "indexer.json")
    assert again == index
    assert hash(again) == hash(index)
    assert again.losses == index.losses
    assert again.learned == (index.layers[0], index.layers[2])
    index.check(model="ab" * 32, name="its own")
    with pytest.raises(KvjaxError, match="by is an indexer of model abababababab, and other is cd"):
        index.check(model="cd" * 32, name="other")
    text = (tmp_path / "indexer.json").read_text()
    (tmp_path / "flipped.json").write_text(text.replace("1.2", "1.3"))
    with pytest.raises(KvjaxError, match="is damaged"):
        DistilledIndexer.load(tmp_path / "flipped.json")
    with pytest.raises(KvjaxError, match="does not exist"):
        DistilledIndexer.load(tmp_path / "none.json")
