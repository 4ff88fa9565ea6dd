"""What the benchmark of batches claims of what it measured."""

from benchmarks.tiered_batches import Batch, claims
from benchmarks.tiered_methods import EXACT, METHODS, OURS, PACKED


def test_claims_are_against_what_was_measured_beside_them():
    found = [
        Batch(4096, 2, EXACT, 0.2),
        Batch(4096, 2, OURS, 0.1, 0.95, 1000e3, 0.04),
        Batch(4096, 2, PACKED["int4"], 0.11, 0.95, 300e3, 0.02),
        Batch(4096, 2, "Quest", 0.2, 0.0, 9000e3, 0.1),
        Batch(512, 4, EXACT, 0.04),  # other rows
        Batch(8192, 2, EXACT, 0.4),  # nothing of ours there: no claim
    ]
    rows = claims(found)
    assert {row.claim for row in rows} == {
        "2 x 4096 tokens",
        "2 x 4096 tokens, low-bit keys, window x3, pages in int4",
    }
    speed, best, fetched, waited = rows
    assert (speed.ours, speed.baseline_value) == (20.0, 10.0)
    assert best.baseline == "Quest (fastest of the published)"
    assert (fetched.ours, fetched.baseline_value) == (300.0, 1000.0)
    assert (round(waited.ours, 6), round(waited.baseline_value, 6)) == (2.2, 4.0)


def test_pages_in_fewer_bits_differ_from_ours_in_nothing_else():
    for name, method in PACKED.items():
        assert METHODS[method].format == name
        assert METHODS[method].by == METHODS[OURS].by
        assert METHODS[method].window == METHODS[OURS].window


def test_a_long_context_is_set_against_a_short_one():
    found = [Batch(512, 1, EXACT, 0.05), Batch(8000, 1, EXACT, 0.08), Batch(8000, 1, OURS, 0.06)]
    row, _ = claims(found)
    assert row.baseline == f"{EXACT}, 512 tokens"
    assert (round(row.ours, 6), round(row.baseline_value, 6)) == (60.0, 50.0)
    assert row.met
