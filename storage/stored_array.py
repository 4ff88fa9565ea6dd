"""The units of one folder under data/: a segment has one, or several in a row."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Int32

from kvjax.storage.blobs import Blobs
from kvjax.storage.errors import Reason, SegmentError, StoreError, UnitError
from kvjax.storage.layout import Grid
from kvjax.storage.unit_array import open_array, places, read_places, units_at
from kvjax.storage.unit_codec import codec_of
from kvjax.storage.unit_read import UnitGroup
from kvjax.storage.unit_sizes import UNIT_SIZES, UnitSizes
from kvjax.storage.unit_tags import folder_number, split_tags, tags_of


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """Where some of a segment's pages lie.

    Attributes:
      folder: under data/.
      pages: how many of the array's first pages are the segment's.
      of: pages that the array has.
      data_bytes: of the units, their index and description, and of the sketches beside them.
      array_sha256: of zarr.json.
    """

    folder: str
    pages: int
    of: int
    data_bytes: int
    array_sha256: str


def checked_blob(blobs: Blobs, key: str, name: str, sha256: str) -> bytes:
    """A small file of a segment, whole.

    Args:
      blobs: the store.
      key: the segment's.
      name: the file's.
      sha256: of what was written.

    Raises:
      SegmentError: "torn", "checksum", or what the store's fault was.
    """
    try:
        data = blobs.read(name).value
    except StoreError as error:
        raise SegmentError(key, error.reason, str(error)) from error
    if data is None:
        raise SegmentError(key, "torn", f"{name} is missing")
    if hashlib.sha256(data).hexdigest() != sha256:
        raise SegmentError(key, "checksum", f"{name} is not what was written")
    return data


class ArrayReads:
    """Reads of a segment's pages from one folder.

    Args:
      blobs: the store.
      key: the segment's.
      stored: the folder.
      grid: the segment's.
      first: the segment's page that is the array's first.
      page_places: int32 [layer groups, head groups, n], where each of these pages lies, if they are
        not in their own order.
      count: told what is read: the units' extents, and places [n] of units.

    Attributes:
      bytes_read: what was read to open it, in bytes, the description apart.

    Raises:
      SegmentError: the array's description is not what was written, or is no such array.
    """

    def __init__(
        self,
        blobs: Blobs,
        key: str,
        stored: StoredArray,
        grid: Grid,
        first: int,
        page_places: Int32[np.ndarray, "G J n"] | None,
        count: Callable[[UnitSizes, np.ndarray], None],
    ) -> None:
        self._key, self._first, self._places, self._count = key, first, page_places, count
        self._grid = dataclasses.replace(grid, pages=stored.of)
        self._number = folder_number(stored.folder)
        self._files = f"{blobs.url}data/{stored.folder}/c/"
        prefix = f"data/{stored.folder}/"
        zarr_json = checked_blob(blobs, key, f"{prefix}zarr.json", stored.array_sha256)
        try:
            self._array = open_array(blobs, prefix, zarr_json)
            attributes = json.loads(zarr_json)["attributes"]
            self._codec = codec_of(attributes)
            sha256 = attributes["sha256"][UNIT_SIZES] if self._codec.varies else None
        except (StoreError, LookupError, TypeError, ValueError) as error:
            raise SegmentError(key, "foreign", f"its description: {error}") from error
        sizes = None
        self.bytes_read = 0
        if sha256 is not None:
            data = checked_blob(blobs, key, f"{prefix}{UNIT_SIZES}", sha256)
            self.bytes_read = len(data)
            sizes = np.frombuffer(data, "<u4")
        self._sizes = UnitSizes(self._grid, self._codec, sizes)

    def read(self, units: np.ndarray) -> tuple[UnitGroup, list[int]]:
        """Starts to read units of the segment's pages that are here, all in one batch.

        Args:
          units: [n, 4], layer group, head group, kind and page of the segment.

        Returns:
          The read, and for each unit its row in it.
        """
        rows = units.copy()
        rows[:, 3] -= self._first
        if self._places is not None:
            rows[:, 3] = self._places[rows[:, 0], rows[:, 1], rows[:, 3]]
        where, row = np.unique(places(self._grid, rows), return_inverse=True)
        group = UnitGroup(where, start=self._start, checked=self._checked, error=self._error)
        return group, row.tolist()

    def _start(self, where: np.ndarray) -> Any:
        """Starts to read the units at places [n]; a future of [n, element]."""
        self._count(self._sizes, where)
        return read_places(self._array, self._grid, where)

    def _checked(self, stored: np.ndarray, where: np.ndarray) -> tuple[np.ndarray, frozenset[int]]:
        """Units [n, *unit_shape] as they were read, and rows of those that belong elsewhere."""
        units, tags = split_tags(stored.view(np.uint8))
        wrong = (tags != tags_of(self._number, where)).any(axis=-1)
        return self._codec.decode(self._grid, units), frozenset(np.flatnonzero(wrong).tolist())

    def _error(self, place: int, reason: Reason, detail: str) -> UnitError:
        layer, head, kind, page = units_at(self._grid, np.array([place]))[0].tolist()
        if self._places is not None:
            page = int(np.flatnonzero(self._places[layer, head] == page)[0])
        unit = (layer, head, kind, self._first + page)
        file = f"{self._files}{layer}/{head}/0/0/0"
        return UnitError(self._key, unit, reason, f"{detail}; {file}")
