"""Decode attention computed in float8 throughout: queries, keys, weights and values."""

from kvjax.pallas_kernels.float8_attention.api import Accumulator, float8_paged_attention

__all__ = ["Accumulator", "float8_paged_attention"]
