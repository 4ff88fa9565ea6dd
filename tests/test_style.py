"""ruff and mypy have nothing to say. `pre-commit` runs the same before each commit."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def run(*words):
    """Runs one tool of this environment on the repository."""
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=REPOSITORY, capture_output=True, text=True
    )


@pytest.mark.parametrize("check", [["check"], ["format", "--check", "--diff"]], ids=" ".join)
def test_ruff_has_nothing_to_say(check):
    result = run("ruff", *check, "--no-cache")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_mypy_has_nothing_to_say_and_sees_each_file_once(tmp_path):
    """It sees each pillar through kvjax's symlink, and never a second time by its own name."""
    result = run("mypy", "--verbose", f"--cache-dir={tmp_path}")
    assert result.returncode == 0, result.stdout
    seen = re.findall(
        r"Found source: +BuildSource\(path='(.+?\.py)', module='(.+?)'", result.stderr
    )
    assert all(module.split(".")[0] == "kvjax" for _, module in seen)
    files = [os.path.realpath(path) for path, _ in seen]
    assert sorted(files) == sorted(
        str(path)
        for folder in ("kvjax", "models", "pallas_kernels", "storage")
        for path in (REPOSITORY / folder).rglob("*.py")
        if not any(parent.is_symlink() for parent in path.relative_to(REPOSITORY).parents)
    )
