"""KVQuant's packings: levels, ranges, outliers, and rotations by logical position."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.formats import CALIBRATED, PagePacking
from kvjax.formats.constant import Constant
from kvjax.formats.outliers import room
from kvjax.models import LayerConfig, RopeScaling
from kvjax.pallas_kernels.page_walk import gather_heads
from tests.kvjax.formats.samples import (
    DIM,
    HEADS,
    POSITIONS,
    SIZE,
    calibration,
    encoded,
    made,
    plain_keys,
    relative,
    rotated,
    some_sinks,
    some_values,
    values_of,
)


def test_packings_are_static_descriptions():
    name = "kvquant3"
    first = calibration(plain_keys(16), some_values(16)).format(name)
    same = calibration(plain_keys(16), some_values(16)).format(name)
    other = calibration(plain_keys(16, 1), some_values(16, 1)).format(name)
    assert isinstance(first.keys, PagePacking)
    assert first == same
    assert hash(first) == hash(same)
    assert repr(first) == repr(same)
    assert first != other
    assert repr(first) != repr(other)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_ascend_within_the_range(bits):
    both = made(f"kvquant{bits}")
    for packing in (both.keys, both.values):
        levels = packing.levels.values
        assert levels.shape == (2**bits,)
        assert (np.diff(levels) > 0).all()
        assert np.abs(levels).max() <= 1


@pytest.mark.slow
def test_more_bits_say_more_and_beat_levels_of_even_spacing():
    keys, values = rotated(plain_keys(4), POSITIONS), some_values(4)
    errors = []
    for bits in (4, 3, 2):
        even = Constant(np.linspace(-1, 1, 2**bits))
        both, found = made(f"kvquant{bits}"), []
        for packing, pages in ((both.keys, keys), (both.values, values)):
            found.append(relative(values_of(encoded(packing, pages)), pages))
            evenly = encoded(dataclasses.replace(packing, levels=even), pages)
            assert found[-1] < relative(values_of(evenly), pages)
        errors.append(found)
    assert errors[0] < errors[1] < errors[2]
    assert errors[0][0] < 0.03


def test_what_keys_stand_for_is_rotated_by_logical_position():
    packing, keys = made("kvquant3").keys, plain_keys(4)
    packed = encoded(packing, rotated(keys, POSITIONS))
    plain = dataclasses.replace(packed, frequencies=None)
    np.testing.assert_allclose(values_of(packed), rotated(values_of(plain), POSITIONS), atol=2e-3)
    # The same keys elsewhere have the same codes: but for rounding, where two levels meet.
    elsewhere = encoded(packing, rotated(keys, POSITIONS + 112), POSITIONS + 112)
    for name, plane in packed.planes.items():
        assert (np.asarray(plane) == np.asarray(elsewhere.planes[name]))[1:].mean() > 0.99


@pytest.mark.parametrize("name", ["fp8-calibrated", "kvquant2"])
def test_the_first_key_of_a_sequence_has_ranges_of_its_own(name):
    packing, keys = made(name).keys, plain_keys(4)
    keys[:, :, 0] = some_sinks(4)
    packed = encoded(packing, rotated(keys, POSITIONS))
    plain = values_of(dataclasses.replace(packed, frequencies=None))
    errors = [relative(page[:, 0], key[:, 0]) for page, key in zip(plain, keys, strict=True)]
    assert errors[0] < 0.01 < min(errors[1:])  # only the first page begins at position 0


def test_yarn_sharpens_keys_and_codes_do_not():
    scaling = RopeScaling("yarn", factor=4.0, original_context=64)
    layer = LayerConfig(4, HEADS, DIM, rope_scaling=scaling)
    keys = plain_keys(4)
    found = calibration(plain_keys(64, 7), some_values(64, 7), layer).format("kvquant4").keys
    packed = encoded(found, rotated(keys, POSITIONS, layer))
    assert packed.sharpen > 1
    assert relative(values_of(packed), rotated(keys, POSITIONS, layer)) < 0.05
    plain = dataclasses.replace(packed, frequencies=None)
    assert relative(values_of(plain), keys) < 0.05


@pytest.mark.parametrize("bits", [2, 4])
def test_outliers_are_exact_and_leave_others_alone(bits):
    both, places = made(f"kvquant{bits}"), room(0.01, SIZE, DIM)
    keys, values = plain_keys(4), some_values(4)
    before = values_of(encoded(both.values, values))
    at = np.random.default_rng(3).permutation(SIZE * DIM)[:places]
    for array in (keys, values):
        array.reshape(4, HEADS, -1)[..., at] = 1000.0
    packed = encoded(both.values, values)
    found = np.asarray(values_of(packed)).reshape(4, HEADS, -1)
    np.testing.assert_array_equal(found[..., at], 1000.0)
    rest = np.delete(np.arange(SIZE * DIM), at)
    wanted = values.reshape(4, HEADS, -1)[..., rest]
    assert relative(found[..., rest], wanted) < 2 * relative(before, some_values(4))

    packed = encoded(both.keys, rotated(keys, POSITIONS))
    plain = values_of(dataclasses.replace(packed, frequencies=None))
    found = np.asarray(plain).reshape(4, HEADS, -1)
    np.testing.assert_allclose(found[..., at], 1000.0, rtol=1e-3)


def test_more_outliers_than_places_keep_the_largest():
    packing, places = made("kvquant4").values, room(0.01, SIZE, DIM)
    values = some_values(1)
    big = 100.0 * (1 + np.arange(places + 2))
    values[0, 0, 0, : places + 2] = big
    found = np.asarray(values_of(encoded(packing, values)))[0, 0, 0, : places + 2]
    np.testing.assert_array_equal(found[2:], big[2:])


def test_what_is_not_finite_harms_nothing_else():
    both = made("kvquant3")
    values = some_values(2)
    values[0, 1, 3, 5] = np.nan
    values[0, 1, 4, 5] = np.inf
    found = np.asarray(values_of(encoded(both.values, values)))
    assert np.isfinite(found).all()
    clean = np.asarray(values_of(encoded(both.values, some_values(2))))
    np.testing.assert_array_equal(found[1], clean[1])
    keys = np.array(rotated(plain_keys(2), POSITIONS[:2]))
    keys[0, 1, 3, 5] = np.nan
    keys[0, 1, 4, 5] = -np.inf
    found = values_of(encoded(both.keys, keys, POSITIONS[:2]))
    assert np.isfinite(np.asarray(found)).all()


@pytest.mark.parametrize("name", CALIBRATED)
def test_pages_are_taken_by_what_grows(name):
    both = made(name)
    keys = rotated(plain_keys(4), POSITIONS)
    pools = encoded(both.keys, keys), encoded(both.values, keys, POSITIONS)
    ids = jnp.array([[2, 0, 1], [3, 3, 0]], jnp.int32)
    for pool in pools:
        whole = np.asarray(values_of(pool))
        some = pool.map_stored(lambda x: x[jnp.array([2, 1])])
        np.testing.assert_allclose(values_of(some), whole[[2, 1]], rtol=1e-6)
        for row, taken in enumerate(gather_heads(pool, ids)):
            wanted = whole[ids[row], row].reshape(-1, DIM)
            np.testing.assert_allclose(taken, wanted, rtol=1e-5, atol=1e-5)
        alone = pool.map_stored(lambda x: x[1:2])
        assert alone.stored().keys() == pool.stored().keys()


@pytest.mark.parametrize("name", ["fp8-calibrated", "kvquant3"])
def test_each_page_is_encoded_on_its_own(name):
    packing, keys = made(name).keys, rotated(plain_keys(4), POSITIONS)
    whole = values_of(encoded(packing, keys))
    for page in range(2):
        one = encoded(packing, keys[page : page + 1], POSITIONS[page : page + 1])
        # Angles are rounded by how a program is compiled: an element may be at the next level.
        assert relative(values_of(one)[0], whole[page]) < 0.01


def test_pages_that_do_not_fit_are_refused():
    both = made("kvquant3")
    with pytest.raises(KvjaxError, match="page_size is 12: codes of 3 bits of values need a mul"):
        both.values.check("values", 12, DIM)
    with pytest.raises(KvjaxError, match="pages of keys of 1024 elements have 131072 elements"):
        both.keys.check("keys", 128, 1024)
    with pytest.raises(KvjaxError, match="keys have 32 elements a head, and the calibration is"):
        both.keys.check("keys", 16, 32)
    with pytest.raises(KvjaxError, match="keys have 3 KV heads, and the calibration is of 2"):
        both.keys.encode(jnp.zeros((1, 3, SIZE, DIM)), POSITIONS[:1])
