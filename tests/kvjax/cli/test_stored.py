"""`kvjax prefix`, `kvjax store`, and `kvjax generate` with what they keep."""

import errno
import json

import numpy as np
import pytest
import typer.testing

import kvjax
from kvjax.cli import app
from kvjax.storage.errors import (
    ReadFailedError,
    SegmentError,
    StoreError,
    StoreFullError,
    UnitError,
    fault,
)
from kvjax.storage.page_store import PageStore
from kvjax.storage.usage import UsageLog, Use
from tests.kvjax.tiny_gguf import write_gguf
from tests.storage.pages import put

DOCUMENT = "a bad abbot had a bag and a cab. " * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    write_gguf(folder / "tiny.gguf")
    (folder / "document.txt").write_text(DOCUMENT)
    return folder


@pytest.fixture
def run(folder, monkeypatch):
    """Runs a command in this process on the tiny model and one store."""

    def invoke(*arguments):
        words = [str(word) for word in arguments]
        if words[0] != "store":
            words += ["--model", str(folder / "tiny.gguf"), "--dtype", "float32"]
            words += ["--cache-dir", str(folder / "cache")]
        words += ["--store", str(folder / "pages")]
        return typer.testing.CliRunner().invoke(app, words, env={"COLUMNS": "200"})

    return invoke


def whole(result):
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def key(run, folder):
    return json.loads(whole(run("prefix", "add", folder / "document.txt", "--json")))["key"]


@pytest.mark.parametrize(
    "command",
    [["prefix", "add"], *(["store", name] for name in ("ls", "verify", "gc", "rm", "stats"))],
    ids=" ".join,
)
def test_every_command_has_help_with_an_example(command):
    said = typer.testing.CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"})
    assert f"Example: kvjax {' '.join(command)}" in whole(said)


@pytest.mark.slow
def test_a_stored_document_is_asked_about(run, key, folder, monkeypatch):
    asked = run("generate", "abc", "--prefix", key[:8], "--budget", "100%", "-n", 5, "--json")
    found = json.loads(whole(asked))
    model = kvjax.load(folder / "tiny.gguf", dtype="float32", cache_dir=folder / "cache")
    ids = model.tokenizer.encode(DOCUMENT.strip())
    ids += model.tokenizer.encode("\n\nabc", add_bos=False)
    assert found["tokens"] == kvjax.generate(model, ids, max_new_tokens=5).tokens[0]
    assert found["stats"]["prefix"]["pages"] == len(model.tokenizer.encode(DOCUMENT.strip())) // 16
    hits = json.loads(whole(run("store", "stats", "--json")))["hits"]
    with monkeypatch.context() as patch:  # what is being written at the end is waited for
        patch.setattr(UsageLog, "bump", lambda log, key, now: log._more.update({key: Use(7, now)}))
        table = run("generate", "abc", "--prefix", key, "--budget", "2 pages", "-n", 2)
    whole(table)
    assert json.loads(whole(run("store", "stats", "--json")))["hits"] >= hits + 7
    for row in ("stored pages attended to", "read from the store", "read / used, guesses apart"):
        assert row in table.stderr


@pytest.mark.slow
def test_the_same_words_are_the_same_tokens_stored_or_not(run, key, folder):
    question = ("generate", "abc", "-n", 3, "--json")
    warm = json.loads(whole(run(*question, "--prefix", key, "--budget", "100%")))
    cold = json.loads(whole(run(*question, "--file", folder / "document.txt")))
    assert warm["stats"]["prompt_tokens"] == cold["stats"]["prompt_tokens"]
    assert warm["tokens"] == cold["tokens"]


def test_what_to_ask_with_is_told_whole(run, key, folder):
    again = run("prefix", "add", folder / "document.txt")
    whole(again)
    assert "already there" in again.stderr
    (line,) = [line for line in again.stderr.splitlines() if "ask with" in line]
    for option in ("--prefix", "--store", "--model", "--dtype float32", "--cache-dir"):
        assert option in line


@pytest.mark.slow
def test_pages_in_a_format_serve_calls_in_it(run, folder):
    text = folder / "packed.txt"
    text.write_text(f"cab {DOCUMENT}")
    plain, added = (
        json.loads(whole(run("prefix", "add", text, "--json", *options)))
        for options in ((), ("--format", "int8"))
    )
    assert added["bytes"] < plain["bytes"] * 0.7
    again = run("prefix", "add", text, "--format", "int8")
    assert "already there" in again.stderr
    (line,) = [line for line in again.stderr.splitlines() if "ask with" in line]
    assert "--format int8" in line
    asked = ("generate", "abc", "--prefix", added["key"], "--budget", "100%", "-n", 3, "--json")
    found = json.loads(whole(run(*asked, "--format", "int8")))
    assert found["stats"]["prefix"]["pages"] > 1
    computed = ("--file", text, "--load-policy", "recompute", "--format", "int8")
    cold = json.loads(whole(run("generate", "abc", *computed, "-n", 3, "--json")))
    assert cold["stats"]["prefix"] is None
    assert found["tokens"] == cold["tokens"]
    refused = run(*asked, "--format", "int4")
    assert refused.exit_code == 2
    said = " ".join(refused.stderr.split())
    assert "the call has format 'int4'" in said
    assert "was stored in format 'int8'; ask with this" in said
    for stored in (plain, added):
        whole(run("store", "rm", stored["key"]))


def test_pages_are_encoded_and_listed_so(run, folder):
    text = folder / "encoded.txt"
    text.write_text(f"abc {DOCUMENT}")
    added = run("prefix", "add", text, "--codec", "zstd")
    assert "pages encoded by zstd" in added.stderr
    again = json.loads(whole(run("prefix", "add", text, "--codec", "blosc", "--json")))
    assert again["codec"] == "zstd"  # what is stored stays as it is
    listed = {
        info["key"]: info["codec"] for info in json.loads(whole(run("store", "ls", "--json")))
    }
    assert listed[again["key"]] == "zstd"
    assert " zstd " in whole(run("store", "ls"))
    whole(run("store", "rm", again["key"]))
    for codec, said in (("lz4", "--codec is 'lz4': must be one of"), ("splitzip", "is float32")):
        result = run("prefix", "add", folder / "document.txt", "--codec", codec)
        assert result.exit_code == 2
        assert said in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--page-size", "32"], "was stored in pages of 16 tokens"),
        (["--cache-dtype", "bfloat16"], "was stored in float32"),
        (["--chat"], "was stored without --chat"),
        (["--chat", "--system", "Be brief."], "--system is of no use with --prefix"),
        (["--select-by", "mean"], "has no mean sketch"),
    ],
    ids=str,
)
def test_a_key_that_cannot_serve_is_refused(run, key, options, said):
    result = run("generate", "abc", "--prefix", key, "-n", 2, *options)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


def test_a_document_with_another_ending_has_a_key_of_its_own(run, key, folder):
    (folder / "longer.txt").write_text(DOCUMENT.strip() + " a")
    other = json.loads(whole(run("prefix", "add", folder / "longer.txt", "--json")))
    assert other["replaced"] == []
    asked = [
        json.loads(whole(run("generate", "abc", "--prefix", one, "-n", 1, "--json")))["stats"]
        for one in (key, other["key"])
    ]
    assert asked[1]["prompt_tokens"] > asked[0]["prompt_tokens"]
    again = run("prefix", "add", folder / "longer.txt", "--replace-shorter")
    assert "already there" in again.stderr
    assert f"replaced: {key[:12]}, document.txt for tiny" in again.stderr
    assert [info["key"] for info in listed(run)] == [other["key"]]
    whole(run("store", "rm", other["key"]))


def test_the_store_is_listed_checked_and_cleaned(run, key):
    listed = json.loads(whole(run("store", "ls", "--json")))
    assert [info["key"] for info in listed] == [key]
    assert listed[0]["label"] == "document.txt for tiny"
    assert key[:8] in whole(run("store", "ls"))
    assert json.loads(whole(run("store", "verify", "--json"))) == []
    stats = json.loads(whole(run("store", "stats", "--json")))
    assert stats["segments"] == 1
    assert stats.keys() == {"segments", "bytes", "sketch_bytes", "hits", "oldest", "idle"}
    assert json.loads(whole(run("store", "gc", "--json"))) == {"segments": 0, "bytes": 0}


def test_a_list_fits_a_terminal_of_80_columns(tmp_path):
    store = PageStore.open(tmp_path)
    infos = [
        put(store, seed, label=f"{'a long [red] name of a file' * 9} {seed}") for seed in (1, 2)
    ]
    words = ["store", "ls", "--store", str(tmp_path)]
    shown = whole(typer.testing.CliRunner().invoke(app, words, env={"COLUMNS": "80"}))
    lines = shown.rstrip().splitlines()
    assert max(map(len, lines)) <= 80
    for info in infos:
        (line,) = [line for line in lines if line.startswith(info.key[:8])]
        assert "a long [red] name" in line
        assert "…" in line
        assert line.endswith(("min ago", "h ago"))
    listed = json.loads(whole(typer.testing.CliRunner().invoke(app, [*words, "--json"])))
    assert {info["label"] for info in listed} == {info.label for info in infos}
    assert {info["key"] for info in listed} == {info.key for info in infos}


def test_damage_is_told_with_an_exit_code(run, key, folder):
    largest = max((folder / "pages").rglob("*"), key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(content[: len(content) // 2])
    result = run("store", "verify", key[:10])
    assert result.exit_code == 1
    assert key[:12] in result.stdout
    largest.write_bytes(content)


def test_a_prefix_is_removed_by_its_first_digits(run, key):
    assert json.loads(whole(run("store", "rm", key[:8], "--json")))["bytes"] > 0
    assert json.loads(whole(run("store", "ls", "--json"))) == []
    gone = run("store", "rm", key[:8])
    assert gone.exit_code == 2
    assert f"starts with {key[:8]!r}: `kvjax store ls` lists them" in gone.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StoreError(errno.EACCES, "writing x: Permission denied"), "writing x: Permission denied"),
        (StoreError(errno.EROFS, "writing x: Read-only"), "writing x: Read-only"),
        (fault(ValueError("INTERNAL: full [os_error_code='28']"), "writing x"), "writing x: INTER"),
        (SegmentError("ab" * 32, "torn", "half of it"), "segment abababababab is a miss (torn)"),
        (UnitError("ab" * 32, (0, 0, 0, 1), "checksum", "bits"), "cannot be read (checksum)"),
        (ReadFailedError("timeout", np.zeros((1, 4), np.int32), "late"), "1 units could not be"),
        (StoreFullError(5, 10), "5 bytes are missing, and open segments hold 10"),
        (PermissionError(errno.EACCES, "Permission denied"), "cannot write: Permission denied"),
        (OSError(errno.EROFS, "Read-only file system"), "cannot write: Read-only file system"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "/x: Permission denied"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_store_that_fails_is_one_line(run, folder, monkeypatch, error, said):
    def failing(*_, **__):
        raise error

    monkeypatch.setattr("kvjax.cli.prefix.open_prefixes", failing)
    result = run("prefix", "add", folder / "document.txt")
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert said in line
    again = run("prefix", "add", folder / "document.txt", "--traceback")
    assert again.exception is error


@pytest.mark.slow
def test_tokens_are_reordered_after_an_answer(run, folder):
    asking = ("--select-by", "impress", "--select-who", "layer", "--read-timeout", 20, "--reorder")
    added = run("prefix", "add", folder / "document.txt", *asking[:4], "--json")
    key = json.loads(whole(added))["key"]
    question = ("generate", "abc", "--prefix", key, "-n", 2, "--load-policy", "load", "--json")
    plain = run(*question, *asking)
    assert "reordered: " in plain.stderr
    (packed,) = [info for info in listed(run) if info["label"].endswith(", reordered")]
    again = json.loads(whole(run(*question, *asking, "--budget", "100%")))
    assert again["stats"]["prefix"]["key"] == packed["key"]
    for info in listed(run):
        run("store", "rm", info["key"])


def test_clip_is_part_of_what_is_stored(run, folder):
    added = json.loads(whole(run("prefix", "add", folder / "document.txt", "--json")))
    refused = run("generate", "abc", "--prefix", added["key"], "-n", 1, "--clip", "0.9")
    assert "has no low-bit-3-0.9 sketch" in refused.stderr
    run("store", "rm", added["key"])


def listed(run):
    return json.loads(whole(run("store", "ls", "--json")))


def test_a_store_keeps_to_its_most_bytes(run, folder, key):
    size = json.loads(whole(run("store", "stats", "--json")))["bytes"]
    (folder / "other.txt").write_text("a cab had a bad bag. " * 4)
    other = run("prefix", "add", folder / "other.txt", "--max-bytes", f"{size + 9}B", "--json")
    added = json.loads(whole(other))["key"]
    assert [info["key"] for info in json.loads(whole(run("store", "ls", "--json")))] == [added]


def test_bad_options_are_one_line(run, folder):
    for arguments, said in (
        (["generate", "abc", "--budget", "0%"], "error: --budget is '0%'"),
        (["generate", "abc", "--select-by", "luck"], "error: --select-by is 'luck'"),
        (["generate", "abc", "--select-who", "luck"], "error: --select-who is 'luck'"),
        (["generate", "abc", "--select-bits", "9"], "--select-bits is 9"),
        (["generate", "abc", "--clip", "0"], "error: --clip is 0.0"),
        (["generate", "abc", "--read-timeout", "nan"], "error: --read-timeout is nan"),
        (["generate", "abc", "--reorder"], "error: --reorder needs --select-by"),
        (["store", "verify", "--read-timeout", "0"], "error: --read-timeout is 0.0"),
        (["generate", "abc", "--period", "0"], "error: --period is 0"),
        (["generate", "abc", "--placement", "x"], "error: --placement is 'x'"),
        (["generate", "abc", "--load-policy", "x"], "error: --load-policy is 'x'"),
        (["generate", "abc", "--on-read-failure", "x"], "error: --on-read-failure is 'x'"),
        (["prefix", "add", folder / "document.txt", "--max-bytes", "2"], "--max-bytes is '2'"),
        (["prefix", "add", folder / "document.txt", "--max-bytes", "0GB"], "--max-bytes is '0GB'"),
        (
            ["prefix", "add", folder / "document.txt", "--max-bytes", "9B"],
            "--max-bytes is 9; store",
        ),
        (["generate", "abc", "--prefix", "0000"], "no stored prefix has a key"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert said in result.stderr
    nowhere = typer.testing.CliRunner().invoke(app, ["store", "ls", "--store", str(folder / "no")])
    assert nowhere.exit_code == 2
