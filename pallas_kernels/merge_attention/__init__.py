"""The merge of attention over disjoint keys by its log-sum-exp."""

from kvjax.pallas_kernels.merge_attention.api import merge_attention

__all__ = ["merge_attention"]
