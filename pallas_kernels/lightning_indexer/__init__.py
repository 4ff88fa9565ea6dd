"""Scores of tokens by a lightning indexer (DSA), and the exact choice of the best of them."""

from kvjax.pallas_kernels.lightning_indexer.api import lightning_scores, ragged_lightning_scores
from kvjax.pallas_kernels.lightning_indexer.top_tokens import TokenChoice, top_tokens

__all__ = ["TokenChoice", "lightning_scores", "ragged_lightning_scores", "top_tokens"]
