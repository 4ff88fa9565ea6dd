"""What users install: one top-level package that holds everything, from a wheel or editable."""

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
PARTS = ("kvjax", "models", "pallas_kernels", "storage")

pytestmark = pytest.mark.slow


def pip(*words):
    """Runs pip, which must succeed."""
    result = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *words],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The repository's sources, symlinks kept, in a place that a build may fill with its own."""
    copy = tmp_path_factory.mktemp("sources")
    for name in PARTS:
        shutil.copytree(
            REPOSITORY / name,
            copy / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(sources, tmp_path_factory):
    """The names in the wheel that `pip install .` builds, and the wheel's path."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(sources))
    (path,) = folder.glob("*.whl")
    return path


def names_in(wheel):
    """Names of the wheel's files without what pip writes about them."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def installed_name(path):
    """Where a source file stands in site-packages: pillars under kvjax."""
    name = path.as_posix()
    return name if name.startswith("kvjax/") else f"kvjax/{name}"


def test_a_wheel_holds_everything_under_one_name(wheel, sources):
    wanted = {
        installed_name(path.relative_to(sources))
        for part in PARTS
        for path in (sources / part).rglob("*")
        if path.is_file()
    }
    assert {"kvjax/py.typed", "kvjax/models/__init__.py", "kvjax/storage/__init__.py"} <= wanted
    assert any(name.startswith("kvjax/data/") for name in wanted)
    assert names_in(wheel) == wanted


def test_a_wheel_carries_its_licence_and_command(wheel):
    with zipfile.ZipFile(wheel) as archive:
        notes = {
            name.split(".dist-info/")[1]: name for name in archive.namelist() if "dist-" in name
        }
        assert "licenses/LICENSE" in notes
        assert "kvjax = kvjax.cli:main" in archive.read(notes["entry_points.txt"]).decode()


IMPORT_ALL = """
import importlib, pathlib, pkgutil, sys
import kvjax
for module in pkgutil.walk_packages(kvjax.__path__, "kvjax."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert not {"models", "pallas_kernels", "storage"} & set(sys.modules)
print(pathlib.Path(kvjax.__file__).resolve())
"""


def import_all(site):
    """Imports every module of kvjax as it is installed in `site`; returns where it lies."""
    result = subprocess.run(
        [sys.executable, "-c", f"import site; site.addsitedir({str(site)!r})\n{IMPORT_ALL}"],
        cwd=site,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(site), "JAX_PLATFORMS": "cpu"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return pathlib.Path(result.stdout.strip())


def test_a_wheel_imports(wheel, tmp_path):
    pip("install", "--no-deps", "--target", str(tmp_path), str(wheel))
    assert {path.name for path in tmp_path.iterdir() if path.suffix != ".dist-info"} <= {
        "kvjax",
        "bin",
    }
    assert import_all(tmp_path) == tmp_path / "kvjax" / "__init__.py"


def test_an_editable_install_imports(sources, tmp_path):
    pip("install", "--no-deps", "--target", str(tmp_path), "--editable", str(sources))
    assert import_all(tmp_path) == sources / "kvjax" / "__init__.py"
