"""Named byte strings in any place that TensorStore can reach by URL.

Every effect of the page store, besides the units themselves, passes through here: whole values
written in one atomic step, read whole, listed and removed.
"""

import contextlib
import dataclasses
import os
import pathlib
import time
from typing import Any

import tensorstore as ts

from kvjax.storage import files
from kvjax.storage.errors import NotAStoreError, fault

# What TensorStore raises for a status that is not OK.
STATUS_ERRORS = (ValueError, IndexError, RuntimeError, NotImplementedError, OSError)

# Payload is cached by the tiers, which count what they hold. TensorStore's own cache would keep
# units a second time, uncounted.
_CONTEXT = {"cache_pool": {"total_bytes_limit": 0}, "file_io_concurrency": {"limit": 16}}

_BRIDGED_GAPS = {"file": 255, "memory": 0}  # bytes, by TensorStore's driver

_NOTHING = b"\x02"  # the generation of a value that is not there


@dataclasses.dataclass(frozen=True)
class Blob:
    """A value as it was read.

    `value` is None where there is none, or where it is still of the generation that was known.
    """

    value: bytes | None
    generation: bytes
    changed: bool


class Blobs:
    """The values under one URL.

    Attributes:
      kvstore: TensorStore's handle.
      url: where they are, with a "/" at the end.
      folder: the same as a path, if it is a folder of this machine.
      bridged_gap: two reads of a value that are up to so many bytes apart become one.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        """Opens the place; nothing is read or made.

        Args:
          url: a path, or a URL that TensorStore has a key-value store for.

        Raises:
          NotAStoreError: TensorStore has no such key-value store.
        """
        text = os.fspath(url)
        try:
            spec: dict[str, Any] = (
                ts.KvStore.Spec(text).to_json()
                if "://" in text
                else {"driver": "file", "path": str(pathlib.Path(text).expanduser().absolute())}
            )
            if spec.get("path", "") and not spec["path"].endswith("/"):
                spec["path"] += "/"
            self.kvstore: Any = ts.KvStore.open(spec, context=ts.Context(_CONTEXT)).result()
            self.url = str(self.kvstore.url)
        except STATUS_ERRORS as error:
            raise NotAStoreError(
                f"url {text!r} is nothing that TensorStore can open ({error}); give a folder, or a "
                "URL such as file:///data/pages, memory://pages/ or s3://bucket/pages/"
            ) from error
        self.folder = pathlib.Path(spec["path"]) if spec["driver"] == "file" else None
        self.bridged_gap = _BRIDGED_GAPS.get(spec["driver"], 4095)

    def read(self, name: str, known: bytes | None = None) -> Blob:
        """A value, unless it is still of the generation `known`.

        Raises:
          StoreError: it cannot be read.
        """
        try:
            result = self.kvstore.read(name, if_not_equal=known).result()
        except STATUS_ERRORS as error:
            raise fault(error, f"reading {self.url}{name}") from error
        value = result.value if result.state == "value" else None
        return Blob(value, result.stamp.generation, result.state != "unspecified")

    def write(self, name: str, value: bytes) -> None:
        """Writes a value in one step, over whatever is there.

        Raises:
          StoreError: it cannot be written; what was there is still there.
        """
        try:
            self.kvstore.write(name, value).result()
        except STATUS_ERRORS as error:
            raise fault(error, f"writing {self.url}{name}") from error

    def start_write(self, name: str, value: bytes) -> Any:
        """Starts to write a value; returns TensorStore's future, whose result nobody has to ask."""
        future = self.kvstore.write(name, value)
        future.force()
        return future

    def write_if(self, name: str, value: bytes, generation: bytes | None) -> bool:
        """Writes a value if `generation` is there (None: nothing is); says whether it did.

        Raises:
          StoreError: it cannot be written.
        """
        expected = _NOTHING if generation is None else generation
        try:
            stamp = self.kvstore.write(name, value, if_equal=expected).result()
        except STATUS_ERRORS as error:
            raise fault(error, f"writing {self.url}{name}") from error
        return bool(stamp.generation)  # empty: the condition did not hold

    def names(self, prefix: str = "") -> list[str]:
        """Names of the values whose names start with `prefix`, sorted.

        Raises:
          StoreError: they cannot be listed.
        """
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""
        try:
            found = self.kvstore.list(ts.KvStore.KeyRange(prefix, end)).result()
        except STATUS_ERRORS as error:
            raise fault(error, f"listing {self.url}{prefix}") from error
        return sorted(name.decode("utf-8", "surrogateescape") for name in found)

    def folders(self, prefix: str) -> list[str]:
        """Names of the folders in the folder `prefix` (which ends in "/"), sorted.

        On this machine that includes folders without a value: a writer that was killed leaves such.

        Raises:
          StoreError: they cannot be listed.
        """
        if self.folder is None:
            return sorted({name[len(prefix) :].partition("/")[0] for name in self.names(prefix)})
        try:
            return sorted(os.listdir(self.folder / prefix))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise fault(error, f"listing {self.url}{prefix}") from error

    def size(self, prefix: str) -> int | None:
        """Bytes of all files under `prefix` (which ends in "/"); None where a store cannot say."""
        if self.folder is None:
            return None
        total = 0
        for where, _, names in os.walk(self.folder / prefix):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                    total += os.stat(os.path.join(where, name)).st_size
        return total

    def remove_stale_locks(self, prefix: str, min_age_s: float) -> int:
        """Removes what writers of this machine left beside values of a folder; returns the bytes.

        TensorStore writes to NAME.__lock and renames it. A writer that was killed leaves that file,
        which no listing shows; one that runs holds it only for a moment.

        Args:
          prefix: the folder, "" or ending in "/".
          min_age_s: seconds since the file was last written.
        """
        freed = 0
        if self.folder is None:
            return freed
        for path in (self.folder / prefix).glob("*.__lock"):
            with contextlib.suppress(FileNotFoundError):  # its writer has just ended
                found = path.stat()
                if time.time() - found.st_mtime >= min_age_s:
                    path.unlink()
                    freed += found.st_size
        return freed

    def delete(self, name: str) -> None:
        """Removes one value; does nothing where there is none.

        Raises:
          StoreError: it cannot be removed.
        """
        try:
            self.kvstore.write(name, None).result()
        except STATUS_ERRORS as error:
            raise fault(error, f"removing {self.url}{name}") from error

    def delete_folder(self, prefix: str) -> None:
        """Removes every value whose name starts with `prefix` (which ends in "/").

        Raises:
          StoreError: something cannot be removed.
        """
        try:
            self.kvstore.delete_range(ts.KvStore.KeyRange(prefix, prefix[:-1] + "0")).result()
            if self.folder is not None:
                files.remove(self.folder / prefix)  # empty folders, locks of killed writers
        except FileNotFoundError:
            return  # another process removes the same folder
        except STATUS_ERRORS as error:
            raise fault(error, f"removing {self.url}{prefix}") from error
