"""`kvjax calibrate formats`: the file it writes, what it says, and what it refuses."""

import json

import pytest
import typer.testing

from kvjax.cli import app
from kvjax.formats import CALIBRATED, load_calibrated
from tests.kvjax.tiny_gguf import write_gguf

DOCUMENT = "a bad abbot had a bag and a cab. " * 8  # more than the model's context


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrate_formats")
    write_gguf(folder / "tiny.gguf")
    (folder / "text.txt").write_text(DOCUMENT)
    return folder


@pytest.fixture
def run(folder):
    def invoke(*arguments):
        words = ["calibrate", "formats", *map(str, arguments), "--model", folder / "tiny.gguf"]
        words += ["--dtype", "float32", "--cache-dir", folder / "cache"]
        return typer.testing.CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "200"})

    return invoke


@pytest.mark.slow
def test_a_calibration_is_written_and_told(run, folder, tmp_path):
    result = run(folder / "text.txt", "-o", tmp_path / "formats.json", "-n", "64")
    assert result.exit_code == 0, result.output
    assert "64 tokens, 2 layers; use with: kvjax generate --format mixed4" in result.output
    for name in CALIBRATED:
        assert len(load_calibrated(tmp_path / "formats.json", name).layers) == 2

    result = run(folder / "text.txt", "-o", tmp_path / "again.json", "-n", "64", "--json")
    told = json.loads(result.stdout)
    assert told["tokens"] == 64
    assert told["formats"] == list(CALIBRATED)
    assert (tmp_path / "again.json").read_text() == (tmp_path / "formats.json").read_text()


def test_what_cannot_be_measured_is_refused(run, folder, tmp_path):
    (tmp_path / "short.txt").write_text("a bad cab")
    result = run(tmp_path / "short.txt", "-o", tmp_path / "formats.json")
    assert result.exit_code == 2
    assert "text 0 has" in result.output
    assert not (tmp_path / "formats.json").exists()
    assert "none.txt" in run(tmp_path / "none.txt", "-o", tmp_path / "formats.json").output
    assert "a folder" in run(folder / "text.txt", "-o", tmp_path).output


def test_help_has_an_example(run):
    result = typer.testing.CliRunner().invoke(app, ["calibrate", "formats", "--help"])
    assert "kvjax calibrate formats report.txt -o formats.json" in " ".join(result.stdout.split())
