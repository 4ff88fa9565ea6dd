"""Units and shards: extents and bytes by hand, and cuts that do not fit are refused."""

import dataclasses

import numpy as np
import pytest

from kvjax.storage.layout import Grid, Layout
from kvjax.storage.unit_array import places, units_at
from kvjax.storage.unit_codec import UnitCodec
from kvjax.storage.unit_sizes import UnitSizes


def test_the_paper_s_example_in_numbers():
    """30 layers, 3 KV heads of 64, bfloat16: a page of one layer and head is 4 KB."""
    grid = Grid(Layout(), layers=30, pages=512, heads=3, head_dim=64, dtype="bfloat16")
    assert grid.units == (30, 3, 1, 512)
    assert grid.unit_shape == (1, 1, 2, 16, 64)
    assert (grid.unit_bytes, grid.stored_unit_bytes, grid.stored_elements) == (4096, 4116, 2056)
    assert (grid.shards, grid.index_bytes) == (90, 512 * 16 + 4)
    assert UnitSizes(grid, UnitCodec()).array_bytes == 90 * (512 * 4116 + 512 * 16 + 4)
    period = dataclasses.replace(grid, layout=Layout(layers=5, heads=3, split_kv=True))
    assert period.units == (6, 1, 2, 512)
    assert period.unit_shape == (5, 3, 1, 16, 64)
    assert period.unit_bytes == 5 * 3 * 16 * 64 * 2


@pytest.mark.parametrize("layout", [Layout(4), Layout(4, 2, 3, True)])
def test_places_number_the_units_in_the_order_of_the_files(layout):
    grid = Grid(layout, 4, 5, 6, 8, "float32")
    where = np.arange(np.prod(grid.units))
    units = units_at(grid, where)
    np.testing.assert_array_equal(places(grid, units), where)
    shards = units[:, :2].tolist()
    assert shards == sorted(shards)
    assert units[:2].tolist() == [[0, 0, 0, 0], [0, 0, 1, 0] if layout.split_kv else [0, 0, 0, 1]]


def test_bytes_of_a_read_by_hand():
    grid = Grid(Layout(4), 2, 10, 1, 4, "float16")  # units of 64 bytes, 84 in the file
    units = np.array([[0, 0, 0, 1], [0, 0, 0, 3], [1, 0, 0, 0]])
    where = places(grid, units)
    index = 2 * (10 * 16 + 4)
    sizes = UnitSizes(grid, UnitCodec())
    assert sizes.bytes_of_read(where, 0) == (3 * 64, index + 3 * 20)
    assert sizes.bytes_of_read(where, 84) == (3 * 64 + 84, index + 3 * 20)
    assert sizes.bytes_of_read(where[:0], 84) == (0, 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"pages": 0}, "pages is 0"),
        ({"heads": 3}, "does not divide the model's 3 heads; give one of \\[1, 3\\]"),
        ({"layers": 5}, "give one of \\[1, 5\\]"),
        ({"dtype": "int8"}, "allowed: bfloat16, float16, float32"),
    ],
)
def test_extents_that_do_not_fit_are_refused(change, says):
    good = {"layers": 4, "pages": 1, "heads": 2, "head_dim": 1, "dtype": "float32"}
    with pytest.raises(ValueError, match=says):
        Grid(Layout(4, 2, 2), **(good | change))


@pytest.mark.parametrize("name", ["page_size", "layers", "heads"])
@pytest.mark.parametrize("value", [0, -1, 1.5, None])
def test_a_layout_of_nothing_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"Layout\.{name} is {value}"):
        Layout(**{name: value})
