"""A stored prefix that is open for reading."""

import dataclasses
import threading

import numpy as np
from jaxtyping import Integer

from kvjax.storage.blobs import Blobs
from kvjax.storage.errors import SegmentError
from kvjax.storage.keys import Identity
from kvjax.storage.layout import Grid, Layout, numpy_dtype
from kvjax.storage.manifest import Manifest, SketchEntry
from kvjax.storage.page_order import PAGE_PLACES, are_places
from kvjax.storage.prefix_index import Entry
from kvjax.storage.stored_array import ArrayReads, checked_blob
from kvjax.storage.unit_read import UnitRead
from kvjax.storage.unit_sizes import UnitSizes
from kvjax.storage.usage import Use


@dataclasses.dataclass(frozen=True)
class SegmentInfo:
    """What is known of a segment without reading its data."""

    key: str
    identity: Identity
    label: str  # for people: a model or a file
    layout: Layout
    codec: str  # how its own units are encoded, see `unit_codec`
    dtype: str  # bfloat16, float16 or float32; uint8 of pages in a format
    shape: tuple[int, int, int, int, int]  # [L, N, H, P, D] of its keys, and of its values
    tokens: int  # how many, with those after the last page
    bytes: int  # all that it occupies, but for pages that it shares
    sketch_bytes: int  # of which sketches
    created: float  # seconds since 1970
    last_used: float  # seconds since 1970: created, or the last find
    hits: int  # how often find returned it


def info_of(entry: Entry, use: Use) -> SegmentInfo:
    """What is known of a published segment.

    Args:
      entry: the segment.
      use: of it.
    """
    manifest, grid = entry.manifest, entry.manifest.grid
    return SegmentInfo(
        key=manifest.key,
        identity=manifest.identity,
        label=manifest.label,
        layout=grid.layout,
        codec=manifest.codec,
        dtype=grid.dtype,
        shape=(grid.layers, grid.pages, grid.heads, grid.layout.page_size, grid.head_dim),
        tokens=len(manifest.tokens),
        bytes=entry.bytes,
        sketch_bytes=sum(sketch.bytes for sketch in manifest.sketches),
        created=manifest.created,
        last_used=max(manifest.created, use.last_used),
        hits=use.hits,
    )


@dataclasses.dataclass(frozen=True)
class BytesRead:
    """What came from the store, in bytes unless another unit is named."""

    payload: int = 0  # units as they are stored, and short gaps between units
    index: int = 0  # shard indexes, and the units' tags, checksums and sizes
    sketches: int = 0
    units: int = 0  # that were asked for
    requests: int = 0  # pieces of files that were read for units: neighbours come together

    def __add__(self, other: "BytesRead") -> "BytesRead":
        """Both."""
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return BytesRead(*(a + b for a, b in zip(mine, theirs, strict=True)))


class _Counter:
    """What was read through one segment; it does not refer to it, so that nothing keeps that open.

    Attributes:
      read: so far.
    """

    def __init__(self, bridged_gap: int) -> None:
        self.read = BytesRead()
        self._bridged_gap = bridged_gap
        self._lock = threading.Lock()

    def count(self, sizes: UnitSizes, where: np.ndarray) -> None:
        """Units at places [n] of an array with these extents are read."""
        payload, index = sizes.bytes_of_read(where, self._bridged_gap)
        requests = sizes.requests_of_read(where, self._bridged_gap)
        self.add(BytesRead(payload, index, 0, len(where), requests))

    def add(self, more: BytesRead) -> None:
        """Counts what was read."""
        with self._lock:
            self.read += more


class Segment:
    """A stored prefix in full pages: its tokens, its sketches, and its units one by one.

    While it is open, its store in this process does not evict it. Another process may: reads then
    raise `UnitError` with reason "absent". Threads may share it.

    Attributes:
      info: what is known of it.
      tokens: int32, those of the pages, then fewer than a page more; read-only.
      grid: extents and bytes of units and shards.
      folders: where the data is, under data/.
      arrays: which pages lie in which folder.
      page_places: int32 [layer groups, head groups, N], where each page lies in its files, if they
        are not in their own order.
    """

    def __init__(self, blobs: Blobs, manifest: Manifest, info: SegmentInfo) -> None:
        """Checks the array's description and opens it; reads no unit, only the pages' places.

        Raises:
          SegmentError: "torn", "checksum", "foreign" or "io".
        """
        self.info = info
        self.tokens = manifest.tokens
        self.grid: Grid = manifest.grid
        self.folders = frozenset(manifest.folders)
        self.arrays = manifest.arrays
        self.closed = False
        self._blobs = blobs
        self._manifest = manifest
        self._counter = _Counter(blobs.bridged_gap)
        self.page_places: np.ndarray | None = None
        if PAGE_PLACES in self.sketch_names:
            self.page_places = self.sketch(PAGE_PLACES)
            if not are_places(self.page_places, self.grid, self.arrays):
                detail = f"its array {PAGE_PLACES!r} does not give every page a place"
                raise SegmentError(info.key, "foreign", detail)
        pages = [array.pages for array in self.arrays]
        self._firsts = np.cumsum([0, *pages[:-1]])
        self._reads = [
            ArrayReads(
                blobs,
                info.key,
                array,
                self.grid,
                first,
                self._places_in(first, array.pages),
                self._counter.count,
            )
            for array, first in zip(self.arrays, self._firsts.tolist(), strict=True)
        ]
        self._counter.add(BytesRead(index=sum(reads.bytes_read for reads in self._reads)))

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
        reads: dict[int, UnitRead] = {}
        array = np.searchsorted(self._firsts, rows[:, 3], side="right") - 1
        for number in np.unique(array).tolist():
            at = np.flatnonzero(array == number)
            group, row = self._reads[number].read(rows[at])
            reads.update((i, UnitRead(group, r)) for i, r in zip(at.tolist(), row, strict=True))
        return [reads[i] for i in range(len(rows))]

    def bytes_read(self) -> BytesRead:
        """What was read through this object so far, counted when it was asked for."""
        return self._counter.read

    def close(self) -> None:
        """Lets the store evict the segment; reads that have started still end."""
        self.closed = True

    def __enter__(self) -> "Segment":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _places_in(self, first: int, pages: int) -> np.ndarray | None:
        """Where pages lie that follow one another in one folder."""
        places = self.page_places
        return None if places is None else places[:, :, first : first + pages]

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

    def _sketch(self, entry: SketchEntry) -> np.ndarray:
        name = f"data/{self._manifest.folder}/sketches/{entry.name}"
        data = checked_blob(self._blobs, self.info.key, name, entry.sha256)
        self._counter.add(BytesRead(sketches=len(data)))
        dtype = numpy_dtype(entry.dtype)
        if len(data) != entry.bytes:
            detail = f"sketch {entry.name!r} has {len(data)} bytes, not {entry.bytes}"
            raise SegmentError(self.info.key, "torn", detail)
        return np.frombuffer(data, dtype).reshape(entry.shape)
