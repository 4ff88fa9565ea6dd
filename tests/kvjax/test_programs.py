import pathlib
import subprocess
import sys

import jax

from kvjax import keep_programs

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]

SCRIPT = """
import sys
import jax
import jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
from kvjax import keep_programs
print(keep_programs(sys.argv[1]))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
print(jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((8, 8)))[0, 0])
"""


def run(*arguments):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, arguments)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.splitlines()


def test_programs_are_kept_between_processes(tmp_path):
    folder, result = run(tmp_path)
    assert folder == str(tmp_path / "programs")
    kept = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "programs").glob("*-cache")}
    assert kept
    assert run(tmp_path) == [folder, result]
    again = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "programs").glob("*-cache")}
    assert again == kept


def test_a_cache_that_was_chosen_is_left_alone(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    try:
        assert keep_programs(tmp_path / "ours") == tmp_path / "theirs"
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "theirs")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
