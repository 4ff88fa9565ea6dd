"""A pool whose pages hold codes of a few bits with scales, read wherever a plain pool is read."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt8, UInt16

from kvjax.pallas_kernels.code_levels import FLOAT8, code_levels, factor_values
from kvjax.pallas_kernels.packed_bits import PLANES, unpack
from kvjax.pallas_kernels.page_rotation import rotated_pages

STORED = ("planes", "scale", "middle", "unit", "outlier_at", "outlier_value", "position")
"""Fields that grow with the pool, where they are there at all."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedPages:
    """N pages of P tokens of Hkv heads, D elements each, in `bits` bits an element.

    An element is `level(code) * scale + middle`. `level` is the code itself where codes are int8 or
    float8, its entry of `levels` where there are any, and otherwise `code - centre`. Scale and
    middle are shared by groups of Gt = P / Pt tokens and Gc = D / Dc channels; an axis of 1 in
    place of N or Hkv shares them with all pages or heads. It has the `shape` and `ndim` of the
    array it stands for, and goes where a pool of keys or values goes.

    Keys that were packed before their rotary embedding have a `position` a page, and what they
    stand for is rotated by it. The token at position 0, whose key may be unlike all others (an
    attention sink), can have a scale and a middle of its own, which pages share.
    """

    planes: dict[str, Array]  # [N, Hkv, rows, D]: `codes`, and `top` at 3 bits; see `packed_bits`
    scale: Float[Array, "N Hkv Pt Dc"]
    middle: Float[Array, "N Hkv Pt Dc"] | None  # None where groups are symmetric around 0
    unit: Float[Array, "N Hkv 1 2"] | None  # what float8 scales and middles are multiplied by
    levels: Float32[Array, "heads levels"] | None  # of the codes; one row if all heads share them
    outlier_at: UInt16[Array, "N Hkv E"] | None  # token * D + channel; P * D where there is none
    outlier_value: Float[Array, "N Hkv E"] | None  # what stands there instead
    bits: int = dataclasses.field(metadata={"static": True})
    centre: float = dataclasses.field(metadata={"static": True})
    position: Int32[Array, "N Hkv 1"] | None = None  # of a page's first token, logical
    frequencies: Float32[Array, " half"] | None = None  # radians a token for pairs (i, i + D / 2)
    sink_scale: Float32[Array, "N Hkv 1 D"] | None = None  # N is 1; of the token at position 0
    sink_middle: Float32[Array, "N Hkv 1 D"] | None = None
    sharpen: float = dataclasses.field(default=1.0, metadata={"static": True})  # by the embedding
    shared: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    """Which of `scale` and `middle` are the same for all pages, and do not grow with the pool."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[N, Hkv, P, D], of the array that the pages stand for."""
        pages, heads, rows, dim = self.planes["codes"].shape
        width = 8 if self.bits == 8 else PLANES[self.bits]["codes"]
        return pages, heads, rows * 8 // width, dim

    @property
    def ndim(self) -> int:
        """4."""
        return 4

    @property
    def dtype(self) -> jnp.dtype:
        """Of the codes: uint8 where several share a byte."""
        return jnp.dtype(self.planes["codes"].dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, those that all pages share included."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def stored(self) -> dict[str, Any]:
        """The arrays whose first axes are pages and heads, by field; the others are shared."""
        fields = {name: getattr(self, name) for name in STORED if name not in self.shared}
        return {name: value for name, value in fields.items() if value is not None}

    def with_stored(self, arrays: Mapping[str, Any]) -> "PackedPages":
        """The same packing around other arrays, such as some of the pages.

        Args:
          arrays: by field, as `stored` names them.
        """
        return dataclasses.replace(self, **arrays)

    def map_stored(self, function: Callable[..., Array], *others: "PackedPages") -> "PackedPages":
        """Apply a function to each array that grows with the pool, and keep the others.

        Args:
          function: from an array [N, Hkv, ...], and those of `others`, to what takes its place.
          others: pages packed the same way.
        """
        mine = self.stored()
        theirs = [{name: getattr(other, name) for name in mine} for other in others]
        return self.with_stored(jax.tree.map(function, mine, *theirs))

    def values(self) -> Float32[Array, "N Hkv P D"]:
        """What the pages stand for, all at once, in float32."""
        value = self.unrotated()
        if self.position is None or self.frequencies is None:
            return value
        return rotated_pages(value, self.position, self.frequencies, self.sharpen)

    def unrotated(self) -> Float32[Array, "N Hkv P D"]:
        """The same, but keys that were packed before their rotary embedding without it."""
        pages, heads, size, dim = self.shape
        codes = self.planes["codes"] if self.bits == 8 else unpack(self.planes, self.bits)
        if self.levels is not None:
            level = _level(self.levels, codes, self.bits)
        else:
            level = _numbers(codes, self.centre)
        # Before they are broadcast: fused into that, each would be converted once an element.
        scale, middle = lax.optimization_barrier((self._scale(), self._middle()))
        groups = scale.shape[2:]
        level = level.reshape(
            pages, heads, groups[0], size // groups[0], groups[1], dim // groups[1]
        )
        value = level * scale[:, :, :, None, :, None]
        if middle is not None:
            value = value + middle[:, :, :, None, :, None]
        value = value.reshape(pages, heads, size, dim)
        if self.position is not None and self.sink_scale is not None:
            sink = level.reshape(value.shape) * self.sink_scale
            sink = sink if self.sink_middle is None else sink + self.sink_middle
            value = jnp.where(at_start(self.position, size), sink, value)
        return self._with_outliers(value)

    def _with_outliers(self, value: Float32[Array, "N Hkv P D"]) -> Float32[Array, "N Hkv P D"]:
        if self.outlier_at is None or self.outlier_value is None:
            return value
        pages, heads, size, dim = value.shape
        flat = value.reshape(pages, heads, size * dim)
        page = jnp.arange(pages, dtype=jnp.int32)[:, None, None]
        head = jnp.arange(heads, dtype=jnp.int32)[None, :, None]
        at = self.outlier_at.astype(jnp.int32)
        kept = self.outlier_value.astype(jnp.float32)
        return flat.at[page, head, at].set(kept, mode="drop").reshape(value.shape)

    def _scale(self) -> Float32[Array, "N Hkv Pt Dc"]:
        scale: Array = factor_values(self.scale)
        return scale if self.unit is None else scale * self.unit[..., :1].astype(jnp.float32)

    def _middle(self) -> Float32[Array, "N Hkv Pt Dc"] | None:
        if self.middle is None:
            return None
        middle: Array = factor_values(self.middle)
        return middle if self.unit is None else middle * self.unit[..., 1:].astype(jnp.float32)


def _numbers(codes: Array, centre: float) -> Float32[Array, "N Hkv P D"]:
    """Codes as numbers; 8-bit floats by their bytes, which XLA's own conversion is slower than."""
    kind = codes.dtype.name
    if kind in FLOAT8:
        codes = lax.bitcast_convert_type(codes, jnp.uint8)
    level: Array = code_levels(codes.astype(jnp.int32), kind, centre)
    return level


def at_start(position: Int32[Array, "N heads 1"], size: int) -> Bool[Array, "N heads P 1"]:
    """Which tokens of pages are the first of their sequences.

    Args:
      position: of each page's first token.
      size: P.
    """
    return (position[..., None] == 0) & (
        jnp.arange(size, dtype=jnp.int32)[None, None, :, None] == 0
    )


def _level(
    levels: Float32[Array, "heads levels"], codes: UInt8[Array, "N Hkv P D"], bits: int
) -> Float32[Array, "N Hkv P D"]:
    """Each code's level: halves of the table by one bit after the other, which needs no gather."""
    table = [levels[None, :, index, None, None] for index in range(levels.shape[1])]
    for bit in range(bits):
        high = (codes >> bit) & 1 == 1
        table = [jnp.where(high, *pair) for pair in zip(table[1::2], table[::2], strict=True)]
    return table[0]


KeyPool = Float[Array, "N Hkv P D"] | PackedPages
ValuePool = Float[Array, "N Hkv P Dv"] | PackedPages
"""Where a layer's keys and its values stand: plain, or packed."""


def as_pool(pool: Any) -> Any:
    """A caller's pool as the implementations take it: packed as it is, else a JAX array."""
    return pool if isinstance(pool, PackedPages) else jnp.asarray(pool)


def plain(pool: KeyPool) -> Float[Array, "N Hkv P D"]:
    """A pool's elements in full: what yardsticks read. Nothing else should."""
    return pool.values() if isinstance(pool, PackedPages) else pool


def pool_elements(pool: KeyPool) -> int:
    """The most elements that one array of a pool has, which int32 must be able to index."""
    return max(int(math.prod(leaf.shape)) for leaf in jax.tree.leaves(pool))
