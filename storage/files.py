"""Files that are either whole or not there: atomic publishing and checksums."""

import contextlib
import hashlib
import os
import pathlib
import secrets
import shutil
from collections.abc import Callable, Iterator

_BLOCK_BYTES = 1 << 20


@contextlib.contextmanager
def publish(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """A place to write a file or a folder that appears at `path` whole, or not at all.

    Yields a free name beside `path` (the same file system, so that the last step is one rename).
    Write a file there, or make a folder of that name and fill it. When the block ends, what was
    written is flushed to the device and renamed to `path` in one step. If the block raises, Ctrl-C
    included, what was written is removed and `path` is as it was.

    Two writers of the same file may run at once: each renames its own whole file, the last one
    stays. An existing folder is never replaced (no file system does that in one step).

        with publish("model.gguf") as unfinished:
            unfinished.write_bytes(data)

    Args:
      path: where the file or folder is to appear; missing parents are made.

    Raises:
      FileNotFoundError: the block wrote nothing.
      FileExistsError: a folder was written and `path` is already there.
      IsADirectoryError: a file was written and `path` is a folder.
    """
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(8)}.unfinished")
    try:
        yield unfinished
        _flush(unfinished)
        if unfinished.is_dir() and target.exists():
            raise FileExistsError(f"{target} is already there; remove it to write it anew")
        if target.is_dir() and not unfinished.is_dir():
            raise IsADirectoryError(f"{target} is a folder; a file cannot take its place")
        os.replace(unfinished, target)
    finally:
        # After the rename there is nothing under this name, so this only ever removes a failure.
        remove(unfinished)
    _flush_folder(target.parent)


def remove(path: pathlib.Path) -> None:
    """Removes a file or a whole folder; does nothing where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sha256(path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None) -> str:
    """The SHA-256 of a file as 64 hexadecimal digits.

    Args:
      path: the file.
      progress: called with (bytes read, bytes in all), in 1 MiB steps.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    done = 0
    with open(path, "rb", buffering=0) as file:
        total = os.fstat(file.fileno()).st_size
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            done += count
            if progress is not None:
                progress(done, total)
    return digest.hexdigest()


def _flush(path: pathlib.Path) -> None:
    """Makes a file, or a folder with all its files, survive a power cut under its present name."""
    if not path.is_dir():
        _flush_entry(path)
        return
    for folder, _, names in os.walk(path):
        for name in names:
            _flush_entry(pathlib.Path(folder, name))
        _flush_folder(pathlib.Path(folder))


def _flush_entry(path: pathlib.Path) -> None:
    # Windows flushes only what is open for writing; elsewhere a read-only file can be flushed too.
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_folder(path: pathlib.Path) -> None:
    if os.name != "nt":  # Windows does not open folders, and keeps their names by itself
        _flush_entry(path)
