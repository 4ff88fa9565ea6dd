"""BUILD names what is there: every folder of the house, every test file, and nothing else."""

import ast
import pathlib

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
LIBRARIES = {"benchmarks", "kvjax", "models", "pallas_kernels", "storage", "tests"}


def lists(build):
    """BUILD's top-level lists of strings by name, and the names of the targets written out."""
    named, targets = {}, set()
    for statement in ast.parse(build).body:
        if isinstance(statement, ast.Assign):
            named[statement.targets[0].id] = ast.literal_eval(statement.value)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            names = [k.value for k in statement.value.keywords if k.arg == "name"]
            targets.update(ast.literal_eval(name) for name in names)
    return named, targets


def build_faults(root):
    """What BUILD names and is not there, and what is there and BUILD does not name."""
    named, targets = lists((root / "BUILD").read_text(encoding="utf-8"))
    pillars = {link.name for link in (root / "kvjax").iterdir() if link.is_symlink()}
    if set(named["PILLARS"]) != pillars:
        yield f"PILLARS must be {sorted(pillars)}, is {named['PILLARS']}"
    if targets | pillars != LIBRARIES:
        yield f"there must be one py_library for each of {sorted(LIBRARIES)}"
    written, there = named["TESTS"], {str(p.relative_to(root)) for p in test_files(root)}
    yield from (f"add {name} to TESTS" for name in sorted(there - set(written)))
    yield from (f"{name} is not there: take it out of TESTS" for name in set(written) - there)
    if written != sorted(set(written)):
        yield "sort TESTS, each name once"


def test_files(root):
    """Every file that pytest collects."""
    return [*(root / "tests").rglob("test_*.py"), *(root / "tests").rglob("*_test.py")]


test_files.__test__ = False


def test_build_names_what_is_there():
    faults = list(build_faults(REPOSITORY))
    assert not faults, "\n" + "\n".join(faults)


def test_tests_mirror_the_folders():
    """tests/models/test_llama.py tests what is in models; files at the top test the whole."""
    folders = {
        folder.relative_to(REPOSITORY / "tests")
        for folder in (path.parent for path in test_files(REPOSITORY))
    }
    missing = [folder for folder in sorted(folders) if not (REPOSITORY / folder).is_dir()]
    assert missing == []


@pytest.fixture
def small_repository(tmp_path):
    """A repository that its BUILD describes rightly: this one's BUILD, one test file."""
    (tmp_path / "kvjax").mkdir()
    for pillar in ("models", "pallas_kernels", "storage"):
        (tmp_path / "kvjax" / pillar).symlink_to(f"../{pillar}")
    build = (REPOSITORY / "BUILD").read_text(encoding="utf-8")
    start, end = build.index("TESTS = ["), build.index("]\n", build.index("TESTS = ["))
    build = f'{build[:start]}TESTS = [\n    "tests/test_one.py",\n{build[end:]}'
    (tmp_path / "BUILD").write_text(build)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").touch()
    return tmp_path


def test_a_test_file_that_build_does_not_name_is_found(small_repository):
    assert list(build_faults(small_repository)) == []
    (small_repository / "tests" / "test_two.py").touch()
    assert list(build_faults(small_repository)) == ["add tests/test_two.py to TESTS"]


def test_a_test_file_that_is_gone_is_found(small_repository):
    (small_repository / "tests" / "test_one.py").unlink()
    (fault,) = build_faults(small_repository)
    assert fault.startswith("tests/test_one.py is not there")


def test_a_pillar_that_build_does_not_name_is_found(small_repository):
    (small_repository / "kvjax" / "attic").symlink_to("../attic")
    assert any(fault.startswith("PILLARS must be") for fault in build_faults(small_repository))
