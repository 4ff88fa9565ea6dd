"""The tiered decode benchmark's claims, from points that were never measured."""

import pytest

from benchmarks import tiered_decode
from benchmarks.tiered_claims import HEADINGS, Point, claims, lines
from benchmarks.tiered_methods import EXACT, MAPPED, METHODS, OURS, QUARTER, SYSTEMS, place
from kvjax.policies.index import PageIndex


def a_point(method, **fields):
    given = {
        "context": 4096,
        "budget": 100 if method in (EXACT, MAPPED) else 6.25,
        "step_ms": 20.0,
        "pages": 17,
        "hit_ratio": 0.95,
        "fetched": 1e5,
        "index_bytes": 1e6,
        "scanned": 5e5,
        "kl_first": 0.01,
        "kl_steps": 0.02,
        "agrees": 0.9,
        "right": 4,
        "questions": 4,
    }
    return Point(method=method, **(given | fields))


def test_ours_is_judged_against_the_best_of_each_kind():
    points = [
        a_point(EXACT),
        a_point(MAPPED, step_ms=200.0),
        a_point(OURS),
        a_point(QUARTER, step_ms=25.0),
        a_point("low-bit keys, window x0", fetched=4e6),
        a_point(f"{OURS}, LRU", fetched=2e5),
        a_point("Quest", kl_steps=0.3, step_ms=30.0),
        a_point("PQCache", kl_steps=0.1, step_ms=50.0),
    ]
    rows = {(row.metric, row.baseline): row for row in claims(points)}
    assert rows["hit ratio", None].met
    assert rows["needles answered", EXACT].ratio == 1
    assert rows["time a step", MAPPED].ratio == 0.1
    assert rows["decode speed", "all in host memory"].ratio == 0.8
    assert rows["bytes fetched a step", "window x0"].met
    assert rows["bytes fetched a step", "LRU"].ratio == 0.5
    assert rows["KL over 32 steps", "PQCache (least of the published)"].met
    assert rows["time a step", "Quest (fastest of the published)"].met is False


def test_nothing_is_claimed_without_all_pages_to_compare_with():
    assert claims([a_point(OURS)]) == []


def test_a_line_has_a_cell_for_every_heading():
    (line,) = lines([a_point(EXACT, pages=0, hit_ratio=None)])
    assert len(line) == len(HEADINGS)
    assert "all" in line


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_a_configuration(name):
    assert isinstance(METHODS[name].select("6.25%").index(), PageIndex)
    where = place(METHODS[name], "folder", 1000)
    assert (where.host_bytes == 250) == ("a quarter" in name)


def test_published_selections_are_among_the_methods():
    assert set(SYSTEMS) <= set(METHODS)
    assert tiered_decode.parse([]).methods == [MAPPED, *METHODS]
    quick = tiered_decode.parse(["--quick"])
    assert (quick.contexts, quick.methods, quick.questions) == ([512], [OURS], 1)
