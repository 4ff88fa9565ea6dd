"""Decode attention over a list of pages of each KV head's own."""

from kvjax.pallas_kernels.sparse_paged_attention.api import sparse_paged_attention

__all__ = ["sparse_paged_attention"]
