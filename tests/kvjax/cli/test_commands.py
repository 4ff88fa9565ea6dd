import dataclasses
import importlib
import json
import math
import signal
import types

import numpy as np
import pytest
import typer.testing

import kvjax
from kvjax.cli import app
from tests.kvjax.tiny_gguf import write_gguf

COMMANDS = ("generate", "score", "info", "pull", "demo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def tiny(folder):
    return write_gguf(folder / "tiny.gguf")


@pytest.fixture(scope="module")
def model(tiny, folder):
    return kvjax.load(tiny, dtype="float32", cache_dir=folder / "cache")


@pytest.fixture
def run(tiny, folder, monkeypatch):
    """Runs a command in this process on the tiny model."""

    def invoke(command, *arguments, text=None):
        if command in ("generate", "score"):
            arguments = (*arguments, "--cache-dir", folder / "cache")
            if "--model" not in arguments:
                arguments = (*arguments, "--model", tiny)
            if "--dtype" not in arguments:  # "auto" depends on the processor
                arguments = (*arguments, "--dtype", "float32")
        # Rich cuts its tables to the terminal's width; a test wants them whole.
        return typer.testing.CliRunner().invoke(
            app, [command, *map(str, arguments)], input=text, env={"COLUMNS": "200"}
        )

    return invoke


def whole(result):
    """What a command wrote to stdout, once it is known to have ended well."""
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(run, command):
    said = whole(run(command, "--help"))
    assert "Example: kvjax " + command in said


def test_the_root_lists_the_commands():
    said = whole(typer.testing.CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}))
    assert all(command in said for command in COMMANDS)


def test_the_version_is_said():
    said = whole(typer.testing.CliRunner().invoke(app, ["--version"]))
    assert said == f"kvjax {kvjax.__version__}\n"


def test_the_text_goes_to_stdout_and_the_table_to_stderr(run, model):
    result = run("generate", "abc", "--max-new-tokens", 9, "--verbose")
    expected = kvjax.generate(model, "abc", max_new_tokens=9)
    assert whole(result) == expected.texts[0] + "\n"
    for row in ("prompt tokens", "time to first token", "pages used / total", "cache, float32"):
        assert row in result.stderr
    assert "4 programs" in result.stderr


def test_streaming_and_one_program_say_the_same(run):
    streamed = whole(run("generate", "abc", "-n", 9))
    at_once = run("generate", "abc", "-n", 9, "--no-stream")
    assert whole(at_once) == streamed
    assert "tokens a second" in at_once.stderr


def test_json_is_all_there_is_on_stdout(run, model):
    result = json.loads(whole(run("generate", "abc", "-n", 9, "--json", "--page-size", 8)))
    expected = kvjax.generate(model, "abc", max_new_tokens=9)
    assert result["tokens"] == expected.tokens[0]
    assert result["text"] == expected.texts[0]
    assert result["finish_reason"] == "length"
    assert result["stats"]["page_size"] == 8
    assert result["stats"]["pages_used"] == 2
    assert 0 < result["stats"]["ttft_seconds"] <= result["stats"]["run_seconds"]
    at_once = json.loads(whole(run("generate", "abc", "-n", 9, "--json", "--no-stream")))
    assert (at_once["text"], at_once["stats"]["ttft_seconds"]) == (result["text"], None)
    assert result["stats"]["cache_bytes"]["float32"] % model.spec.bytes_per_page(8) == 0


def test_sampling_follows_the_seed(run):
    arguments = ("generate", "abc", "-n", 12, "--json", "--temperature", 1.5, "--top-k", 50)
    first, same, other = (
        json.loads(whole(run(*arguments, "--seed", seed)))["tokens"] for seed in (1, 1, 2)
    )
    assert first == same
    assert first != other


def test_text_comes_from_a_file_standard_input_and_an_argument_in_this_order(run, folder):
    (folder / "document.txt").write_bytes("\ufefffile\n".encode())
    sources = ("--file", folder / "document.txt", "--stdin", "argument")
    result = run("score", *sources, "--json", text="stdin\n")
    assert json.loads(whole(result))["tokens"] == json.loads(
        whole(run("score", "file\n\nstdin\n\nargument", "--json"))
    )["tokens"]  # fmt: skip


def test_chat_uses_the_models_template(run, model):
    result = run("generate", "hello", "--chat", "--system", "short", "-n", 3, "--json")
    text = "system:short<|end|>user:hello<|end|>"
    assert (
        model.tokenizer.apply_chat_template(
            [{"role": "system", "content": "short"}, {"role": "user", "content": "hello"}]
        )
        == text
    )
    assert json.loads(whole(result))["stats"]["prompt_tokens"] == len(model.tokenizer.encode(text))


def test_stops_are_tokens_by_text_or_id(run, model):
    tokens = json.loads(whole(run("generate", "abc", "-n", 9, "--json")))["tokens"]
    third = tokens[2]
    stopped = json.loads(whole(run("generate", "abc", "-n", 9, "--json", "--stop", third)))
    assert stopped["finish_reason"] == "stop"
    assert stopped["tokens"] == tokens[: tokens.index(third) + 1]
    result = run("generate", "abc", "-n", 2, "--json", "--stop", "ab", "--stop", "<|end|>")
    assert json.loads(whole(result))["tokens"] == tokens[:2]


def test_score_is_the_librarys(run, model, folder):
    text = "a bad abbot"
    found = json.loads(whole(run("score", text, "--json")))
    expected = kvjax.score(model, text)
    assert found["tokens"] == expected.tokens
    assert found["top_tokens"] == expected.top_tokens
    assert found["logprobs"][0] is None
    np.testing.assert_allclose(found["logprobs"][1:], expected.logprobs[1:], rtol=1e-6)
    mean = sum(found["logprobs"][1:]) / (len(found["tokens"]) - 1)
    assert found["perplexity"] == pytest.approx(math.exp(-mean))
    (folder / "ids.json").write_text(json.dumps(expected.tokens))
    by_id = json.loads(whole(run("score", "--tokens", folder / "ids.json", "--json")))
    assert by_id["logprobs"] == found["logprobs"]


@pytest.mark.slow
def test_score_takes_the_cache_options(run):
    text = "a bad abbot " * 6
    pages = {}
    for size in (8, 32):
        found = json.loads(whole(run("score", text, "--json", "--page-size", size)))
        pages[size] = found
    assert pages[8]["perplexity"] == pytest.approx(pages[32]["perplexity"], rel=1e-5)
    assert pages[8]["stats"]["page_size"] == 8
    half = json.loads(whole(run("score", text, "--json", "--cache-dtype", "bfloat16")))
    assert list(half["stats"]["cache_bytes"]) == ["bfloat16"]
    assert half["perplexity"] != pages[8]["perplexity"]


def test_score_shows_every_token_of_a_short_text_and_the_surprising_ones_of_a_long_one(run):
    short = whole(run("score", "bad")).splitlines()
    assert len(short) == 3
    assert short[-1].startswith("perplexity ")
    long = whole(run("score", "abcdefghij " * 10)).splitlines()
    assert long[0].startswith("the 40 most surprising of ")
    assert len(long) == 42


def test_info_tells_devices_versions_and_kernels(run, folder):
    found = json.loads(whole(run("info", "--json", "--cache-dir", folder)))
    assert found["devices"][0]["platform"] == "cpu"
    assert found["versions"]["jax"]
    assert found["models"] == {"smollm2-135m": False, "gemma3-270m": False}
    rows = {(row["operation"], row["implementation"]): row["reason"] for row in found["kernels"]}
    assert rows["paged_attention", "xla"] is None
    assert "it needs a TPU" in rows["ragged_paged_attention", "tpu"]
    said = whole(run("info", "--head-dim", 72))
    assert "head_dim is 72" in said
    assert "--dtype auto is" in said


def test_pull_lists_the_models(run, folder):
    said = whole(run("pull", "--cache-dir", folder))
    assert "smollm2-135m" in said
    assert "Gemma Terms of Use" in said


def test_pull_says_where_a_model_is(run, tiny, folder, monkeypatch):
    rows = importlib.import_module("kvjax.registry").MODELS
    size = tiny.stat().st_size
    here = folder / "pulled"
    (here / "models").mkdir(parents=True)
    (here / "models" / "smollm2-135m.gguf").write_bytes(tiny.read_bytes())
    monkeypatch.setitem(rows, "smollm2-135m", dataclasses.replace(rows["smollm2-135m"], size=size))
    result = run("pull", "smollm2-135m", "--cache-dir", here)
    assert whole(result) == ""
    assert "smollm2-135m is already at" in result.stderr


def test_pull_shows_terms_and_wants_them_accepted(run, folder):
    result = run("pull", "gemma3-270m", "--cache-dir", folder / "terms")
    assert result.exit_code == 2
    assert "Section 4: ADDITIONAL PROVISIONS" in result.stderr
    assert "error: gemma3-270m comes under the terms above: --accept-license" in result.stderr
    assert not (folder / "terms").exists()


def test_pull_asks_on_a_terminal(folder, monkeypatch):
    command = importlib.import_module("kvjax.cli.pull")
    accepted = []

    def pull(name, cache_dir, *, force, accept_license, progress):
        accepted.append(accept_license)
        return importlib.import_module("kvjax.pull").Pulled(folder, already_there=False)

    terminal = types.SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(command, "sys", types.SimpleNamespace(stdin=terminal))
    monkeypatch.setattr(command, "pull_model", pull)
    monkeypatch.setattr(command.typer, "confirm", lambda *_, **__: True)
    command.fetch("gemma3-270m", folder / "asked")
    assert accepted == [True]
    monkeypatch.setattr(command.typer, "confirm", lambda *_, **__: False)
    with pytest.raises(kvjax.KvjaxError, match="its terms were not accepted"):
        command.fetch("gemma3-270m", folder / "asked")
    assert accepted == [True]


def test_a_pull_that_is_told_to_end_ends_as_on_control_c(folder, monkeypatch):
    command = importlib.import_module("kvjax.cli.pull")
    monkeypatch.setattr(command, "pull_model", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        command.fetch("smollm2-135m", folder / "ended")
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
