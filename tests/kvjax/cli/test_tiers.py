"""`kvjax generate --select`: steps that read selected pages, from host memory or a store."""

import json

import pytest
import typer.testing

from kvjax import decode
from kvjax.cli import app
from kvjax.policies import Place, Select
from kvjax.storage.page_store import PageStore
from tests.kvjax.tiny_gguf import write_gguf

DOCUMENT = "a bad abbot had a bag and a cab. " * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiers")
    write_gguf(folder / "tiny.gguf")
    return folder


@pytest.fixture
def run(folder):
    def invoke(*arguments):
        words = ["generate", "--model", str(folder / "tiny.gguf"), "--dtype", "float32"]
        words += ["--cache-dir", str(folder / "cache"), "-n", "8", *map(str, arguments)]
        return typer.testing.CliRunner().invoke(app, words, env={"COLUMNS": "200"})

    return invoke


def answer(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_all_pages_selected_are_the_plain_answer(run, folder):
    plain = answer(run(DOCUMENT, "--json"))
    tiers = ("--select", "mean", "--step-budget", "100%", "--json")
    near = answer(run(DOCUMENT, *tiers))
    stored = answer(run(DOCUMENT, *tiers, "--store", folder / "pages", "--host-budget", "0"))
    assert near["text"] == stored["text"] == plain["text"]
    assert stored["stats"]["tiers"]["store"]["host_bytes"] == 0
    assert len(PageStore.open(folder / "pages").segments()) == 1
    assert plain["stats"]["tiers"] is None


@pytest.mark.slow
def test_an_answer_is_kept_and_pages_lie_by_cluster(run, folder):
    usual = ("--page-size", "8", "-n", "17", "--json")
    tiers = ("--select", "mean", "--step-budget", "100%", *usual)
    where = ("--store", folder / "kept", "--page-order", "cluster", "--keep-generated")
    where += ("--codec", "zstd")
    stored = answer(run(DOCUMENT, *tiers, *where))
    assert stored["text"] == answer(run(DOCUMENT, *usual))["text"]
    kept = stored["stats"]["tiers"]["store"]
    assert kept["not_kept"] is None
    assert kept["pages_kept"] == 2
    infos = PageStore.open(folder / "kept").segments()
    assert [info.codec for info in infos] == ["zstd"] * 2


@pytest.mark.slow
def test_how_heads_agree_and_what_is_near_at_first(run, monkeypatch):
    """What the options say is what the call gets."""
    seen, whole = [], decode.generate
    monkeypatch.setattr(
        decode, "generate", lambda *x, **y: seen.append(y["cache"]) or whole(*x, **y)
    )
    usual = ("--select", "mean", "--step-budget", "2 pages", "--no-stream", "--json")
    chosen = ("--aggregate", "query", "--step-pooling", "0.25", "--observe", "5")
    for given in ((), chosen):
        answer(run(DOCUMENT, *usual, *given))
    default, other = seen
    assert (default.select, default.place) == (Select("2 pages", "mean"), Place())
    assert other.select == Select("2 pages", "mean", aggregate="query", pooling=0.25)
    assert other.place == Place(observe=5)


@pytest.mark.slow
def test_the_table_says_what_moved(run):
    result = run(DOCUMENT, "--select", "mean", "--step-budget", "2 pages", "--window", "0")
    assert result.exit_code == 0, result.output
    for row in ("reads that were near", "fetched", "index", "room in host memory"):
        assert row in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--window", "2"), "error: --window is of use with --select or"),
        (("--window-plan", "f"), "error: --window-plan is of use with --select or"),
        (
            ("--select", "mean", "--window", "3", "--window-plan", "f"),
            "error: --window is 3 and --window-plan is f: the plan says how many pages stay near",
        ),
        (("--select", "mean", "--window-plan", "no/f"), "window plan no/f does not exist: give"),
        (("--keep-generated",), "error: --keep-generated is of use with --select or"),
        (("--select", "mean", "--keep-generated"), "--keep-generated needs --store: name a store"),
        (("--select", "mean", "--page-order", "luck"), "--page-order is 'luck': must be one of"),
        (("--select", "mean", "--page-order", "cluster"), "and --store is not given: it is that"),
        (("--codec", "zstd"), "error: --codec is of use with --select or"),
        (("--select", "mean", "--codec", "lz4"), "--codec is 'lz4': must be one of none, zstd"),
        (("--select", "mean", "--codec", "zstd"), "--codec is 'zstd' and --store is not given"),
        (("--step-budget", "5%"), "--step-budget is of use with --select or --indexer only"),
        (("--device-budget", "64MB"), "--device-budget is 64000000, which is of stored prefixes"),
        (("--host-budget", "64MB"), "give --prefix, --store or --select too, or leave it out"),
        (("--budget", "5%"), "--budget is '5%', which is of stored prefixes and selected pages"),
        (("--select", "luck"), "error: --select is 'luck': must be one of low-bit,"),
        (("--select", "mean", "--window", "0.5"), "error: --window is 0.5"),
        (("--select", "mean", "--evict", "luck"), "error: --evict is 'luck'"),
        (("--select", "mean", "--host-budget", "1MB"), "--store is not given"),
        (("--select", "mean", "--step-budget", "0%"), "--step-budget is '0%'"),
        (("--select", "mean", "--budget", "5%"), "--budget is '5%', which is of stored prefixes"),
        (("--select", "mean", "--pooling", "0.1"), "with --select give --step-pooling"),
        (("--aggregate", "max"), "--aggregate is of use with --select or --indexer only"),
        (("--step-pooling", "0.5"), "--step-pooling is of use with --select or --indexer only"),
        (("--observe", "8"), "error: --observe is of use with --select or"),
        (("--select", "mean", "--aggregate", "luck"), "error: --aggregate is 'luck': must be one"),
        (("--select", "mean", "--step-pooling", "2"), "error: --step-pooling is 2.0: must be a"),
        (("--select", "mean", "--observe", "0"), "error: --observe is 0: must be an integer of at"),
        (("--select", "low-bit", "--select-bits", "7"), "--select-bits is 7"),
        (("--select", "mean", "--device-budget", "much"), "--device-budget is 'much'"),
        (("--select", "mean", "--device-budget", "100B"), "--device-budget is 100"),
        (("--select", "mean", "--prefix", "abc"), "--prefix and --select"),
    ],
)
def test_bad_input_is_one_sentence(run, arguments, said):
    result = run(DOCUMENT, *arguments)
    assert result.exit_code != 0
    assert said in result.output.replace("\n", " ")
    assert "Traceback" not in result.output
