"""What ties a unit's bytes to their place: a tag behind each unit, under the unit's own checksum.

A checksum says that a unit is whole, not which one it is: a shard's file in another's place would
pass. A tag is 16 bytes: a number made of the segment's folder, which no other writing shares, and
the unit's place among all units of the segment.
"""

import hashlib

import numpy as np
from jaxtyping import UInt8

from kvjax.storage.layout import TAG_BYTES


def folder_number(folder: str) -> int:
    """The 64-bit number of a folder under data/. Its name has the key, the time and a nonce."""
    return int.from_bytes(hashlib.sha256(folder.encode("utf-8")).digest()[:8], "little")


def tags_of(number: int, where: np.ndarray) -> np.ndarray:
    """The tags of units at places [...] of the folder with this number: uint64 [..., 2]."""
    tags = np.empty((*where.shape, 2), "<u8")
    tags[..., 0] = number
    tags[..., 1] = where
    return tags


def split_tags(
    stored: UInt8[np.ndarray, "*units b"],
) -> tuple[UInt8[np.ndarray, "*units u"], np.ndarray]:
    """Units and tags as they lie in memory, without a copy.

    Args:
      stored: bytes of units, each with its tag.

    Returns:
      Bytes of the units, and tags uint64 [*units, 2]; views of `stored`.
    """
    return stored[..., :-TAG_BYTES], stored[..., -TAG_BYTES:].view("<u8")
