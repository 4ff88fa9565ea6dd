"""The benchmark of distilled indexers: its rows, its table and its command line."""

from benchmarks import indexer
from kvjax.decode import Kept
from tests.kvjax.decode.tiny import model

KEPT = [
    Kept("indexer, tokens", 16, 0.9, 112.0),
    Kept("indexer, pages", 16, 0.7, 112.0),
    Kept("page means", 16, 0.6, 72.0),
    Kept("page means", 8, 0.8, 120.0),
    Kept("exact keys", 8, 0.95, 480.0),
]


def test_tokens_and_pages_are_set_against_others_and_one_of_them_is_the_aim():
    rows = {
        (row.claim.split(",")[1].strip(), row.baseline_value): row for row in indexer.claims(KEPT)
    }
    assert len(rows) == 6
    for kind, met in (("tokens", True), ("pages", False)):
        aim = rows[kind, 0.8]
        assert (aim.aim, aim.met) == (">= 1", met)
        assert rows[kind, 0.95].met is None


def test_every_way_has_its_line():
    text = indexer.body(KEPT, model(), indexer.parse(["--quick", "a.txt", "b.txt"]))
    assert "1,024 tokens of 2 texts" in text
    assert text.count("| 1 of ") == len(KEPT)


def test_quick_is_small():
    assert (indexer.parse(["--quick"]).tokens, indexer.parse(["--quick"]).steps) == (1024, 5)
    assert indexer.parse([]).tokens == 12_288
