"""The choice of pages by score, with pages that are always in."""

from kvjax.pallas_kernels.select_pages.api import select_pages
from kvjax.pallas_kernels.select_pages.selection import Selection

__all__ = ["Selection", "select_pages"]
