"""Whole processes on the real SmolLM2: what a user types, and what comes out."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]
START = "import jax; jax.config.update('jax_platforms', 'cpu'); from kvjax.cli import main; main()"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache(gguf_file, tmp_path_factory):
    """A cache folder in which `kvjax pull smollm2-135m` seems to have been run."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "models").mkdir()
    (folder / "models" / "smollm2-135m.gguf").symlink_to(gguf_file("smollm2-135m"))
    return folder


def command(*arguments):
    return [sys.executable, "-c", START, *map(str, arguments)]


@pytest.fixture(scope="module")
def run(cache):
    def start(*arguments, **options):
        return subprocess.run(
            command(*arguments, "--cache-dir", cache, "--dtype", "float32"),
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=900,
            **options,
        )

    return start


def test_demo_answers_its_question_rightly_twice(run, tmp_path):
    result = run("demo", "--json", "--store", tmp_path)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["cold"]["text"] == "The loan completed in Holland was 3,000,000 florins."
    for answer in (found["cold"], found["warm"]):
        assert "3,000,000 florins." in answer["text"]
        assert answer["finish_reason"] == "stop"
        assert answer["stats"]["prompt_tokens"] == 1621
    assert found["cold"]["stats"]["pages_used"] == -(-(1621 + 19) // 16)
    assert found["cold"]["stats"]["prefix"] is None
    prefix = found["warm"]["stats"]["prefix"]
    assert prefix["pages_chosen"] == prefix["pages"] // 4
    assert prefix["bytes_read"] - prefix["bytes_wasted"] < 1.02 * prefix["bytes_used"]


def test_score_equals_the_reference(run, shared, tmp_path):
    reference = np.load(shared / "reference" / "smollm2_135m.hf_fp32.npz")
    (tmp_path / "ids.json").write_text(json.dumps(reference["code/ids"].tolist()))
    result = run("score", "--tokens", tmp_path / "ids.json", "--json")
    assert result.returncode == 0, result.stderr
    found = np.asarray(json.loads(result.stdout)["logprobs"][1:])
    errors = np.abs(found - reference["code/prompt_logprob"])
    assert errors.mean() < 1e-3
    assert errors.max() < 2e-2


def test_generate_reads_a_pipe_and_writes_plain_text_to_a_pipe(run):
    result = run("generate", "--stdin", "-n", 5, input="The capital of France is")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(" Paris")
    assert "\x1b" not in result.stdout + result.stderr  # no colours, no bars: nobody is looking
    assert "tokens a second" in result.stderr


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for a child process")
def test_control_c_ends_cleanly_with_130(cache):
    arguments = ("generate", "Whales are", "-n", 4000, "--cache-dir", cache, "--dtype", "float32")
    with subprocess.Popen(
        command(*arguments),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=0,
    ) as process:
        assert process.stdout.read(1)  # it is generating
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "error: stopped"
    assert "Traceback" not in errors
    assert not [path for path in cache.rglob("*") if "unfinished" in path.name]
