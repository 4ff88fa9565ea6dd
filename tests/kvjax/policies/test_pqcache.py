"""PQCache's codes against a product quantizer in plain NumPy, and growth with fixed codebooks."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.policies import PQCache
from tests.kvjax.policies import indexes, plain
from tests.kvjax.policies.indexes import (
    DIM,
    HEADS,
    KV_HEADS,
    PAGES,
    SCALE,
    SIZE,
    build,
    extend,
    page_mass,
)

INDEX = PQCache(subspaces=4, bits=4, first=16, iterations=4)
PART = DIM // 4


@pytest.fixture
def keys():
    return indexes.topical(np.random.default_rng(0))[0]


def plain_codebook(points, clusters, iterations):
    """Lloyd's iterations of one head's part [T, part], from evenly spaced points."""
    seeded = min(clusters, len(points))
    centroids = [points[j * len(points) // seeded] for j in range(seeded)]
    for _ in range(iterations):
        member = np.array([np.argmin([((p - c) ** 2).sum() for c in centroids]) for p in points])
        for j in range(seeded):
            if (member == j).any():
                centroids[j] = points[member == j].mean(axis=0)
    return np.array(centroids)


def restored(arrays):
    """Every key as its codes have it; [N, Hkv, P, D]."""
    codes, codebook = (np.asarray(arrays[name]) for name in ("codes", "codebook"))
    head = np.arange(KV_HEADS).reshape(-1, 1, 1, 1)
    keys = codebook[head, np.arange(4), codes]
    return keys.reshape(*codes.shape[:3], DIM).transpose(1, 0, 2, 3)


@pytest.mark.parametrize("pages", [PAGES, 9, 3, 2])
def test_codebooks_are_those_of_k_means_past_the_first_tokens(keys, pages):
    arrays = build(INDEX, jnp.asarray(keys), jnp.int32(pages))
    for head in range(KV_HEADS):
        tokens = keys[:pages, head].reshape(-1, DIM).astype(np.float64)
        fitted = tokens[16:] if len(tokens) > 16 else tokens
        for part in range(4):
            here = slice(part * PART, (part + 1) * PART)
            wanted = plain_codebook(fitted[:, here], 16, 4)
            found = np.asarray(arrays["codebook"][head, part])
            np.testing.assert_allclose(found[: len(wanted)], wanted, atol=1e-3)
            distance = ((tokens[:, None, here] - found[None]) ** 2).sum(axis=2)
            codes = np.asarray(arrays["codes"][head, :pages, :, part]).ravel()
            chosen = distance[np.arange(len(codes)), codes]
            np.testing.assert_allclose(chosen, distance.min(axis=1), atol=1e-4)


@pytest.mark.parametrize("pages", [PAGES, 20, 1])
def test_mass_is_that_of_the_keys_that_codes_stand_for(keys, pages):
    arrays = build(INDEX, jnp.asarray(keys), jnp.int32(pages))
    queries = np.random.default_rng(1).normal(size=(1, HEADS, DIM)).astype(np.float32)
    mass = page_mass(INDEX, arrays, jnp.asarray(queries[0]), jnp.int32(pages))
    wanted = plain.exact_mass(restored(arrays), queries, [True], pages, SCALE)
    np.testing.assert_allclose(mass, wanted, rtol=1e-3, atol=1e-6)


def test_as_many_codes_as_keys_are_exact(keys):
    keys, pages = jnp.asarray(keys), jnp.int32(4)
    index = PQCache(subspaces=1, bits=8, first=0)
    queries = np.random.default_rng(1).normal(size=(1, HEADS, DIM)).astype(np.float32)
    mass = page_mass(index, build(index, keys, pages), jnp.asarray(queries[0]), pages)
    wanted = plain.exact_mass(np.asarray(keys), queries, [True], 4, SCALE)
    np.testing.assert_allclose(mass, wanted, rtol=1e-3, atol=1e-6)


def test_a_later_page_has_the_codes_it_would_have_had(keys):
    """The same keys get the same codes whether they were fitted or came later."""
    arrays = build(INDEX, jnp.asarray(keys), jnp.int32(30))
    grown = extend(INDEX, arrays, jnp.int32(30), jnp.asarray(keys[7]))
    np.testing.assert_array_equal(grown["codes"][:, 30], arrays["codes"][:, 7])
    np.testing.assert_array_equal(grown["codebook"], arrays["codebook"])


def test_the_pages_that_count_are_found():
    assert indexes.kept(PQCache(subspaces=4)).mean() > 0.95


def test_it_keeps_to_the_protocol():
    indexes.keeps_to_the_protocol(INDEX)


def test_it_chooses_whatever_the_scores():
    indexes.chooses_whatever_the_scores(INDEX)


def test_it_grows_in_place():
    indexes.grows_in_place(PQCache())


def test_bytes_are_those_of_the_arrays():
    index = PQCache()
    assert index.bytes_per_page(2, 32, SIZE * 2) == indexes.bytes_held(index, skip={"codebook"})
    assert index.scanned_bytes_per_page(2, 32, 16) == index.bytes_per_page(2, 32, 16)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"subspaces": 0}, "subspaces is 0"),
        ({"bits": 0}, "bits is 0"),
        ({"bits": 9}, "bits is 9: must be 1 to 8"),
        ({"first": -1}, "first is -1"),
        ({"iterations": 0}, "iterations is 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, message):
    with pytest.raises(KvjaxError, match=message):
        PQCache(**given)


def test_parts_that_do_not_divide_the_head_are_refused(keys):
    index = PQCache(subspaces=3)
    with pytest.raises(KvjaxError, match="subspaces is 3: must divide the keys' head_dim 16"):
        index.build(jnp.asarray(keys), jnp.int32(1))
    with pytest.raises(KvjaxError, match="must divide"):
        index.bytes_per_page(2, 16, 8)
