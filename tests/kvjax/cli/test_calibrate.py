"""`kvjax calibrate tiers`, and `kvjax generate --calibration` with what it found."""

import json
import re

import pytest
import typer.testing

from kvjax.cli import app
from tests.kvjax.tiny_gguf import write_gguf

DOCUMENT = "a bad abbot had a bag and a cab. " * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrate")
    write_gguf(folder / "tiny.gguf")
    (folder / "text.txt").write_text(DOCUMENT)
    return folder


@pytest.fixture
def run(folder):
    def invoke(*arguments):
        words = [*map(str, arguments), "--model", str(folder / "tiny.gguf"), "--dtype", "float32"]
        words += ["--cache-dir", str(folder / "cache"), "--page-size", "8"]
        return typer.testing.CliRunner().invoke(app, words, env={"COLUMNS": "200"})

    return invoke


@pytest.mark.slow
def test_what_was_found_is_shown_written_and_used(run, folder):
    calibrated = folder / "tiers.json"
    budget = ("--select", "mean", "--step-budget", "3 pages")
    words = ("calibrate", "tiers", folder / "text.txt", "-n", "4", "--runs", "1", *budget)
    result = run(*words, "-o", calibrated)
    assert result.exit_code == 0, result.output
    for text in ("window *", "micro-batches *", "step ms", "generate --select mean --calibration"):
        assert text in result.output
    found = json.loads(calibrated.read_text())["body"]
    assert found["per_centroid"] is None
    assert found["micro_batches"] == 1

    plain = run("generate", DOCUMENT, *budget, "-n", "6", "--json")
    same = run("generate", DOCUMENT, *budget, "-n", "6", "--json", "--calibration", calibrated)
    assert same.exit_code == 0, same.output
    assert json.loads(same.stdout)["tokens"] == json.loads(plain.stdout)["tokens"]
    near = [json.loads(r.stdout)["stats"]["tiers"]["slots"] for r in (plain, same)]
    assert (near[0] == near[1]) == (found["times"] == 3.0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--window", "2"), "--calibration is .*, and --window or --window-plan is given too"),
        ((), "error: --calibration is of use with --select or --indexer only"),
    ],
)
def test_options_that_do_not_go_together_are_refused(run, tmp_path, arguments, said):
    select = ("--select", "mean") if arguments else ()
    words = ("generate", DOCUMENT, *select, *arguments, "--calibration", tmp_path / "tiers.json")
    result = run(*words)
    assert result.exit_code == 2
    assert re.search(said, result.output)


def test_a_calibration_that_is_not_there_is_named(run, tmp_path):
    words = ("generate", DOCUMENT, "--select", "mean", "--calibration", tmp_path / "none.json")
    result = run(*words)
    assert result.exit_code == 2
    assert "none.json does not exist" in result.output


def test_a_text_that_is_too_short_is_refused(run, tmp_path):
    (tmp_path / "short.txt").write_text("a bad cab")
    result = run("calibrate", "tiers", tmp_path / "short.txt", "-o", tmp_path / "tiers.json")
    assert result.exit_code == 2
    assert "prompt 0 has" in result.output
    assert not (tmp_path / "tiers.json").exists()
