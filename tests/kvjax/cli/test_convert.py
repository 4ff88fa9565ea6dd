"""`kvjax convert mla`: the folder it writes runs like any model, and what it refuses."""

import json

import pytest
import typer.testing

from kvjax.cli import app
from tests.kvjax.tiny_gguf import write_gguf

DOCUMENT = "a bad abbot had a bag and a cab. " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("convert")
    write_gguf(folder / "tiny.gguf")
    (folder / "text.txt").write_text(DOCUMENT)
    (folder / "short.txt").write_text("a bad cab")
    return folder


@pytest.fixture(scope="module")
def run(folder):
    def invoke(*words):
        words = [*map(str, words), "--cache-dir", str(folder / "cache")]
        return typer.testing.CliRunner().invoke(app, words, env={"COLUMNS": "200"})

    return invoke


@pytest.fixture(scope="module")
def made(run, folder):
    """What a conversion with healing prints, and its folder."""
    words = ["convert", "mla", folder / "tiny.gguf", folder / "mla", "--rank", 16, "--rope-dim", 8]
    words += ["--even"]
    words += ["--text", folder / "text.txt", "--heal", 3, "--json"]
    result = run(*words)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), folder / "mla"


def test_a_conversion_is_told(made):
    told, folder = made
    assert told["output"] == str(folder)
    assert (told["bytes_before"], told["bytes_after"]) == (2 * 64 * 4, 2 * 24 * 4)
    assert told["healed"]["kl"] > 0
    assert told["converted"]["original_perplexity"] == told["healed"]["original_perplexity"]
    assert len(told["losses"]) == 3
    assert [layer["rank"] for layer in told["layers"]] == [16, 16]
    assert [layer["rope_dim"] for layer in told["layers"]] == [8, 8]
    kept = json.loads((folder / "conversion.json").read_text())
    assert kept == {key: value for key, value in told.items() if key != "output"}
    assert not folder.with_name("mla.healing").exists()


def test_the_folder_is_a_model_like_any_other(made, run, folder):
    words = ["score", "a bad cab", "--model", made[1], "--dtype", "float32", "--json"]
    scored = json.loads(run(*words).stdout)
    assert scored["stats"]["bytes_per_token"] == made[0]["bytes_after"]
    original = run(*words[:2], "--model", folder / "tiny.gguf", "--dtype", "float32", "--json")
    assert scored["tokens"] == json.loads(original.stdout)["tokens"]
    again = run("convert", "mla", made[1], folder / "twice", "--rank", 8, "--rope-dim", 8)
    assert again.exit_code == 2
    assert "keeps latents already (layer 0: 16 elements and 8 rotated)" in again.output


@pytest.mark.slow
def test_the_folder_runs_in_a_format(made, run):
    words = ["generate", DOCUMENT[:50], "--model", made[1], "-n", 5, "--format", "int4", "--json"]
    result = run(*words)
    assert result.exit_code == 0, result.output
    token = 24 / 2 + (2 * 24 + 2 * 4) / 16  # codes of 4 bits; scales, middles and units of a page
    assert json.loads(result.stdout)["stats"]["bytes_per_token"] == 2 * token


REFUSED = [
    (["--rank", 0, "--rope-dim", 8], "--rank is 0: must be an integer of at least 1"),
    (["--rank", 57, "--rope-dim", 8], "--rank is 57: must be at most 56"),
    (["--rank", 8, "--rope-dim", 5], "--rope-dim is 5: must be even and at most 32"),
    (["--rank", 8, "--rope-dim", 8, "--heal", 1, "--train", "mlp"], "--train is 'mlp'"),
    (["--rank", 8, "--rope-dim", 8, "--heal", 1, "--learning-rate", -1], "--learning-rate is -1.0"),
    (["--rank", 8, "--rope-dim", 8, "--train", "mlp"], "--train is of use with --heal only: say"),
    (["--rank", 8, "--rope-dim", 8, "--learning-rate", 1], "--learning-rate is of use with --heal"),
    (["--rank", 8, "--rope-dim", 8, "--text", "short.txt"], "text 0 has 8 tokens: at least 64"),
    (["--rank", 8, "--rope-dim", 8, "--text", "none.txt"], "none.txt: No such file"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[row[1] for row in REFUSED])
def test_bad_input_is_one_line(run, folder, monkeypatch, words, message):
    monkeypatch.chdir(folder)
    result = run("convert", "mla", "tiny.gguf", "new", *words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (said,) = result.stderr.splitlines()
    assert message in said
    assert not (folder / "new").exists()


def test_nothing_is_written_over(run, folder, monkeypatch):
    monkeypatch.chdir(folder)
    result = run("convert", "mla", "tiny.gguf", "text.txt", "--rank", 8, "--rope-dim", 8)
    assert result.exit_code == 2
    assert "text.txt is already there: name a new folder" in result.stderr


def test_a_folder_that_is_no_run_is_refused_before_the_model_is_read(run, tmp_path):
    kept = tmp_path / "new.healing"
    kept.mkdir()
    (kept / "mine.txt").write_text("a thesis")
    words = ["--rank", 8, "--rope-dim", 8, "--heal", 1]
    result = run("convert", "mla", tmp_path / "none.gguf", tmp_path / "new", *words)
    assert result.exit_code == 2
    assert "new.healing is already there and holds no checkpoint" in result.stderr
    assert (kept / "mine.txt").read_text() == "a thesis"


def test_help_has_an_example():
    result = typer.testing.CliRunner().invoke(app, ["convert", "mla", "--help"])
    assert "kvjax convert mla smollm2-135m smollm2-mla --rank" in " ".join(result.stdout.split())
