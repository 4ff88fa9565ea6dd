"""Both sides write the same bytes, and every layout has its row."""

from benchmarks import store_writes


def test_every_layout_is_measured_against_the_flat_array(tmp_path):
    rows = store_writes.measure(2, 1, tmp_path, lambda text: None)
    assert [row.claim for row in rows] == [f"a unit is {name}" for name in store_writes.LAYOUTS]
    for row in rows:
        assert row.ours > 0
        assert row.baseline_value > 0
    assert not list(tmp_path.iterdir())


def test_quick_is_small():
    options = store_writes.parse(["--quick"])
    assert (options.pages, options.repeats) == (16, 1)
    assert store_writes.parse([]).pages == 500
