"""8-bit floats with measured scales: they do not saturate, and are really used."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.formats import StaticFloat8
from kvjax.formats.constant import Constant
from tests.kvjax.formats.samples import (
    DIM,
    HEADS,
    POSITIONS,
    calibration,
    encoded,
    made,
    plain_keys,
    relative,
    rotated,
    some_values,
    values_of,
)


def test_data_that_reaches_1000_does_not_saturate():
    values = some_values(16)
    values *= 1000 / np.abs(values).max()
    found = calibration(plain_keys(16), values).format("fp8-calibrated").values
    most = np.abs(values).max(axis=(0, 2, 3))
    np.testing.assert_allclose(found.scale.values, most / 448, rtol=1e-6)
    positions = jnp.zeros(16, jnp.int32)
    back = np.asarray(values_of(encoded(found, values, positions)))
    np.testing.assert_allclose(np.abs(back).max(axis=(0, 2, 3)), most, rtol=1e-6)
    assert relative(back, values) < 0.07


def test_scales_are_used():
    packing, values = made("fp8-calibrated").values, jnp.asarray(some_values(4))
    back = values_of(encoded(packing, values))
    doubled = StaticFloat8(Constant(2 * packing.scale.values))
    np.testing.assert_array_equal(values_of(encoded(doubled, 2 * values)), 2 * back)
    small = StaticFloat8(Constant(packing.scale.values / 1000))
    assert relative(values_of(encoded(small, values)), values) > 0.5  # all saturate
    packed = encoded(packing, values)
    moved = dataclasses.replace(packed, scale=3 * packed.scale)
    np.testing.assert_allclose(values_of(moved), 3 * back, rtol=1e-6)


def test_middles_of_channels_are_said_exactly():
    keys = plain_keys(4)
    packing = made("fp8-calibrated").keys
    packed = encoded(packing, rotated(keys, POSITIONS))
    plain = StaticFloat8(Constant(np.full(HEADS, 0.05)))
    wanted = rotated(keys, POSITIONS)
    assert relative(values_of(packed), wanted) < relative(values_of(encoded(plain, wanted)), wanted)
    assert packed.stored().keys() == {"planes", "position"}


def test_what_is_beyond_the_range_saturates_and_nan_is_the_middle():
    packing = StaticFloat8(Constant([1.0] * HEADS))
    page = np.zeros((1, HEADS, 16, DIM), np.float32)
    page[0, 0, 0, :4] = 1e6, -np.inf, np.nan, 3
    found = values_of(encoded(packing, page, POSITIONS[:1]))[0, 0, 0, :4]
    np.testing.assert_array_equal(found, [448, -448, 0, 3])


def test_other_heads_and_channels_are_refused():
    packing = made("fp8-calibrated").keys
    with pytest.raises(KvjaxError, match="keys have 8 elements a head, and the calibration is of"):
        packing.check("keys", 16, 8)
    with pytest.raises(KvjaxError, match="pages have 1 KV heads, and the calibration is of 2"):
        packing.encode(jnp.zeros((1, 1, 16, DIM)), POSITIONS[:1])
