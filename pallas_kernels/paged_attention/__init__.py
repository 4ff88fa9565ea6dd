"""Decode attention: one query a sequence over its pages."""

from kvjax.pallas_kernels.paged_attention.api import paged_attention

__all__ = ["paged_attention"]
