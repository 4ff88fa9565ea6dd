"""How a segment's keys and values are cut into units, the pieces that are read one at a time."""

import dataclasses
import math

import numpy as np
import tensorstore as ts

DTYPES = ("bfloat16", "float16", "float32", "uint8")
CHECKSUM_BYTES = 4  # crc32c, after each unit and after each shard's index
TAG_BYTES = 16  # behind each unit, under its checksum: which unit it is
INDEX_ENTRY_BYTES = 16  # offset and length of one unit in its shard


@dataclasses.dataclass(frozen=True)
class Layout:
    """How much one read brings: one page of a group of layers and a group of KV heads.

    What is always chosen together belongs in one unit. A reader that chooses pages once for a
    period of four layers wants layers=4 and all heads; one that chooses for each layer and head
    wants 1 and 1.
    """

    page_size: int = 16  # tokens in a page
    layers: int = 1  # layers in a unit; divides the model's
    heads: int = 1  # KV heads in a unit; divides the model's
    split_kv: bool = False  # keys and values in units of their own

    def __post_init__(self) -> None:
        """Refuses sizes below one."""
        for name in ("page_size", "layers", "heads"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"Layout.{name} is {value!r}; give a whole number from 1 up")

    def namespace(self, grid: "Grid") -> str:
        """The part of a stored segment's key that its physical form decides."""
        return (
            f"units v2; page {self.page_size}; layers {self.layers} of {grid.layers}; "
            f"heads {self.heads} of {grid.heads}; split {int(self.split_kv)}; "
            f"head_dim {grid.head_dim}; dtype {grid.dtype}"
        )


@dataclasses.dataclass(frozen=True)
class Grid:
    """A segment's extents and what follows from them: units, shards and their bytes.

    A shard is one file: the units of all pages of one group of layers and heads, page by page,
    then an index with the place of each, then the index's checksum.
    """

    layout: Layout
    layers: int  # L, all layers of the model
    pages: int  # N, full pages of the prefix
    heads: int  # H, KV heads
    head_dim: int  # D
    dtype: str  # one of DTYPES

    def __post_init__(self) -> None:
        """Refuses empty arrays, unknown dtypes, and groups that do not divide."""
        for name in ("layers", "pages", "heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a segment has at least 1")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype} cannot be stored; allowed: {', '.join(DTYPES)}")
        for name in ("layers", "heads"):
            whole, group = getattr(self, name), getattr(self.layout, name)
            if whole % group:
                divisors = [n for n in range(1, whole + 1) if whole % n == 0]
                raise ValueError(
                    f"Layout.{name} is {group}, which does not divide the model's {whole} {name}; "
                    f"give one of {divisors}"
                )

    @property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        """The dtype of the stored keys and values."""
        return numpy_dtype(self.dtype)

    @property
    def units(self) -> tuple[int, int, int, int]:
        """How many layer groups, head groups, kinds and pages there are, in a unit name's order."""
        layout = self.layout
        kinds = 2 if layout.split_kv else 1
        return self.layers // layout.layers, self.heads // layout.heads, kinds, self.pages

    @property
    def unit_shape(self) -> tuple[int, int, int, int, int]:
        """[layers, heads, keys and values, tokens, head_dim] of one unit."""
        layout = self.layout
        kinds = 1 if layout.split_kv else 2
        return layout.layers, layout.heads, kinds, layout.page_size, self.head_dim

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit's keys and values."""
        return math.prod(self.unit_shape) * self.numpy_dtype.itemsize

    @property
    def stored_unit_bytes(self) -> int:
        """Bytes of one unit in its shard: the unit, its tag and its checksum."""
        return self.unit_bytes + TAG_BYTES + CHECKSUM_BYTES

    @property
    def stored_elements(self) -> int:
        """Numbers of the stored dtype that a unit and its tag take up."""
        return (self.unit_bytes + TAG_BYTES) // self.numpy_dtype.itemsize

    @property
    def index_bytes(self) -> int:
        """Bytes of one shard's index, which is read whole."""
        _, _, kinds, pages = self.units
        return kinds * pages * INDEX_ENTRY_BYTES + CHECKSUM_BYTES

    @property
    def shards(self) -> int:
        """How many shards there are."""
        layer_groups, head_groups, _, _ = self.units
        return layer_groups * head_groups


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """NumPy's dtype of a TensorStore dtype, bfloat16 and the like included."""
    result: np.dtype[np.generic] = ts.dtype(name).numpy_dtype
    return result
