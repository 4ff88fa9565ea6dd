import json
import os
import pathlib
import subprocess
import sys

import pytest
import typer.testing

from kvjax.cli import app
from tests.kvjax.tiny_gguf import VOCABULARY, write_gguf


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Every file a bad command line may name."""
    folder = tmp_path_factory.mktemp("bad")
    whole = write_gguf(folder / "tiny.gguf").read_bytes()
    (folder / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    (folder / "head.gguf").write_bytes(whole[:40])
    (folder / "empty.gguf").write_bytes(b"")
    (folder / "text.gguf").write_text("no model at all")
    write_gguf(folder / "foreign.gguf", architecture="mamba")
    write_gguf(folder / "nan.gguf", nan=True)
    write_gguf(folder / "base.gguf", chat=False)
    (folder / "empty.txt").write_text(" \n")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "long.txt").write_text("a" * 1000)
    (folder / "huge.txt").write_text("a" * 1_000_000)
    (folder / "folder").mkdir()
    for name, content in {
        "high": [1, VOCABULARY],
        "negative": [1, -1],
        "one": [1],
        "none": [],
        "float": [1, 2.5],
        "bool": [True, False],
        "object": {"tokens": [1]},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "not.json").write_text("[1, 2")
    return folder


CASES = [
    # generate: the text
    ("generate --model tiny.gguf --json", "no text: give it as an argument"),
    ("generate '' --model tiny.gguf", "the text is empty"),
    ("generate --file empty.txt --model tiny.gguf", "the text is empty"),
    ("generate --file latin.txt --model tiny.gguf", "latin.txt is not UTF-8 text: byte 3 is 0xe9"),
    ("generate --file absent.txt --model tiny.gguf", "absent.txt: No such file or directory"),
    ("generate --file folder --model tiny.gguf", "folder: Is a directory"),
    ("generate --file long.txt --model tiny.gguf", "128"),
    ("generate --file huge.txt --model tiny.gguf", "prompt has at least"),
    ("score --file /dev/zero --model tiny.gguf", "/dev/zero has more than 64 MiB"),
    ("generate abc --chat --model base.gguf", "base has no chat template"),
    ("generate abc --system x --model tiny.gguf", "--system needs --chat"),
    ("generate abc --stop xyz --model tiny.gguf", "--stop 'xyz' is 3 tokens"),
    ("generate abc --stop 9999 --model tiny.gguf", "token id 9999"),
    # calibrate: what is refused before minutes of work
    ("calibrate tiers long.txt -o folder --model tiny.gguf", "--output is folder, a folder"),
    ("calibrate tiers long.txt -o one.json/x.json --model tiny.gguf", "one.json"),
    ("calibrate tiers long.txt -o x.json --window 2 --model tiny.gguf", "--window-plan are what"),
    # generate: numbers
    ("generate abc --max-new-tokens 0 --model tiny.gguf", "--max-new-tokens is 0"),
    ("generate abc --max-new-tokens -5 --model tiny.gguf", "--max-new-tokens is -5"),
    ("generate abc --max-new-tokens 500 --model tiny.gguf", "128"),
    ("generate abc --temperature -0.1 --model tiny.gguf", "error: --temperature is -0.1"),
    ("generate abc --temperature nan --model tiny.gguf", "temperature is nan"),
    (
        "generate abc --top-k 0 --model tiny.gguf",
        "error: --top-k is 0: must be an integer of at least 1",
    ),
    ("generate abc --top-p 1.5 --model tiny.gguf", "--top-p is 1.5: must be above 0 and at most 1"),
    ("generate abc --min-p 0 --model tiny.gguf", "--min-p is 0"),
    ("generate abc --top-p 0.9 --model tiny.gguf", "--top-p is 0.9 and --temperature is 0"),
    ("generate abc --seed 0 --model tiny.gguf", "--seed is 0 and --temperature 0"),
    ("generate abc --seed -1 -t 1 --model tiny.gguf", "--seed is -1"),
    ("generate abc --prefill-chunk 0 --model tiny.gguf", "--prefill-chunk is 0"),
    # the cache
    ("generate abc --page-size 0 --model tiny.gguf", "--page-size is 0"),
    ("generate abc --page-size 12 --model tiny.gguf", "--page-size is 12"),
    ("score abc --page-size -8 --model tiny.gguf", "--page-size is -8"),
    ("score abc --num-pages 0 --model tiny.gguf", "--num-pages is 0"),
    ("generate --file long.txt -n 1 --num-pages 1 --model tiny.gguf", "128"),
    ("generate abcdefghijklmnopqrst -n 20 --num-pages 1 --model tiny.gguf", "raise --num-pages to"),
    ("score abc --cache-dtype int3 --model tiny.gguf", "--cache-dtype is 'int3'"),
    ("score abc --attention cuda --model tiny.gguf", "--attention is 'cuda'"),
    ("score abc --attention tpu --model tiny.gguf", "head_dim is 16"),
    # the model
    ("generate abc --model tiny.gguf --dtype int4", "error: --dtype is 'int4'"),
    ("generate abc --model smolm2-135m", "did you mean 'smollm2-135m'"),
    ("generate abc --model smollm2-135m", "`kvjax pull smollm2-135m` fetches it"),
    ("generate abc --model ''", "--model is ''"),
    ("generate abc --model ./smollm2-135m", "there is no file or folder ./smollm2-135m"),
    ("generate abc --model absent.gguf", "there is no file or folder"),
    ("generate abc --model folder", "holds no checkpoint"),
    ("generate abc --model cut.gguf", "cut.gguf: truncated"),
    ("generate abc --model head.gguf", "head.gguf: truncated"),
    ("generate abc --model empty.gguf", "empty.gguf: not a GGUF file"),
    ("generate abc --model text.gguf", "text.gguf: not a GGUF file"),
    ("generate abc --model foreign.gguf", "general.architecture is 'mamba'"),
    ("generate abc --model nan.gguf", "layers.1.mlp.up.weight holds NaN"),
    ("generate abc --format int5 --model tiny.gguf", "calibration need --format-calibration FILE"),
    ("generate abc --hot-exact --model tiny.gguf", "error: --hot-exact is of use with --select"),
    (
        "generate abc --evict lru --observe 4 --model tiny.gguf",
        "--evict, --observe are of use with",
    ),
    # score
    ("score a --model tiny.gguf", "at least 2"),
    ("score abc --tokens one.json --model tiny.gguf", "--tokens stands in a text's place"),
    ("score --tokens high.json --model tiny.gguf", f"token id {VOCABULARY} at index 1"),
    ("score --tokens negative.json --model tiny.gguf", "token id -1 at index 1"),
    ("score --tokens one.json --model tiny.gguf", "at least 2"),
    ("score --tokens none.json --model tiny.gguf", "empty"),
    ("score --tokens float.json --model tiny.gguf", "a JSON list of token ids"),
    ("score --tokens bool.json --model tiny.gguf", "a JSON list of token ids"),
    ("score --tokens object.json --model tiny.gguf", "a JSON list of token ids"),
    ("score --tokens not.json --model tiny.gguf", "not.json is not JSON"),
    # the others
    ("pull nobody", "no model is called 'nobody'"),
    ("pull hf:nobody", "write hf:ORG/NAME"),
    ("info --page-size 7", "--page-size is 7"),
    ("info --cache-dtype int3", "dtype is 'int3'"),
]


@pytest.mark.parametrize(("line", "message"), CASES, ids=[line for line, _ in CASES])
def test_is_one_clear_line_and_exit_code_2(files, monkeypatch, line, message):
    monkeypatch.chdir(files)
    arguments = [word.strip("'") for word in line.split(" ")]
    result = typer.testing.CliRunner().invoke(
        app, [*arguments, "--cache-dir", "cache"], env={"COLUMNS": "80"}
    )
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (said,) = result.stderr.splitlines()
    assert said.startswith("error: ")
    assert message in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["score", "abc", "--page-size", "x"],
        ["score", "--nonsense"],
        ["info", "--head-dim", "0"],
        ["nonsense"],
    ],
)
def test_what_the_parser_refuses_is_exit_code_2_too(arguments):
    result = typer.testing.CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_traceback_shows_where_an_error_came_from(files):
    arguments = ["score", "a", "--model", str(files / "absent.gguf")]
    for line in (["--traceback", *arguments], [*arguments, "--traceback"]):
        result = typer.testing.CliRunner().invoke(app, line)
        assert isinstance(result.exception, ValueError)


@pytest.mark.parametrize("error", [RuntimeError("no 'cuda'\nand more"), AssertionError()], ids=repr)
def test_no_device_is_one_clear_line(files, monkeypatch, error):
    def fail():
        raise error

    monkeypatch.setattr("jax.devices", fail)
    arguments = ["score", "abc", "--model", str(files / "tiny.gguf")]
    result = typer.testing.CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: JAX has no device on the platforms ")
    assert len(result.stderr.splitlines()) == 1
    result = typer.testing.CliRunner().invoke(app, ["info"])
    assert result.exit_code == 0
    assert "JAX has no device on the platforms " in result.stdout


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("pull >/dev/full", 2, "error: cannot write: No space left on device"),
        ("pull >&-", 1, "standard output is closed"),
        ("score --stdin <&-", 2, "standard input is closed"),
    ],
)
def test_streams_that_are_closed_or_full_are_one_line(line, code, message):
    script = "from kvjax.cli import main; main()"
    done = subprocess.run(
        ["sh", "-c", f'"$0" -c "{script}" {line}', sys.executable],
        capture_output=True,
        text=True,
        cwd=pathlib.Path(__file__).resolve().parents[3],
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines() == [said for said in [done.stderr.strip()] if message in said]


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_faults_of_kvjax_keep_their_traceback(files, monkeypatch, kind):
    def fail(*_, **__):
        raise kind("a fault")

    monkeypatch.setattr("kvjax.decode.score", fail)
    result = typer.testing.CliRunner().invoke(
        app, ["score", "abc", "--model", str(files / "tiny.gguf"), "--cache-dir", str(files)]
    )
    assert type(result.exception) is kind


@pytest.mark.parametrize(("text", "said"), [("nope.txt", True), ("see nope.txt", False)])
def test_a_text_that_looks_like_a_file_is_told_to_be_none(files, monkeypatch, text, said):
    monkeypatch.chdir(files)
    words = ["score", text, "--model", "tiny.gguf", "--cache-dir", "cache"]
    result = typer.testing.CliRunner().invoke(app, words, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert ("a file of that name is read with --file nope.txt" in result.stderr) == said


def test_a_store_is_named_as_it_was_given(files, monkeypatch):
    monkeypatch.chdir(files)
    (files / "strange").mkdir()
    (files / "strange" / "x").write_text("")
    for words, message in (
        (
            ["ls", "--store", "nowhere"],
            "nowhere holds no page store, and who only reads makes none",
        ),
        (["gc", "--store", "strange"], "strange holds other things, such as 'x'"),
        (["gc", "--store", "empty.txt"], "empty.txt is a file; a page store is a folder"),
    ):
        result = typer.testing.CliRunner().invoke(app, ["store", *words])
        assert result.exit_code == 2
        assert message in result.stderr
        assert "file:" not in result.stderr
