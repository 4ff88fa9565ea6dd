"""Scores of pages by what stands for their keys: means or bounds."""

from kvjax.pallas_kernels.page_scores.api import Aggregate, page_scores

__all__ = ["Aggregate", "page_scores"]
