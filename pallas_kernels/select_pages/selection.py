"""What a choice of pages is."""

from typing import NamedTuple

from jaxtyping import Array, Int32


class Selection(NamedTuple):
    """The pages that each KV head reads.

    Attributes:
        pages: int32 [B, Hkv, K], logical pages (entries of the sequence's block table), ascending
            and distinct, then M, which is no page.
        counts: int32 [B, Hkv], how many there are.
    """

    pages: Int32[Array, "B Hkv K"]
    counts: Int32[Array, "B Hkv"]
