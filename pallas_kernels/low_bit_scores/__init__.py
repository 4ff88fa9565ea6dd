"""Scores of pages at token precision, by keys of 2 to 4 bits that are unpacked in the kernel."""

from kvjax.pallas_kernels.low_bit_scores.api import low_bit_scores

__all__ = ["low_bit_scores"]
