"""The file that says that a place is a page store."""

import json

from kvjax.storage.blobs import Blobs
from kvjax.storage.errors import NotAStoreError

_NAME = "store.json"
_MAGIC = "kvjax page store"
_VERSION = 1
_FOLDERS = ("data/", "segments/", "use/")


def check_marker(blobs: Blobs, read_only: bool) -> None:
    """Sees that a place is a page store, or makes it one if it is empty.

    Raises:
      NotAStoreError: it is not, and cannot become one.
      StoreError: it cannot be read or written.
    """
    where = _place(blobs)
    if blobs.folder is not None and blobs.folder.exists() and not blobs.folder.is_dir():
        raise NotAStoreError(f"{where} is a file; a page store is a folder")
    data = blobs.read(_NAME).value
    if data is None:
        _make(blobs, read_only)
        return
    try:
        marker = json.loads(data)
    except (ValueError, RecursionError):
        marker = None
    if not isinstance(marker, dict) or marker.get("magic") != _MAGIC:
        raise NotAStoreError(
            f"{where.rstrip('/')}/{_NAME} is not that of a page store; give another folder, or if "
            f"it was damaged remove it: segments carry checksums of their own"
        )
    if marker.get("version") != _VERSION:
        raise NotAStoreError(
            f"{where} is a page store of version {marker.get('version')!r}; this program reads "
            f"{_VERSION}: give another folder"
        )


def _place(blobs: Blobs) -> str:
    """Where that is, as people write it: a folder's path, or a URL."""
    return blobs.url if blobs.folder is None else str(blobs.folder)


def _make(blobs: Blobs, read_only: bool) -> None:
    if read_only:
        raise NotAStoreError(f"{_place(blobs)} holds no page store, and who only reads makes none")
    strangers = [name for name in blobs.names() if not name.startswith(_FOLDERS)]
    strangers = [name for name in strangers if name != _NAME]  # made by another process just now
    if strangers:
        raise NotAStoreError(
            f"{_place(blobs)} holds other things, such as {strangers[0]!r}; give an empty folder"
        )
    text = json.dumps({"magic": _MAGIC, "version": _VERSION})
    blobs.write(_NAME, text.encode("ascii"))
