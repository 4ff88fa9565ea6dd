"""Rows judge themselves by their aims, and documents keep what is not a benchmark's own."""

import argparse
import json

import pytest

from benchmarks import report
from benchmarks.report import Row


def row(**fields):
    return Row(**({"claim": "c", "metric": "m", "unit": "ms", "ours": 3.0} | fields))


@pytest.mark.parametrize(
    ("ours", "baseline_value", "aim", "ratio", "met"),
    [
        (3.0, 2.0, ">= 1.5", 1.5, True),
        (3.0, 2.0, "> 1.5", 1.5, False),
        (2.0, 2.0, "<= 1.05", 1.0, True),
        (2.2, 2.0, "<= 1.05", 1.1, False),
        (3.0, None, ">= 2", None, None),
        (None, 2.0, ">= 2", None, None),
        (3.0, 0.0, ">= 2", None, None),
        (3.0, 2.0, None, 1.5, None),
    ],
)
def test_ratio_and_aim(ours, baseline_value, aim, ratio, met):
    made = row(ours=ours, baseline="peer", baseline_value=baseline_value, aim=aim)
    assert made.met is met
    assert made.ratio == (None if ratio is None else pytest.approx(ratio))


def test_without_a_baseline_the_number_itself_is_judged():
    assert row(ours=0.99, aim=">= 0.98").met is True
    assert row(ours=0.97, aim=">= 0.98").met is False
    assert row(ours=float("nan"), aim=">= 0.98").met is None


@pytest.mark.parametrize("aim", ["2", ">=2", "= 2", ">= fast"])
def test_an_aim_of_another_form_is_refused(aim):
    with pytest.raises(ValueError, match="must be one of"):
        row(aim=aim)


def test_json_has_the_keys_every_benchmark_promises(tmp_path):
    report.write_json(tmp_path / "rows.json", [row(baseline="peer", baseline_value=6.0)])
    (written,) = json.loads((tmp_path / "rows.json").read_text())
    assert set(written) == {
        *("claim", "metric", "unit", "ours", "baseline", "baseline_value", "ratio", "aim", "met")
    }
    assert written["ratio"] == 0.5


def test_a_section_is_replaced_and_its_surroundings_kept(tmp_path):
    document = tmp_path / "benchmarks.md"
    report.write_section(document, "one", "first")
    report.write_section(document, "two", "second")
    document.write_text(document.read_text().replace("# Benchmarks", "# Mine\n\nA word.", 1))
    report.write_section(document, "one", "third")
    text = document.read_text()
    assert text.startswith("# Mine\n\nA word.\n")
    assert "first" not in text
    assert text.index("third") < text.index("second")
    before = text
    report.write_section(document, "two", "second")
    assert document.read_text() == before


@pytest.mark.parametrize("damage", ["<!-- begin one -->", "<!-- end one --> <!-- begin one -->"])
def test_a_damaged_section_is_not_guessed_at(tmp_path, damage):
    document = tmp_path / "benchmarks.md"
    document.write_text(damage)
    with pytest.raises(ValueError, match="mend or delete"):
        report.write_section(document, "one", "body")
    assert document.read_text() == damage


def test_finish_writes_what_was_asked_for(tmp_path, capsys):
    options = argparse.Namespace(
        quick=True, json=tmp_path / "rows.json", docs=tmp_path / "docs" / "benchmarks.md"
    )
    rows = [row(claim="a|b", baseline="peer", baseline_value=1.0, aim=">= 2")]
    report.finish(rows, options, name="demo", title="A demonstration", body="Said before.")
    assert "A demonstration" in capsys.readouterr().out
    text = options.docs.read_text()
    assert "Said before." in text
    assert "| a\\|b | m | 3 ms | peer | 1 | 3 | >= 2 | yes |" in text
    assert len(json.loads(options.json.read_text())) == 1


def test_quick_writes_no_document(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "DOCUMENT", tmp_path / "benchmarks.md")
    options = argparse.Namespace(quick=True, json=None, docs=None)
    report.finish([row()], options, name="demo", title="t", body="")
    assert not report.DOCUMENT.exists()
