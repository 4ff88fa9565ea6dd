"""How a segment's units are encoded in its files: as they are, or without loss in fewer bytes."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np

from kvjax.storage import splitzip
from kvjax.storage.layout import TAG_BYTES, Grid

Codec = Literal["none", "zstd", "blosc", "splitzip"]
"""none: as they are. zstd: level 1. blosc: bits shuffled, then LZ4. Both are TensorStore's and take
any dtype. splitzip: `kvjax.storage.splitzip`, for bfloat16."""

CODECS: tuple[str, ...] = get_args(Codec)

_SETTINGS: dict[str, dict[str, Any]] = {
    "zstd": {"level": 1, "checksum": False},
    "blosc": {"cname": "lz4", "clevel": 5, "shuffle": "bitshuffle", "blocksize": 0},
}
"""Of the codecs that TensorStore has."""

_MOST_GROWTH = 64, 128
"""Bytes, and one more for each so many, by which zstd and blosc may make a unit larger."""


@dataclasses.dataclass(frozen=True)
class UnitCodec:
    """How the units of one folder are encoded.

    Attributes:
      name: the codec.
      codebook: of splitzip, the exponents that have codes.
      room: of splitzip, the escapes that a unit has room for.
    """

    name: str = "none"
    codebook: tuple[int, ...] = ()
    room: int = 0

    def __post_init__(self) -> None:
        """Refuses unknown names, and what is no codebook.

        Raises:
          ValueError: says what is wrong.
        """
        if self.name not in CODECS:
            raise ValueError(f"codec is {self.name!r}; give one of {', '.join(CODECS)}")
        if self.name == "splitzip":
            splitzip.check_codebook(np.array(self.codebook))
            if self.room < 0:
                raise ValueError(f"room is {self.room}; give 0 or more escapes")

    @property
    def varies(self) -> bool:
        """Whether units differ in size."""
        return self.name in _SETTINGS

    @property
    def ours(self) -> bool:
        """Whether units are encoded here, and not by TensorStore if at all."""
        return self.name == "splitzip"

    def chain(self, grid: Grid) -> list[dict[str, Any]]:
        """The codecs that TensorStore applies between a unit's bytes and their checksum."""
        if not self.varies:
            return []
        settings = dict(_SETTINGS[self.name])
        if self.name == "blosc":
            settings["typesize"] = grid.numpy_dtype.itemsize
        return [{"name": self.name, "configuration": settings}]

    def data_type(self, grid: Grid) -> str:
        """TensorStore's dtype of the stored array."""
        return "uint8" if self.ours else grid.dtype

    def elements(self, grid: Grid) -> int:
        """Elements of the stored array for a unit and its tag."""
        if not self.ours:
            return grid.stored_elements
        return splitzip.row_bytes(grid.unit_bytes // 2, self.room) + TAG_BYTES

    def stored_unit_bytes(self, grid: Grid) -> int:
        """Bytes of a unit in its shard, with tag and checksum; the most where units differ."""
        if self.ours:
            return self.elements(grid) + grid.stored_unit_bytes - grid.unit_bytes - TAG_BYTES
        size = grid.stored_unit_bytes
        return size + _MOST_GROWTH[0] + size // _MOST_GROWTH[1] if self.varies else size

    def encode(self, grid: Grid, units: np.ndarray) -> np.ndarray:
        """Bytes [..., b] of units, which lie before their tags; of a codec of ours.

        Args:
          grid: the segment's extents.
          units: bits of the units, uint16 [..., *unit_shape].
        """
        shape = units.shape[: units.ndim - len(grid.unit_shape)]
        numbers = units.reshape(*shape, -1).view(grid.numpy_dtype)
        return splitzip.encode(numbers, np.array(self.codebook, np.uint8), self.room).rows

    def decode(self, grid: Grid, stored: np.ndarray) -> np.ndarray:
        """Units [n, *unit_shape] as TensorStore read them, without their tags.

        Args:
          grid: the segment's extents.
          stored: uint8 [n, b].
        """
        if self.ours:
            codebook = np.array(self.codebook, np.uint8)
            numbers = splitzip.decode(stored, codebook, grid.unit_bytes // 2)
        else:
            numbers = stored.view(grid.numpy_dtype)
        return numbers.reshape(len(stored), *grid.unit_shape)

    def attributes(self) -> dict[str, Any]:
        """What a description of the array says of it; nothing of units that are as they are."""
        if self.name == "none":
            return {}
        told: dict[str, Any] = {"codec": self.name}
        if self.name == "splitzip":
            told |= {"codebook": list(self.codebook), "escapes": self.room}
        return told


def codec_of(attributes: Mapping[str, Any]) -> UnitCodec:
    """The codec that a description of an array names; undoes `UnitCodec.attributes`.

    Raises:
      ValueError: it names none that is known, or mistakes what belongs to it.
    """
    codebook, room = attributes.get("codebook", []), attributes.get("escapes", 0)
    if not isinstance(codebook, list) or any(type(x) is not int for x in (*codebook, room)):
        raise ValueError(f"codebook is {codebook!r} and escapes {room!r}")
    return UnitCodec(str(attributes.get("codec", "none")), tuple(codebook), room)


def fitted(name: str, grid: Grid, keys: np.ndarray, values: np.ndarray) -> UnitCodec:
    """The codec of a segment that is to be written.

    Args:
      name: what was asked for.
      grid: extents of what is written.
      keys: [L, N, H, P, D].
      values: of the same shape and dtype.

    Returns:
      It, fitted to these numbers; "none" in the place of splitzip where that saves nothing.

    Raises:
      ValueError: there is no such codec, or it does not take the dtype.
    """
    if name != "splitzip":
        return UnitCodec(name)
    if grid.dtype != "bfloat16":
        raise ValueError(f"codec is 'splitzip' and k is {grid.dtype}; give bfloat16, or 'zstd'")
    codebook = splitzip.fit_codebook(keys, values)
    counts = np.stack([_escapes(array, codebook) for array in (keys, values)])
    layout = grid.layout
    layer_groups, head_groups, _, pages = grid.units
    units = counts.reshape(2, layer_groups, layout.layers, pages, head_groups, layout.heads)
    escapes = units.sum((2, 5))
    room = (escapes if layout.split_kv else escapes.sum(0)).max()
    codec = UnitCodec(name, tuple(codebook.tolist()), int(room))
    saves = codec.stored_unit_bytes(grid) < grid.stored_unit_bytes
    return codec if saves else UnitCodec()


def _escapes(array: np.ndarray, codebook: np.ndarray) -> np.ndarray:
    """How many numbers of each page of a layer and head have no code: [L, N, H]."""
    return splitzip.count_escapes(array.reshape(*array.shape[:3], -1), codebook)
