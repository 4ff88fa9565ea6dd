"""`kvjax distill indexer`: what it writes and says, `generate --indexer`, and what is refused."""

import json

import pytest
import typer.testing

from kvjax.cli import app
from kvjax.policies import DistilledIndexer
from tests.kvjax.tiny_gguf import write_gguf

DOCUMENT = "a bad abbot had a bag and a cab. " * 3
SMALL = ("-n", "512", "--steps", "20", "--heads", "2", "--dim", "8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distill")
    write_gguf(folder / "tiny.gguf")
    (folder / "text.txt").write_text(DOCUMENT * 12)
    return folder


@pytest.fixture
def run(folder):
    def invoke(*arguments, model="tiny.gguf"):
        words = [*map(str, arguments), "--model", str(folder / model), "--dtype", "float32"]
        words += ["--cache-dir", str(folder / "cache")]
        return typer.testing.CliRunner().invoke(app, words, env={"COLUMNS": "200"})

    return invoke


@pytest.mark.slow
def test_an_indexer_is_distilled_and_chooses_pages(run, folder, tmp_path):
    file = tmp_path / "indexer.json"
    result = run("distill", "indexer", folder / "text.txt", "-o", file, *SMALL, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["layers"] == len(DistilledIndexer.load(file).learned) == 2
    kept = {(each["method"], each["one_of"]): each for each in told["attention_kept"]}
    assert 0 < kept["indexer, tokens", 16]["attention"] <= 1
    fewest = kept["page means", 16]["read_bytes"]  # two pages of six, of which one of 16 is less
    assert kept["page means", 8]["read_bytes"] == fewest
    assert kept["exact keys", 8]["read_bytes"] > fewest

    plain = run("generate", DOCUMENT, "--max-new-tokens", "8", "--json")
    chosen = run(
        "generate", DOCUMENT, "--max-new-tokens", "8", "--json",
        "--indexer", file, "--step-budget", "100%",
    )  # fmt: skip
    assert chosen.exit_code == 0, chosen.output
    assert json.loads(chosen.stdout)["text"] == json.loads(plain.stdout)["text"]
    assert json.loads(chosen.stdout)["stats"]["tiers"]["index_bytes"] > 0

    write_gguf(folder / "other.gguf", quantized=False)
    asked = ("generate", DOCUMENT, "--max-new-tokens", "8", "--indexer", file)
    other = run(*asked, model="other.gguf")
    assert "error: --indexer is one of model" in other.output
    both = run("generate", DOCUMENT, "--indexer", file, "--select", "mean")
    assert both.exit_code == 2
    assert "both say what selects the pages" in both.output


def test_what_cannot_be_distilled_is_refused_before_it_begins(run, folder, tmp_path):
    (tmp_path / "short.txt").write_text(DOCUMENT)
    result = run("distill", "indexer", tmp_path / "short.txt", "-o", tmp_path / "x.json", *SMALL)
    assert result.exit_code == 2
    assert "at least 512 are needed" in result.output
    assert "a folder" in run("distill", "indexer", folder / "text.txt", "-o", tmp_path).output
    assert "does not exist" in run("generate", "abc", "--indexer", tmp_path / "none.json").output


def test_help_has_an_example(run):
    result = typer.testing.CliRunner().invoke(app, ["distill", "indexer", "--help"])
    assert "kvjax distill indexer report.txt -o indexer.json" in " ".join(result.stdout.split())
