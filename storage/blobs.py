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
from kvjax.storage.errors import NotAStoreError, fault, late

# What TensorStore raises for a status that is not OK.
STATUS_ERRORS = (ValueError, IndexError, RuntimeError, NotImplementedError, OSError)

# Payload is cached by the tiers, which count what they hold. TensorStore's own cache would keep
# units a second time, uncounted.
_CONTEXT = {"cache_pool": {"total_bytes_limit": 0}, "file_io_concurrency": {"limit": 16}}

_BRIDGED_GAPS = {"file": 255, "memory": 0}  # bytes, by TensorStore's driver

_NOTHING = b"\x02"  # the generation of a value that is not there

_SLOWEST_WRITE = 1_000_000  # bytes a second: a large value may take longer than others


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
      timeout_s: the longest wait for one answer, in seconds.
    """

    def __init__(self, url: str | os.PathLike[str], timeout_s: float = 30.0) -> None:
        """Opens the place; nothing is read or made.

        Args:
          url: a path, or a URL that TensorStore has a key-value store for.
          timeout_s: the longest wait for one answer, in seconds.

        Raises:
          NotAStoreError: TensorStore has no such key-value store.
        """
        self.timeout_s = timeout_s
        text = os.fspath(url)
        try:
            spec: dict[str, Any] = (
                ts.KvStore.Spec(text).to_json()
                if "://" in text
                else {"driver": "file", "path": str(pathlib.Path(text).expanduser().absolute())}
            )
            if spec.get("path", "") and not spec["path"].endswith("/"):
                spec["path"] += "/"
            opening = ts.KvStore.open(spec, context=ts.Context(_CONTEXT))
            self.kvstore: Any = opening.result(timeout=timeout_s)
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
          StoreError: it cannot be read, or not in time.
        """
        return self.ended_read(name, self.start_read(name, known))

    def read_end(self, name: str, size: int) -> bytes:
        """The last bytes of a value; none where there is no such value.

        Args:
          name: the value's.
          size: how many bytes.

        Raises:
          StoreError: it has fewer, or cannot be read in time.
        """
        future = self.kvstore.read(name, byte_range=slice(-size, None))
        return bytes(self._answer(future, f"reading {self.url}{name}").value)

    def start_read(self, name: str, known: bytes | None = None) -> Any:
        """Starts to read a value; `ended_read` takes the future."""
        return self.kvstore.read(name, if_not_equal=known)

    def ended_read(self, name: str, future: Any) -> Blob:
        """What a read brought that was started, as `read`."""
        result = self._answer(future, f"reading {self.url}{name}")
        value = result.value if result.state == "value" else None
        return Blob(value, result.stamp.generation, result.state != "unspecified")

    def write(self, name: str, value: bytes) -> None:
        """Writes a value in one step, over whatever is there.

        Raises:
          StoreError: it cannot be written; what was there is still there. With errno ETIMEDOUT it
            is not known yet which of both is there.
        """
        self._answer(self.kvstore.write(name, value), f"writing {self.url}{name}", len(value))

    def start_write_if(self, name: str, value: bytes, generation: bytes | None) -> Any:
        """Starts to write as `write_if` does; `ended_write_if` takes the future."""
        expected = _NOTHING if generation is None else generation
        future = self.kvstore.write(name, value, if_equal=expected)
        future.force()
        return future

    def ended_write_if(self, name: str, future: Any, size: int = 0) -> bytes | None:
        """The generation that was written; None if another one was there.

        Raises:
          StoreError: it cannot be written.
        """
        stamp = self._answer(future, f"writing {self.url}{name}", size)
        return stamp.generation or None  # empty: the condition did not hold

    def write_if(self, name: str, value: bytes, generation: bytes | None) -> bool:
        """Writes a value if `generation` is there (None: nothing is); says whether it did.

        Raises:
          StoreError: it cannot be written.
        """
        future = self.start_write_if(name, value, generation)
        return self.ended_write_if(name, future, len(value)) is not None

    def delete_if(self, name: str, generation: bytes) -> bool:
        """Removes a value if it is of this generation; says whether it did.

        Raises:
          StoreError: it cannot be removed.
        """
        future = self.kvstore.write(name, None, if_equal=generation)
        return bool(self._answer(future, f"removing {self.url}{name}").generation)

    def names(self, prefix: str = "") -> list[str]:
        """Names of the values whose names start with `prefix`, sorted.

        Raises:
          StoreError: they cannot be listed.
        """
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""
        listing = self.kvstore.list(ts.KvStore.KeyRange(prefix, end))
        found = self._answer(listing, f"listing {self.url}{prefix}")
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
        self._answer(self.kvstore.write(name, None), f"removing {self.url}{name}")

    def delete_folder(self, prefix: str) -> None:
        """Removes every value whose name starts with `prefix` (which ends in "/").

        Raises:
          StoreError: something cannot be removed.
        """
        doing = f"removing {self.url}{prefix}"
        removal = self.kvstore.delete_range(ts.KvStore.KeyRange(prefix, prefix[:-1] + "0"))
        self._answer(removal, doing)
        if self.folder is None:
            return
        try:
            files.remove(self.folder / prefix)  # empty folders, locks of killed writers
        except FileNotFoundError:
            return  # another process removes the same folder
        except OSError as error:
            raise fault(error, doing) from error

    def _answer(self, future: Any, doing: str, size: int = 0) -> Any:
        """What a future of TensorStore gives, if it does so in time.

        Args:
          future: to wait for.
          doing: what it does, as in `fault`.
          size: bytes that are written.
        """
        try:
            return future.result(timeout=self.time_for(size))
        except TimeoutError as error:
            future.cancel()
            raise late(doing, self.time_for(size)) from error
        except STATUS_ERRORS as error:
            raise fault(error, doing) from error

    def time_for(self, size: int) -> float:
        """The longest wait, in seconds, for a write of so many bytes."""
        return self.timeout_s + size / _SLOWEST_WRITE
