"""A stored prefix that is open for reading."""

import dataclasses
import hashlib
import threading
from typing import Any

import numpy as np
from jaxtyping import Integer

from kvjax.storage.blobs import Blobs
from kvjax.storage.errors import Reason, SegmentError, StoreError, UnitError
from kvjax.storage.keys import Identity
from kvjax.storage.layout import Grid, Layout, numpy_dtype
from kvjax.storage.manifest import Manifest, SketchEntry
from kvjax.storage.unit_array import bytes_of_read, open_array, places, read_places, units_at
from kvjax.storage.unit_read import UnitGroup, UnitRead
from kvjax.storage.unit_tags import folder_number, split_tags, tags_of


@dataclasses.dataclass(frozen=True)
class SegmentInfo:
    """What is known of a segment without reading its data."""

    key: str
    identity: Identity
    label: str  # for people: a model or a file
    layout: Layout
    dtype: str  # bfloat16, float16 or float32
    shape: tuple[int, int, int, int, int]  # [L, N, H, P, D] of its keys, and of its values
    tokens: int  # how many, with those after the last page
    bytes: int  # all that it occupies
    sketch_bytes: int  # of which sketches
    created: float  # seconds since 1970
    last_used: float  # seconds since 1970: created, or the last find
    hits: int  # how often find returned it


@dataclasses.dataclass(frozen=True)
class BytesRead:
    """Bytes that came from the store."""

    payload: int = 0  # units, and short gaps between units
    index: int = 0  # shard indexes, and the units' tags and checksums
    sketches: int = 0


class Segment:
    """A stored prefix in full pages: its tokens, its sketches, and its units one by one.

    While it is open, its store in this process does not evict it. Another process may: reads then
    raise `UnitError` with reason "absent". Threads may share it.

    Attributes:
      info: what is known of it.
      tokens: int32, those of the pages, then fewer than a page more; read-only.
      grid: extents and bytes of units and shards.
      folder: where the data is, under data/.
    """

    def __init__(self, blobs: Blobs, manifest: Manifest, info: SegmentInfo) -> None:
        """Checks the array's description and opens it; reads no unit.

        Raises:
          SegmentError: "torn", "checksum" or "io".
        """
        self.info = info
        self.tokens = manifest.tokens
        self.grid: Grid = manifest.grid
        self.folder = manifest.folder
        self.closed = False
        self._blobs = blobs
        self._manifest = manifest
        self._prefix = f"data/{manifest.folder}/"
        self._number = folder_number(manifest.folder)
        self._read = BytesRead()
        self._lock = threading.Lock()
        zarr_json = self._checked("zarr.json", manifest.array_sha256)
        try:
            self._array = open_array(blobs, self._prefix, zarr_json)
        except StoreError as error:
            raise SegmentError(info.key, "foreign", str(error)) from error

    @property
    def unit_shape(self) -> tuple[int, int, int, int, int]:
        """[layers, heads, keys and values, tokens, head_dim] of one unit."""
        return self.grid.unit_shape

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit's keys and values."""
        return self.grid.unit_bytes

    def sketches(self, prefix: str = "") -> dict[str, np.ndarray]:
        """The sketches that were written with the segment, by name; only these are read.

        Args:
          prefix: what the names of those that are wanted begin with.

        Raises:
          SegmentError: one of them is not what was written.
        """
        wanted = (entry for entry in self._manifest.sketches if entry.name.startswith(prefix))
        return {entry.name: self._sketch(entry) for entry in wanted}

    @property
    def sketch_names(self) -> frozenset[str]:
        """Names of the sketches that were written with the segment."""
        return self._manifest.sketch_names

    def sketch(self, name: str) -> np.ndarray:
        """One sketch.

        Raises:
          KeyError: there is none of this name.
          SegmentError: it is not what was written.
        """
        return self._sketch({entry.name: entry for entry in self._manifest.sketches}[name])

    def read(self, units: Integer[np.ndarray, "n 4"]) -> list[UnitRead]:
        """Starts to read units, all in one batch; never blocks.

        Args:
          units: rows (layer group, head group, kind, page). Kind is 0, or 0 for keys and 1 for
            values where the layout splits them. A unit named twice is read once.

        Returns:
          For each row, a future of the unit.

        Raises:
          ValueError: a unit is out of range, or the segment is closed.
        """
        rows = np.asarray(units)
        self._check(rows)
        if not len(rows):
            return []
        where, row = np.unique(places(self.grid, rows), return_inverse=True)
        group = UnitGroup(
            where, start=self._start, checked=self._checked_units, error=self._unit_error
        )
        return [UnitRead(group, place) for place in row.tolist()]

    def bytes_read(self) -> BytesRead:
        """What was read through this object so far, counted when it was asked for."""
        with self._lock:
            return self._read

    def close(self) -> None:
        """Lets the store evict the segment; reads that have started still end."""
        self.closed = True

    def __enter__(self) -> "Segment":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, where: np.ndarray) -> Any:
        """Starts to read the units at places [n]; a future of [n, element]."""
        self._count(where)
        return read_places(self._array, self.grid, where)

    def _checked_units(
        self, stored: np.ndarray, where: np.ndarray
    ) -> tuple[np.ndarray, frozenset[int]]:
        """Units [n, *unit_shape] as they were read, and rows of those that belong elsewhere."""
        units, tags = split_tags(self.grid, stored)
        wrong = (tags != tags_of(self._number, where)).any(axis=-1)
        return units, frozenset(np.flatnonzero(wrong).tolist())

    def _unit_error(self, place: int, reason: Reason, detail: str) -> UnitError:
        layer, head, kind, page = units_at(self.grid, np.array([place]))[0].tolist()
        return UnitError(self.info.key, (layer, head, kind, page), reason, detail)

    def _check(self, units: np.ndarray) -> None:
        if self.closed:
            raise ValueError(f"segment {self.info.key[:12]} is closed; open it again to read")
        if units.ndim != 2 or units.shape[1] != 4 or units.dtype.kind not in "iu":
            raise ValueError(
                f"units have shape {units.shape} and dtype {units.dtype}; give whole numbers "
                "[n, 4]: layer group, head group, kind, page"
            )
        bad = ((units < 0) | (units >= np.array(self.grid.units))).any(axis=1)
        if bad.any():
            raise ValueError(
                f"unit {tuple(units[bad][0].tolist())} is out of range; (layer group, head group, "
                f"kind, page) is below {self.grid.units}"
            )

    def _count(self, where: np.ndarray, sketches: int = 0) -> None:
        payload, index = bytes_of_read(self.grid, where, self._blobs.bridged_gap)
        with self._lock:
            old = self._read
            self._read = BytesRead(
                old.payload + payload, old.index + index, old.sketches + sketches
            )

    def _sketch(self, entry: SketchEntry) -> np.ndarray:
        data = self._checked(f"sketches/{entry.name}", entry.sha256)
        self._count(np.empty(0, np.int64), sketches=len(data))
        dtype = numpy_dtype(entry.dtype)
        if len(data) != entry.bytes:
            detail = f"sketch {entry.name!r} has {len(data)} bytes, not {entry.bytes}"
            raise SegmentError(self.info.key, "torn", detail)
        return np.frombuffer(data, dtype).reshape(entry.shape)

    def _checked(self, name: str, sha256: str) -> bytes:
        try:
            data = self._blobs.read(self._prefix + name).value
        except StoreError as error:
            raise SegmentError(self.info.key, error.reason, str(error)) from error
        if data is None:
            raise SegmentError(self.info.key, "torn", f"{self._prefix}{name} is missing")
        if hashlib.sha256(data).hexdigest() != sha256:
            detail = f"{self._prefix}{name} is not what was written"
            raise SegmentError(self.info.key, "checksum", detail)
        return data
