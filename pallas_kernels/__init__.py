"""Attention kernels over paged KV caches: one folder an operation, one file a backend."""

from kvjax.pallas_kernels.float8_attention import float8_paged_attention
from kvjax.pallas_kernels.latent_attention import (
    EXPANDED_QUERIES,
    LatentDims,
    LatentForms,
    TokenPages,
    absorbed_or_expanded,
    expanded_latent_attention,
    latent_attention,
    pages_of_tokens,
    ragged_latent_attention,
    sparse_latent_attention,
    token_latent_attention,
)
from kvjax.pallas_kernels.lightning_indexer import (
    TokenChoice,
    lightning_scores,
    ragged_lightning_scores,
    top_tokens,
)
from kvjax.pallas_kernels.low_bit_scores import low_bit_scores
from kvjax.pallas_kernels.merge_attention import merge_attention
from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_pages import KeyPool, PackedPages, ValuePool
from kvjax.pallas_kernels.page_scores import page_scores
from kvjax.pallas_kernels.paged_attention import paged_attention
from kvjax.pallas_kernels.ragged_paged_attention import ragged_paged_attention
from kvjax.pallas_kernels.residual import encoded_before
from kvjax.pallas_kernels.select_pages import Selection, select_pages
from kvjax.pallas_kernels.sparse_paged_attention import sparse_paged_attention
from kvjax.pallas_kernels.support import (
    IMPLEMENTATIONS,
    OPERATIONS,
    Implementation,
    supported,
    target_platform,
)
from kvjax.pallas_kernels.validate import check_ragged, check_tables
from kvjax.pallas_kernels.validate_lists import check_page_lists

__all__ = [
    "EXPANDED_QUERIES",
    "IMPLEMENTATIONS",
    "OPERATIONS",
    "AttentionOutput",
    "Implementation",
    "KeyPool",
    "LatentDims",
    "LatentForms",
    "PackedPages",
    "Selection",
    "TokenChoice",
    "TokenPages",
    "ValuePool",
    "absorbed_or_expanded",
    "check_page_lists",
    "check_ragged",
    "check_tables",
    "encoded_before",
    "expanded_latent_attention",
    "float8_paged_attention",
    "latent_attention",
    "lightning_scores",
    "low_bit_scores",
    "merge_attention",
    "page_scores",
    "paged_attention",
    "pages_of_tokens",
    "ragged_latent_attention",
    "ragged_lightning_scores",
    "ragged_paged_attention",
    "select_pages",
    "sparse_latent_attention",
    "sparse_paged_attention",
    "supported",
    "target_platform",
    "token_latent_attention",
    "top_tokens",
]
