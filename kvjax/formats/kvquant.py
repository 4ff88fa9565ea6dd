"""KVQuant (arXiv:2401.18079): keys by channel before their rotation, levels of no even spacing."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Float16, Float32, Int32, UInt8, UInt16

from kvjax.errors import KvjaxError
from kvjax.formats.constant import Constant
from kvjax.formats.measured import check_measured
from kvjax.formats.outliers import check_places, largest, marked, room
from kvjax.formats.scales import kept, real, units
from kvjax.pallas_kernels.packed_bits import pack, tokens_sharing_a_byte
from kvjax.pallas_kernels.packed_pages import PackedPages, at_start
from kvjax.pallas_kernels.page_rotation import rotated_pages

OUTLIERS = 0.01
"""Share of elements that are kept apart (the paper's 1 %, section 3.4)."""


@dataclasses.dataclass(frozen=True)
class KVQuantKeys:
    """Keys without their rotation, in levels between ranges that calibration found.

    A channel's range is the same for all pages, so a page stores codes, outliers and its position.
    Outliers are the elements that codes say worst; those outside of the range are among them. What
    is not finite counts as the middle of its channel.

    The first token of a sequence gets much of all attention, and its key is unlike all others, but
    alike from text to text. The paper keeps it as it is (section 3.5); here it has narrow ranges of
    its own, which need no room.

    Attributes:
      bits: of a code, 2 to 4.
      middle: [Hkv, D], of each channel's range.
      reach: [Hkv, D], from the middle to the range's ends.
      sink_middle: [Hkv, D], of the first token's ranges.
      sink_reach: [Hkv, D].
      levels: [2 ** bits], ascending, in reaches from the middle.
      frequencies: [D / 2], of the rotary embedding that keys come with, radians a token.
      sharpen: what the rotary embedding multiplies keys by.
      outliers: share of elements that are kept apart, in float16.
    """

    bits: int
    middle: Constant
    reach: Constant
    sink_middle: Constant
    sink_reach: Constant
    levels: Constant
    frequencies: Constant
    sharpen: float = 1.0
    outliers: float = OUTLIERS

    def check(self, what: str, page_size: int, dim: int) -> None:
        """See `PagePacking.check`."""
        _check_bits(what, self.bits, page_size)
        check_places(what, page_size, dim)
        check_measured(what, "elements a head", dim, self.middle.shape[1])

    def encode(
        self, pages: Float[Array, "N Hkv P D"], positions: Int32[Array, " N"]
    ) -> PackedPages:
        """See `PagePacking.encode`."""
        count, heads, size, dim = pages.shape
        self.check("keys", size, dim)
        check_measured("keys", "KV heads", heads, self.middle.shape[0])
        position = jnp.broadcast_to(positions[:, None, None], (count, heads, 1))
        frequencies = jnp.asarray(self.frequencies.values)
        middle, reach, sink_middle, sink_reach = (
            jnp.asarray(constant.values)[None, :, None]
            for constant in (self.middle, self.reach, self.sink_middle, self.sink_reach)
        )
        x = rotated_pages(pages.astype(jnp.float32), position, frequencies, self.sharpen, back=True)
        start = at_start(position, size)
        from_middle = jnp.where(start, sink_middle, middle)
        unit = jnp.where(start, sink_reach, reach)
        x = jnp.where(jnp.isfinite(x), x, from_middle)
        codes = nearest((x - from_middle) / jnp.where(unit == 0, 1.0, unit), self.levels)
        packed = PackedPages(
            planes=pack(codes, self.bits),
            scale=reach,
            middle=middle,
            unit=None,
            levels=jnp.asarray(self.levels.values)[None],
            outlier_at=None,
            outlier_value=None,
            bits=self.bits,
            centre=0.0,
            position=position,
            frequencies=frequencies,
            sink_scale=sink_reach,
            sink_middle=sink_middle,
            sharpen=self.sharpen,
            shared=("scale", "middle"),
        )
        at, value = largest(x, jnp.abs(x - packed.unrotated()), room(self.outliers, size, dim))
        return dataclasses.replace(packed, outlier_at=at, outlier_value=value)

    def decode(self, packed: PackedPages) -> Float32[Array, "N Hkv P D"]:
        """See `PagePacking.decode`."""
        return packed.values()


@dataclasses.dataclass(frozen=True)
class KVQuantValues:
    """Values in levels between the range that each token's have, its outliers apart.

    Outliers are the elements of a page's head that are farthest from their token's mean; they do
    not widen its range. What is not finite counts as 0.

    Attributes:
      bits: of a code, 2 to 4.
      levels: [2 ** bits], ascending, in half ranges from the range's middle.
      outliers: share of elements that are kept apart, in float16.
      scale_dtype: of a token's middle and half range, "float16" or "float8_e4m3fn".
    """

    bits: int
    levels: Constant
    outliers: float = OUTLIERS
    scale_dtype: str = "float16"

    def check(self, what: str, page_size: int, dim: int) -> None:
        """See `PagePacking.check`."""
        _check_bits(what, self.bits, page_size)
        check_places(what, page_size, dim)

    def encode(
        self, pages: Float[Array, "N Hkv P D"], positions: Int32[Array, " N"] | None = None
    ) -> PackedPages:
        """See `PagePacking.encode`; `positions` are not looked at."""
        _, _, size, dim = pages.shape
        self.check("values", size, dim)
        x = pages.astype(jnp.float32)
        x = jnp.where(jnp.isfinite(x), x, 0.0)
        at, value, low, high = token_ranges(x, self.outliers)
        middle, middle_unit = kept(low / 2 + high / 2, self.scale_dtype, up=False)
        centre = real(middle, middle_unit)
        scale, scale_unit = kept(
            jnp.maximum(high - centre, centre - low), self.scale_dtype, up=True
        )
        reach = real(scale, scale_unit)
        codes = nearest((x - centre) / jnp.where(reach == 0, 1.0, reach), self.levels)
        return PackedPages(
            planes=pack(codes, self.bits),
            scale=scale,
            middle=middle,
            unit=units(scale_unit, middle_unit),
            levels=jnp.asarray(self.levels.values)[None],
            outlier_at=at,
            outlier_value=value,
            bits=self.bits,
            centre=0.0,
        )

    def decode(self, packed: PackedPages) -> Float32[Array, "N Hkv P D"]:
        """See `PagePacking.decode`."""
        return packed.values()


def token_ranges(
    pages: Float32[Array, "N Hkv P D"], outliers: float
) -> tuple[
    UInt16[Array, "N Hkv E"],
    Float16[Array, "N Hkv E"],
    Float32[Array, "N Hkv P 1"],
    Float32[Array, "N Hkv P 1"],
]:
    """Outliers, and the range that each token of a page's head has without them.

    Args:
      pages: float32, finite.
      outliers: share of elements that are.

    Returns:
      Places and values of outliers, as `largest` has them; each token's least and greatest.
    """
    size, dim = pages.shape[2:]
    deviation = jnp.abs(pages - jnp.mean(pages, axis=3, keepdims=True))
    at, value = largest(pages, deviation, room(outliers, size, dim))
    apart = marked(at, size, dim)
    high = jnp.max(jnp.where(apart, -jnp.inf, pages), axis=3, keepdims=True)
    low = jnp.min(jnp.where(apart, jnp.inf, pages), axis=3, keepdims=True)
    some = high >= low
    return at, value, jnp.where(some, low, 0.0), jnp.where(some, high, 0.0)


def nearest(x: Float32[Array, "N Hkv P D"], levels: Constant) -> UInt8[Array, "N Hkv P D"]:
    """The code of the level that is nearest to each element.

    Args:
      x: elements, finite.
      levels: ascending.
    """
    code = jnp.zeros(x.shape, jnp.uint8)
    for lower, upper in zip(levels.values[:-1], levels.values[1:], strict=True):
        code += (x > (lower + upper) / 2).astype(jnp.uint8)
    return code


def _check_bits(what: str, bits: int, page_size: int) -> None:
    together = tokens_sharing_a_byte(bits)
    if page_size % together:
        raise KvjaxError(
            f"page_size is {page_size}: codes of {bits} bits of {what} need a multiple of "
            f"{together} tokens, which share a byte"
        )
