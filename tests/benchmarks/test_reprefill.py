"""The re-prefill benchmark's claims, from points that were never measured."""

import json

import pytest

from benchmarks import reprefill, reprefill_point
from benchmarks.reprefill_claims import claims
from benchmarks.reprefill_methods import (
    CONTIGUOUS,
    FULL,
    GRID,
    IMPRESS,
    MAIN,
    METHODS,
    OURS,
    RECOMPUTE,
)
from benchmarks.reprefill_point import HEADINGS, Point, lines, write_points


def a_point(method, budget, **fields):
    given = {
        "context": 4096,
        "ttft_s": 0.5,
        "runs": 8,
        "kl_first": 0.001,
        "kl_steps": 0.01,
        "right": 4,
        "questions": 4,
        "wait_s": 0.03,
        "bytes_read": 1.1e6,
        "bytes_used": 1e6,
        "bytes_scored": 0.0,
        "bytes_wasted": 1e5,
        "index_bytes": 1e4,
    }
    return Point(method=method, budget=budget, **(given | fields))


BASE = Point(
    context=4096,
    budget=100,
    method=RECOMPUTE,
    ttft_s=10.0,
    runs=4,
    kl_first=0.0,
    kl_steps=0.0,
    right=4,
    questions=4,
)
POINTS = [
    BASE,
    a_point(OURS, 5, right=3, kl_steps=0.2),
    a_point(OURS, 10, overlap=0.5),
    a_point(OURS, 100, kl_steps=2e-5, bytes_read=1e7),
    a_point(IMPRESS, 10, right=3, bytes_read=8e6, kl_steps=0.3),
    a_point(IMPRESS, 25, bytes_read=1e7, ttft_s=2.5, kl_steps=0.05),
    a_point(CONTIGUOUS, 5, bytes_read=9e5, kl_steps=0.04),
    a_point(FULL, 100, kl_steps=0.0, bytes_read=1e7),
]


def rows(points=POINTS, model="smollm2_135m", **options):
    options = {"alone": {4096: 0.1}, "unhidden": {}} | options
    return claims(points, model, **options)


def found(rows, beginning):
    return [row for row in rows if row.claim.startswith(beginning)]


def test_ours_is_compared_where_both_first_answer_as_well_as_all_keys():
    read, select = found(rows(), "4096 tokens, 10 %: as many right answers")
    assert read.baseline == "IMPRESS at 25 %"
    assert read.ratio == pytest.approx(0.11)
    assert read.met
    assert select.ours == pytest.approx(0.4)  # less the question's own prefill
    assert select.baseline_value == pytest.approx(2.4)
    assert select.met


def test_a_baseline_that_is_as_near_with_fewer_bytes_fails_the_claim():
    by_baseline = {row.baseline: row for row in found(rows(), "bytes at equal KL")}
    assert by_baseline["ContiguousKV at 5 %"].met is False  # ours needs 10 % for that
    assert by_baseline["IMPRESS at 25 %"].met
    assert by_baseline[f"{FULL} at 100 %"].ratio == 1.0  # within the noise, ours at 100 %


@pytest.mark.parametrize(("model", "budget"), [("smollm2_135m", 10), ("qwen2.5", 5)])
def test_needles_and_kl_are_judged_at_the_models_budget(model, budget):
    judged = [row for row in rows(model=model) if "as with all" in row.claim and row.aim]
    assert [row.claim for row in judged] == [
        f"answers as with all keys and values, 4096 tokens, {budget} %"
    ]
    assert judged[0].met is (budget == 10)
    kl = [row for row in rows(model=model) if row.unit == "nats" and row.aim]
    assert {row.aim for row in kl} == {"< 0.06" if budget == 10 else "< 0.01"}


def test_bytes_guessed_wrong_are_no_amplification_and_indexes_are_counted():
    amplification, index = [row for row in rows() if "attended to" in row.metric][2:4]
    assert amplification.ours == pytest.approx(1.0)
    assert index.ours == pytest.approx(1.01)


def test_waits_are_compared_with_those_without_prefetch():
    (row,) = found(rows(unhidden={4096: a_point(OURS, 10, wait_s=0.09)}), "reads hidden")
    assert row.ratio == pytest.approx(1 / 3)
    assert row.met


def test_overlap_of_periods_leaves_out_what_is_always_guessed_right():
    config = METHODS["3-bit keys, per period"]
    # 30 layers in units of 2: 15 units, of which 8 begin a period; the first is never guessed.
    guessed = (7 + 7 * 0.6) / 15
    assert reprefill_point._overlap(guessed, config, 30) == pytest.approx(0.6)
    assert reprefill_point._overlap(guessed, METHODS[OURS], 30) is None
    (row,) = found(rows(), "inter-period overlap")
    assert row.ours == 0.5


def test_points_are_written_whole_each_time(tmp_path):
    path = tmp_path / "points.json"
    for count in range(1, len(POINTS) + 1):
        write_points(path, POINTS[:count])
        assert [Point(**each) for each in json.loads(path.read_text())] == POINTS[:count]
    assert [len(line) for line in lines(POINTS)] == [len(HEADINGS)] * len(POINTS)


def test_what_is_run_by_default_is_everything():
    options = reprefill.parse(["--json", "out.json"])
    assert options.methods == [*MAIN, *GRID]
    assert options.contexts == [2048, 4096, 8000]
    assert options.budgets == [5, 10, 25, 50]
    assert options.points.name == "out.points.json"
    quick = reprefill.parse(["--quick"])
    assert (quick.methods, quick.questions, quick.repeats) == ([OURS], 1, 1)
    assert reprefill.parse(["--methods", "grid", OURS]).methods == [*GRID, OURS]


def test_who_decides_by_what_is_complete():
    grid = (each for name, each in GRID.items() if "not pooled" not in name)
    settings = [METHODS[OURS], METHODS[CONTIGUOUS], *grid]
    seen = {(each.by, each.bits if each.by == "low-bit" else 0, each.who) for each in settings}
    whats = [("low-bit", 2), ("low-bit", 3), ("low-bit", 4), ("mean", 0), ("quest", 0), ("keys", 0)]
    assert seen == {(*what, who) for what in whats for who in ("head", "layer", "period")}
    assert len(settings) == len(seen)
