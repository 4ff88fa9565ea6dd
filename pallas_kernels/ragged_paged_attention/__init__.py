"""Attention of a ragged batch of prefill chunks and decodes over their pages."""

from kvjax.pallas_kernels.ragged_paged_attention.api import ragged_paged_attention

__all__ = ["ragged_paged_attention"]
