"""Shared fixtures: strict types and numerics, and data that lives outside the repository."""

import pathlib
import signal
import sys
import typing

import beartype
import jax
import jaxtyping
import pytest

from tests.first_cases import first_cases

# Tests interrupt child processes. A shell that runs the tests in the background has SIGINT ignored,
# and a child would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


# An int may stand for a float, as in any Python code (PEP 484).
check_types = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


def check_after_the_call(function):
    """Checks a call's arguments and result, but only when the function has returned.

    The library's own errors come first this way, and what it let pass must be what it says it
    takes. jaxtyping decorates two functions for each one: the one whose annotated result is `Any`
    would check arguments before the call. Dataclasses that are pytrees are also made of
    placeholders, so what they are made of is not checked.
    """
    before_the_call = function.__annotations__.get("return") is typing.Any
    return function if before_the_call or function.__name__ == "__init__" else check_types(function)


jaxtyping.install_import_hook("kvjax", f"sys.modules[{__name__!r}].check_after_the_call")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    parser.addoption(
        "--shared",
        type=pathlib.Path,
        default=REPOSITORY.parent / "shared",
        help="folder with reference logits of real models; tests that need it skip without it",
    )
    parser.addoption(
        "--models",
        type=pathlib.Path,
        default=REPOSITORY.parent / "models",
        help="folder with GGUF files of larger models; tests that need them skip without it",
    )
    parser.addoption(
        "--first-cases",
        action="store_true",
        help="of a parametrised test only its first case; of kernels' tests every case",
    )


def pytest_configure(config):
    """Compiled programs are kept with what pytest keeps; `pytest --cache-clear` removes them.

    Compilation is what most tests wait for, and many compile what others have compiled.
    """
    kept = getattr(config, "cache", None)  # there is none with -p no:cacheprovider
    if kept is not None:
        jax.config.update("jax_compilation_cache_dir", str(kept.mkdir("compiled-programs")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.hookimpl(trylast=True)  # after -m, so that of what it leaves a first case is left
def pytest_collection_modifyitems(config, items):
    """Leave out what `--first-cases` does not want.

    Cases of kernels are backends and dtypes, whose compilation is what JAX's versions differ in.
    """
    if not config.getoption("--first-cases"):
        return
    wanted, others = first_cases(items, REPOSITORY / "tests/pallas_kernels")
    config.hook.pytest_deselected(items=others)
    items[:] = wanted


@pytest.fixture(autouse=True)
def one_compilation_cache():
    """A test that chooses another cache of compiled programs would pass it on to the others."""
    setting = "jax_compilation_cache_dir"
    before = getattr(jax.config, setting)
    yield
    after = getattr(jax.config, setting)
    jax.config.update(setting, before)
    assert after == before, f"the test left {setting} at {after!r}"


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_are_let_go():
    """What a module compiled is of no use to the next, and thousands of programs fill memory."""
    yield
    programs = sys.modules.get("kvjax.decode.program")
    if programs is not None:
        programs._compile.cache_clear()
    jax.clear_caches()


@pytest.fixture(scope="session")
def shared(request):
    """The folder of reference data, or a skip that says what is missing."""
    folder = request.config.getoption("--shared")
    if not (folder / "reference").is_dir():
        pytest.skip(f"no reference data at {folder}: give its place with --shared DIR")
    return folder


@pytest.fixture(scope="session")
def gguf_file(request):
    """A function from a model's name to its GGUF file; skips if the file is nowhere.

    It is looked for in the folder of `--models`, then where `kvjax pull` puts it.
    """
    from kvjax.registry import MODELS, model_path

    folder = request.config.getoption("--models")
    names = {
        "smollm2-135m": "smollm2_135m.gguf",
        "gemma3-270m": "gemma3_270m.gguf",
        "qwen2.5-coder-0.5b": "qwen2.5_coder_0.5b.gguf",
    }

    def find(name):
        places = [folder / names[name], *([model_path(name)] if name in MODELS else [])]
        for path in places:
            if path.is_file():
                return path
        pytest.skip(f"no {names[name]} in {folder}: give the folder with --models DIR")

    return find
