"""Where units lie in their shards, and what TensorStore reads from files for some of them."""

import numpy as np
from jaxtyping import UInt32

from kvjax.storage.blobs import Blobs
from kvjax.storage.errors import StoreError
from kvjax.storage.layout import CHECKSUM_BYTES, INDEX_ENTRY_BYTES, TAG_BYTES, Grid
from kvjax.storage.unit_codec import UnitCodec

UNIT_SIZES = "unit-sizes"
"""Name of the file beside units that differ in size: uint32, one a unit in the files' order."""


class UnitSizes:
    """The extents of an array's units in its shards.

    Args:
      grid: the array's.
      codec: of its units.
      sizes: bytes of each unit in the order of the files, tag and checksum included; None if all
        have the same.
    """

    def __init__(
        self, grid: Grid, codec: UnitCodec, sizes: UInt32[np.ndarray, " units"] | None = None
    ) -> None:
        self._grid = grid
        _, _, kinds, pages = grid.units
        self._of_shard = kinds * pages
        self._size = codec.stored_unit_bytes(grid)
        self._ends: np.ndarray | None = None
        # A tag is compressed together with its unit, or follows it as it is.
        self._beside = CHECKSUM_BYTES + (0 if codec.varies else TAG_BYTES)
        if sizes is not None:
            shards = sizes.reshape(grid.shards, self._of_shard)
            self._ends = np.cumsum(shards, axis=1, dtype=np.int64)

    @property
    def array_bytes(self) -> int:
        """Bytes of all shards; the most where units differ and their sizes are not known."""
        units = self._of_shard * self._grid.shards * self._size
        if self._ends is not None:
            units = int(self._ends[:, -1].sum())
        return units + self._grid.shards * self._grid.index_bytes

    def bytes_of_read(self, where: np.ndarray, bridged_gap: int) -> tuple[int, int]:
        """What TensorStore reads from files for one read of units: (payload, index) bytes.

        The index of each shard that is touched is read once, whole. Units are read with their tags
        and checksums, which count as index: payload is keys and values as they are stored, and
        gaps.

        Args:
          where: places [n], ascending, no two equal.
          bridged_gap: gaps between units up to so many bytes are read too.
        """
        shard, starts, ends = self._extents(where)
        gaps = starts[1:] - ends[:-1]
        beside = len(where) * self._beside
        payload = int((ends - starts).sum()) - beside
        payload += int(gaps[(np.diff(shard) == 0) & (gaps <= bridged_gap)].sum())
        touched = 1 + int(np.count_nonzero(np.diff(shard))) if len(where) else 0
        return payload, touched * self._grid.index_bytes + beside

    def requests_of_read(self, where: np.ndarray, bridged_gap: int) -> int:
        """How many pieces of files TensorStore reads for units, their shards' indexes apart.

        Args:
          where: as `bytes_of_read` takes it.
          bridged_gap: as `bytes_of_read` takes it.
        """
        shard, starts, ends = self._extents(where)
        apart = (np.diff(shard) > 0) | (starts[1:] - ends[:-1] > bridged_gap)
        return int(np.count_nonzero(apart)) + min(len(where), 1)

    def _extents(self, where: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Shard of each unit, and where in it the unit begins and ends."""
        shard, unit = np.divmod(where, self._of_shard)
        if self._ends is None:
            return shard, unit * self._size, (unit + 1) * self._size
        starts = np.where(unit > 0, self._ends[shard, unit - 1], 0)
        return shard, starts, self._ends[shard, unit]


def written_sizes(blobs: Blobs, prefix: str, grid: Grid) -> UInt32[np.ndarray, " units"]:
    """Bytes of each unit of an array that was just written, from its shards' indexes.

    Args:
      blobs: the store.
      prefix: of the array's files.
      grid: the array's.

    Raises:
      StoreError: an index cannot be read, or is none.
    """
    layer_groups, head_groups, _, _ = grid.units
    names = [f"{prefix}c/{x}/{y}/0/0/0" for x in range(layer_groups) for y in range(head_groups)]
    entries = grid.index_bytes - CHECKSUM_BYTES
    found = []
    for name in names:
        index = blobs.read_end(name, grid.index_bytes)
        if len(index) != grid.index_bytes:
            raise StoreError(f"reading {blobs.url}{name}: it has no index")
        rows = np.frombuffer(index[:entries], "<u8").reshape(-1, INDEX_ENTRY_BYTES // 8)
        found.append(rows[:, 1].astype(np.uint32))
    return np.concatenate(found)
