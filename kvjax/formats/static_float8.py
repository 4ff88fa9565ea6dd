"""8-bit floats whose scales were calibrated: pages hold nothing but codes."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from kvjax.formats.constant import Constant
from kvjax.formats.measured import check_measured
from kvjax.pallas_kernels.packed_pages import PackedPages, at_start
from kvjax.pallas_kernels.page_rotation import rotated_pages

GREATEST = float(jnp.finfo(jnp.float8_e4m3fn).max)
"""What the largest magnitude that calibration saw becomes: 448."""


@dataclasses.dataclass(frozen=True)
class StaticFloat8:
    """Elements as float8_e4m3fn around a middle, in a unit, that are the same for all pages.

    What is beyond 448 units, infinity too, is encoded as 448 of them, and NaN as the middle.

    Attributes:
      scale: [Hkv], what a code of 1 is worth, above 0.
      middle: [Hkv, D], what a code of 0 stands for; None is 0.
      sink_middle: [Hkv, D], what it stands for in the first token of a sequence, whose key gets
        much of all attention, and is unlike all others but alike from text to text. Only where
        there are a middle and frequencies.
      frequencies: [D / 2], of the rotary embedding that keys come with and are packed without,
        radians a token; None packs what comes.
      sharpen: what the rotary embedding multiplies keys by.
    """

    scale: Constant
    middle: Constant | None = None
    sink_middle: Constant | None = None
    frequencies: Constant | None = None
    sharpen: float = 1.0

    def check(self, what: str, page_size: int, dim: int) -> None:
        """See `PagePacking.check`."""
        del page_size
        if self.middle is not None:
            check_measured(what, "elements a head", dim, self.middle.shape[1])

    def encode(
        self, pages: Float[Array, "N Hkv P D"], positions: Int32[Array, " N"]
    ) -> PackedPages:
        """See `PagePacking.encode`."""
        count, heads, size, dim = pages.shape
        self.check("pages", size, dim)
        check_measured("pages", "KV heads", heads, self.scale.shape[0])
        x = pages.astype(jnp.float32)
        scale = jnp.asarray(self.scale.values)[None, :, None, None]
        position = frequencies = middle = sink_middle = None
        if self.frequencies is not None:
            position = jnp.broadcast_to(positions[:, None, None], (count, heads, 1))
            frequencies = jnp.asarray(self.frequencies.values)
            x = rotated_pages(x, position, frequencies, self.sharpen, back=True)
        if self.middle is not None:
            middle = jnp.asarray(self.middle.values)[None, :, None]
            scale = jnp.broadcast_to(scale, middle.shape)  # which say what elements share
            from_middle = middle
            if position is not None and self.sink_middle is not None:
                sink_middle = jnp.asarray(self.sink_middle.values)[None, :, None]
                from_middle = jnp.where(at_start(position, size), sink_middle, middle)
            x = x - from_middle
        codes = jnp.clip(jnp.where(jnp.isnan(x), 0.0, x / scale), -GREATEST, GREATEST)
        return PackedPages(
            planes={"codes": codes.astype(jnp.float8_e4m3fn)},
            scale=scale,
            middle=middle,
            unit=None,
            levels=None,
            outlier_at=None,
            outlier_value=None,
            bits=8,
            centre=0.0,
            position=position,
            frequencies=frequencies,
            sink_scale=None if sink_middle is None else scale,
            sink_middle=sink_middle,
            sharpen=self.sharpen,
            shared=("scale", "middle"),
        )

    def decode(self, packed: PackedPages) -> Float32[Array, "N Hkv P D"]:
        """See `PagePacking.decode`."""
        return packed.values()
