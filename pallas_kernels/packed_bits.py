"""Codes of 2, 3 or 4 bits, side by side in bytes: how pages of low-bit keys are packed.

A page's codes stand in one array a plane of bits, low bits first. A plane of w bits has P x w / 8
rows of D bytes for the P tokens of a page; field j (bits j * w and up) of its row r belongs to
token j * rows + r. So a byte holds one channel of several tokens, and a plane's rows stay rows of
channels.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, UInt8

PLANES: Mapping[int, Mapping[str, int]] = {
    2: {"codes": 2},
    3: {"codes": 2, "top": 1},
    4: {"codes": 4},
}
"""By bits a code: the planes, low bits first, and how many bits of each code they hold.

Three bits do not fill bytes. They are two arrays, since XLA:CPU unpacks several times slower where
it has to slice one.
"""


def tokens_sharing_a_byte(bits: int) -> int:
    """The most tokens of which a byte holds something: a page's size must be a multiple."""
    return 8 // min(PLANES[bits].values())


def pack(codes: UInt8[Array, "Hkv N P D"], bits: int) -> dict[str, UInt8[Array, "Hkv N rows D"]]:
    """Pack codes into planes.

    Args:
        codes: uint8 [Hkv, N, P, D], each below 2**bits; P a multiple of `tokens_sharing_a_byte`.
        bits: 2, 3 or 4.

    Returns:
        One array a plane, by the names of `PLANES`.
    """
    heads, pages, size, dim = codes.shape
    planes, below = {}, 0
    for name, width in PLANES[bits].items():
        fields = (codes >> below) & (2**width - 1)
        fields = fields.reshape(heads, pages, 8 // width, size * width // 8, dim)
        shifts = jnp.arange(0, 8, width, dtype=jnp.uint8)[:, None, None]
        shifted = fields << jnp.broadcast_to(shifts, fields.shape)
        planes[name] = jnp.sum(shifted, axis=2, dtype=jnp.uint8)
        below += width
    return planes


def unpack(planes: Mapping[str, Array], bits: int) -> UInt8[Array, "Hkv N P D"]:
    """Undo `pack`, as one pass of shifts over broadcast bytes: nothing is joined.

    Args:
        planes: uint8 [Hkv, N, rows, D] by name; other names are not looked at.
        bits: 2, 3 or 4.

    Returns:
        uint8 [Hkv, N, P, D].
    """
    heads, pages, most, dim = planes["codes"].shape
    size = most * 8 // PLANES[bits]["codes"]
    least = size * min(PLANES[bits].values()) // 8  # rows of the narrowest plane
    # Token (j, s, r) is field j of a wide plane's row (s, r), and field (j, s) of a narrow one's r.
    shape = (heads, pages, size // most, most // least, least, dim)
    codes, below = jnp.zeros(shape, jnp.uint8), 0
    for name, width in PLANES[bits].items():
        plane = planes[name].reshape(heads, pages, 1, -1, least, dim)
        shifts = jnp.arange(0, 8, width, dtype=jnp.uint8).reshape(size // most, -1, 1, 1)
        field = jnp.broadcast_to(plane, shape) >> jnp.broadcast_to(shifts, shape)
        codes = codes | ((field & (2**width - 1)) << below)
        below += width
    return codes.reshape(heads, pages, size, dim)


def token_code(planes: Mapping[str, Any], token: int, bits: int) -> Any:
    """One token's codes, inside a kernel.

    Args:
        planes: int32 [..., rows, D] by name, what `pack` made; only the row axis is indexed.
        token: which of the page.
        bits: 2, 3 or 4.

    Returns:
        int32 [..., D].
    """
    code, below = None, 0
    for name, width in PLANES[bits].items():
        rows = planes[name].shape[-2]
        field = planes[name][..., token % rows, :] >> (token // rows * width)
        field = (field & (2**width - 1)) << below
        code = field if code is None else code | field
        below += width
    return code


def float8_values(bits: Any) -> Any:
    """The numbers that float8_e4m3fn bytes stand for, in operations that every kernel has.

    Not all machines convert float8; and bytes, unlike float8, go through every copy.

    Args:
        bits: int32, 0 to 255, any shape.

    Returns:
        float32 of that shape.
    """
    magnitude = bits & 127
    fraction = (magnitude & 7).astype(jnp.float32)
    # The exponent's bias is 7; of float32's, 127.
    normal = lax.bitcast_convert_type((magnitude << 20) + (120 << 23), jnp.float32)
    value = jnp.where(magnitude < 8, fraction * 2.0**-9, normal)
    value = jnp.where(magnitude == 127, jnp.nan, value)
    return jnp.where(bits > 127, -value, value)
