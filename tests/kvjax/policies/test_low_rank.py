"""Low-rank keys against NumPy's SVD of unrotated keys, with rotary embeddings of every kind."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.policies import LowRank
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

RADIANS = 100.0 ** (-np.arange(DIM // 2) / (DIM // 2))
NONE, PLAIN, YARN = (), tuple(RADIANS.tolist()), tuple((RADIANS / 4).tolist())


@pytest.fixture
def queries():
    return np.random.default_rng(1).normal(size=(1, HEADS, DIM)).astype(np.float32)


def turned(keys, rotation):
    """Keys [N, Hkv, P, D] with the rotation of their positions, pair by pair."""
    if not rotation:
        return keys
    angle = np.arange(len(keys) * SIZE)[:, None] * np.array(rotation)
    turn = np.exp(1j * angle).reshape(len(keys), 1, SIZE, DIM // 2)
    pairs = (keys[..., : DIM // 2] + 1j * keys[..., DIM // 2 :]) * turn
    return np.concatenate([pairs.real, pairs.imag], axis=-1).astype(np.float32)


def of_rank(keys, rank):
    """Keys [N, Hkv, P, D] but for what the SVD of all heads side by side leaves out."""
    side_by_side = keys.transpose(0, 2, 1, 3).reshape(-1, KV_HEADS * DIM).astype(np.float64)
    u, s, v = np.linalg.svd(side_by_side, full_matrices=False)
    kept = (u[:, :rank] * s[:rank]) @ v[:rank]
    return kept.reshape(len(keys), SIZE, KV_HEADS, DIM).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("rotation", [NONE, PLAIN], ids=["none", "plain"])
@pytest.mark.parametrize("rank", [4, 12])
@pytest.mark.parametrize("pages", [PAGES, 11])
def test_mass_is_that_of_keys_of_that_rank_before_the_rotation(queries, rotation, rank, pages):
    before = indexes.topical(np.random.default_rng(0))[0]
    index = LowRank(rank, rotation, block_tokens=80)
    arrays = build(index, jnp.asarray(turned(before, rotation)), jnp.int32(pages))
    mass = page_mass(index, arrays, jnp.asarray(queries[0]), jnp.int32(pages))
    kept = np.zeros_like(before)
    kept[:pages] = of_rank(before[:pages], rank)
    wanted = plain.exact_mass(turned(kept, rotation), queries, [True], pages, SCALE)
    assert np.abs(mass - wanted).sum(axis=1).max() < 0.03


@pytest.mark.parametrize(
    ("rotation", "sharpen"),
    [(NONE, 1.0), (PLAIN, 1.0), (YARN, 1.14)],
    ids=["none", "plain", "yarn"],
)
def test_full_rank_is_exact_whatever_the_rotation(queries, rotation, sharpen):
    """Rotations are undone and done again, those that lengthen too."""
    keys = indexes.topical(np.random.default_rng(0))[0]
    index = LowRank(KV_HEADS * DIM, rotation, sharpen)
    arrays = build(index, jnp.asarray(keys), jnp.int32(30))
    for page in (30, 31):
        arrays = extend(index, arrays, jnp.int32(page), jnp.asarray(keys[page]))
    mass = page_mass(index, arrays, jnp.asarray(queries[0]), jnp.int32(32))
    wanted = plain.exact_mass(keys, queries, [True], 32, SCALE)
    assert np.abs(mass - wanted).sum(axis=1).max() < 0.03


def test_few_dimensions_suffice_before_the_rotation_and_not_after(queries):
    """Keys of 3 dimensions: 3 are exact if the rotation is undone, and wrong if it is not."""
    rng = np.random.default_rng(3)
    flat = rng.normal(size=(PAGES, SIZE, 3)) @ rng.normal(size=(3, KV_HEADS * DIM)) * 0.5
    before = flat.reshape(PAGES, SIZE, KV_HEADS, DIM).transpose(0, 2, 1, 3)
    keys = turned(before, PLAIN)
    wanted = plain.exact_mass(keys, queries, [True], PAGES, SCALE)
    off = {}
    for rotation in (PLAIN, NONE):
        index = LowRank(3, rotation)
        arrays = build(index, jnp.asarray(keys), jnp.int32(PAGES))
        mass = page_mass(index, arrays, jnp.asarray(queries[0]), jnp.int32(PAGES))
        off[rotation] = np.abs(mass - wanted).sum(axis=1).mean()
    assert off[PLAIN] < 0.02
    assert off[NONE] > 0.2


def test_a_later_page_is_projected_as_the_first_ones_were():
    keys = jnp.asarray(indexes.topical(np.random.default_rng(0))[0])
    index = LowRank(6)
    arrays = build(index, keys, jnp.int32(30))
    grown = extend(index, arrays, jnp.int32(30), keys[7])
    found = np.asarray(grown["reduced.bfloat16"][:, 30].view(jnp.bfloat16), np.float32)
    wanted = np.asarray(arrays["reduced.bfloat16"][:, 7].view(jnp.bfloat16), np.float32)
    np.testing.assert_allclose(found, wanted, rtol=0.01, atol=1e-3)


def test_the_pages_that_count_are_found():
    assert indexes.kept(LowRank(16)).mean() > 0.95


def test_it_keeps_to_the_protocol():
    indexes.keeps_to_the_protocol(LowRank(8, PLAIN))


def test_it_chooses_whatever_the_scores():
    indexes.chooses_whatever_the_scores(LowRank(4, PLAIN))


def test_it_grows_in_place():
    indexes.grows_in_place(LowRank(20))


def test_bytes_are_those_of_the_arrays():
    index = LowRank(24)
    assert index.bytes_per_page(2, 32, 16) == indexes.bytes_held(index, skip={"basis"})
    assert index.scanned_bytes_per_page(2, 32, 16) == index.bytes_per_page(2, 32, 16)


def test_the_rank_is_a_share_of_the_channels_unless_it_is_given():
    assert LowRank().bytes_per_page(8, 128, 16) == LowRank(160).bytes_per_page(8, 128, 16)
    assert LowRank().bytes_per_page(3, 64, 16) == LowRank(30).bytes_per_page(3, 64, 16)
    assert LowRank().bytes_per_page(1, 4, 16) == LowRank(1).bytes_per_page(1, 4, 16)


def test_sizes_that_cannot_be_are_refused():
    keys = jnp.zeros((2, KV_HEADS, SIZE, DIM))
    with pytest.raises(KvjaxError, match="rank is 0"):
        LowRank(0)
    with pytest.raises(KvjaxError, match="block_tokens is 0"):
        LowRank(4, block_tokens=0)
    with pytest.raises(KvjaxError, match="rank is 160: must be at most 32, the channels of 2 KV"):
        LowRank(160).build(keys, jnp.int32(1))
    with pytest.raises(KvjaxError, match="sharpen is 0"):
        LowRank(4, sharpen=0)
    with pytest.raises(KvjaxError, match="frequencies are 3: must be one for each of the 8 pairs"):
        LowRank(4, (1.0, 0.5, 0.1)).build(keys, jnp.int32(1))
