"""From a page's elements to codes of a few bits with scales: one rule for keys, one for values."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from kvjax.errors import KvjaxError, check_integer
from kvjax.formats.scales import LEAST, kept, real, units
from kvjax.pallas_kernels.packed_bits import pack, tokens_sharing_a_byte
from kvjax.pallas_kernels.packed_pages import PackedPages

Kind = Literal["float8_e4m3fn", "float8_e5m2", "int"]
SCALE_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")


@dataclasses.dataclass(frozen=True)
class Packing:
    """How pages of keys, or of values, become codes.

    Groups of `tokens` x `channels` elements of a page's head share a scale; None takes the whole
    axis. So tokens=None, channels=1 is a scale a channel (KIVI's axis for keys), tokens=1,
    channels=None one a token. A group never leaves its page's head.

    Attributes:
      kind: "int", or the 8-bit float of the codes.
      bits: 2, 3, 4 or 8; 8 for floats.
      tokens: of a group; None is the page's.
      channels: of a group; None, or more than a head has, is the head's.
      symmetric: whether codes stand around 0; otherwise around the middle of the group's range,
        which is stored too. Floats and 8-bit integers are symmetric.
      scale_dtype: of scales and middles. "float8_e4m3fn" ones are multiplied by a power of two
        that each page's head has, in bfloat16.
      scale: one scale for everything, that of a static format; None measures each group's.

    Raises:
      KvjaxError: a field is not what it must be.
    """

    kind: Kind = "int"
    bits: int = 4
    tokens: int | None = None
    channels: int | None = None
    symmetric: bool = False
    scale_dtype: str = "bfloat16"
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("float8_e4m3fn", "float8_e5m2", "int"):
            raise KvjaxError(
                f"kind is {self.kind!r}: must be 'int', 'float8_e4m3fn' or 'float8_e5m2'"
            )
        if isinstance(self.bits, bool) or self.bits not in (2, 3, 4, 8):
            raise KvjaxError(f"bits is {self.bits!r}: must be 2, 3, 4 or 8")
        if self.kind != "int" and self.bits != 8:
            raise KvjaxError(f"bits is {self.bits}: codes of kind {self.kind!r} have 8")
        if self.bits == 8 and not self.symmetric:
            raise KvjaxError("symmetric is False: codes of 8 bits stand around 0; pass True")
        for name in ("tokens", "channels"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1, ", or None for the whole axis")
        if self.scale_dtype not in SCALE_DTYPES:
            raise KvjaxError(
                f"scale_dtype is {self.scale_dtype!r}: must be one of {', '.join(SCALE_DTYPES)}"
            )
        if self.scale is not None and (self.kind == "int" or not 0 < self.scale < math.inf):
            raise KvjaxError(
                f"scale is {self.scale!r}: must be finite, above 0, and of float codes; integers "
                f"measure their groups: pass None"
            )

    @property
    def greatest(self) -> float:
        """The largest magnitude of a code: what a group's largest is divided by."""
        if self.kind == "int":
            return float(2 ** (self.bits - 1) - 1) if self.symmetric else (2**self.bits - 1) / 2
        return float(jnp.finfo(self.kind).max)

    def check(self, what: str, page_size: int, dim: int) -> None:
        """Refuse pages that do not divide into groups and bytes.

        Args:
          what: "keys" or "values", for the message.
          page_size: tokens a page.
          dim: elements of a head's row.

        Raises:
          KvjaxError: they do not.
        """
        tokens, channels = self.tokens or page_size, min(self.channels or dim, dim)
        if page_size % tokens:
            raise KvjaxError(
                f"page_size is {page_size}: groups of {tokens} tokens of {what} must fill pages, "
                f"which are what is encoded; use a multiple of {tokens}"
            )
        if dim % channels:
            raise KvjaxError(
                f"{what} have {dim} elements a head: groups of {channels} channels must divide "
                f"them; take {math.gcd(dim, channels)}"
            )
        if tokens * channels == 1:
            raise KvjaxError(
                f"tokens and channels of {what} are 1: such a group is its own scale and saves "
                f"nothing; take more of one of them"
            )
        together = 1 if self.bits == 8 else tokens_sharing_a_byte(self.bits)
        if page_size % together:
            raise KvjaxError(
                f"page_size is {page_size}: codes of {self.bits} bits need a multiple of "
                f"{together} tokens, which share a byte"
            )

    def encode(
        self, pages: Float[Array, "N Hkv P D"], positions: Int32[Array, " N"] | None = None
    ) -> PackedPages:
        """Pack pages, each head of each on its own.

        What is not finite is encoded as the nearest number that the group's finite elements span,
        NaN as its middle; nothing of another group is touched by it.

        Args:
          pages: [N, Hkv, P, D], whole pages.
          positions: not looked at: keys are packed as they are given.

        Raises:
          KvjaxError: groups do not divide them.
        """
        count, heads, size, dim = pages.shape
        self.check("pages", size, dim)
        tokens, channels = self.tokens or size, min(self.channels or dim, dim)
        rows, columns = size // tokens, dim // channels
        x = pages.astype(jnp.float32)
        grouped = x.reshape(count, heads, rows, tokens, columns, channels)
        finite = jnp.isfinite(grouped)
        high = jnp.max(jnp.where(finite, grouped, -jnp.inf), axis=(3, 5))
        low = jnp.min(jnp.where(finite, grouped, jnp.inf), axis=(3, 5))
        some = high >= low
        high, low = jnp.where(some, high, 0.0), jnp.where(some, low, 0.0)
        middle = middle_unit = None
        if self.scale is not None:
            scale = jnp.full((1, 1, 1, 1), self.scale, jnp.float32)
            stored, unit = scale, None
        else:
            if self.symmetric:
                reach = jnp.maximum(high, -low)
            else:
                middle, middle_unit = kept(low / 2 + high / 2, self.scale_dtype, up=False)
                centre = real(middle, middle_unit)
                reach = jnp.maximum(high - centre, centre - low)
            reach = jnp.where(reach < LEAST, 0.0, reach)
            stored, unit = kept(reach / self.greatest, self.scale_dtype, up=True)
            scale = real(stored, unit)
        centred = (
            grouped
            if middle is None
            else (grouped - real(middle, middle_unit)[:, :, :, None, :, None])
        )
        divisor = jnp.where(scale == 0, 1.0, scale)[:, :, :, None, :, None]
        level = jnp.nan_to_num(centred / divisor, nan=0.0, posinf=jnp.inf, neginf=-jnp.inf)
        level = jnp.clip(level, -self.greatest, self.greatest).reshape(x.shape)
        if self.kind != "int":
            planes, centre_of = {"codes": level.astype(self.kind)}, 0.0
        elif self.bits == 8:
            planes, centre_of = {"codes": jnp.round(level).astype(jnp.int8)}, 0.0
        else:
            centre_of = float(2 ** (self.bits - 1)) if self.symmetric else self.greatest
            planes = pack(jnp.round(level + centre_of).astype(jnp.uint8), self.bits)
        return PackedPages(
            planes=planes,
            scale=stored,
            middle=middle,
            unit=units(unit, middle_unit),
            levels=None,
            outlier_at=None,
            outlier_value=None,
            bits=self.bits,
            centre=centre_of,
            shared=() if self.scale is None else ("scale",),
        )

    def decode(self, packed: PackedPages) -> Float32[Array, "N Hkv P D"]:
        """What packed pages stand for."""
        return packed.values()
