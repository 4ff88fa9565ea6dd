"""Attention over MLA latents, absorbed and expanded, and which of the two is cheaper."""

from kvjax.pallas_kernels.latent_attention.api import (
    latent_attention,
    ragged_latent_attention,
    sparse_latent_attention,
)
from kvjax.pallas_kernels.latent_attention.cost import (
    Cost,
    LatentDims,
    LatentForms,
    absorbed_or_expanded,
)
from kvjax.pallas_kernels.latent_attention.expanded import (
    EXPANDED_QUERIES,
    Expand,
    expanded_latent_attention,
)
from kvjax.pallas_kernels.latent_attention.token_pages import TokenPages, pages_of_tokens
from kvjax.pallas_kernels.latent_attention.tokens import token_latent_attention

__all__ = [
    "EXPANDED_QUERIES",
    "Cost",
    "Expand",
    "LatentDims",
    "LatentForms",
    "TokenPages",
    "absorbed_or_expanded",
    "expanded_latent_attention",
    "latent_attention",
    "pages_of_tokens",
    "ragged_latent_attention",
    "sparse_latent_attention",
    "token_latent_attention",
]
