"""Page pools, block tables and the pure operations on them."""

from kvjax.cache.allocate import advance, fork, release, reserve
from kvjax.cache.append import append
from kvjax.cache.csr import check_csr, from_csr, to_csr
from kvjax.cache.pages import copy_pages, gather, ragged_rows, token_slots, with_layer, write
from kvjax.cache.state import (
    PagedKVCache,
    Reservation,
    check_pools,
    init,
    pool_bytes,
)

__all__ = [
    "PagedKVCache",
    "Reservation",
    "advance",
    "append",
    "check_csr",
    "check_pools",
    "copy_pages",
    "fork",
    "from_csr",
    "gather",
    "init",
    "pool_bytes",
    "ragged_rows",
    "release",
    "reserve",
    "to_csr",
    "token_slots",
    "with_layer",
    "write",
]
