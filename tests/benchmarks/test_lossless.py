"""Every codec gives back what it got, and each has its line and its rows."""

import numpy as np

from benchmarks import lossless
from kvjax.storage.layout import numpy_dtype


def test_every_codec_is_measured_on_pages_and_pieces():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 16, (4, 2, 3, 2, 4, 8)).astype(np.uint16) & 0x8070
    exponents = rng.integers(118, 136, bits.shape).astype(np.uint16)
    keys, values, *other = (bits | exponents << 7).view(numpy_dtype("bfloat16"))
    points, body = lossless.measured([keys, values], other, 1, lambda text: None)
    assert {point.numbers for point in points} == {64, keys.size * 2}
    assert len(points) == 2 * (2 + len(lossless.BASELINES))
    plain = [point.share for point in points if point.codec == "no codec"]
    assert plain == [1.0, 1.0]
    assert body.count("|\n") + 1 == 2 + len(points)
    rows = lossless.rows_of(points)
    assert len(rows) == 2 * (3 + 2)
    for row in rows:
        assert row.ours > 0
        assert row.baseline_value > 0


def test_quick_is_small():
    options = lossless.parse(["--quick"])
    assert (options.tokens, options.repeats) == (512, 1)
    assert lossless.parse([]).tokens == 4096
