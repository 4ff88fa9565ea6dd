"""Page pools, block tables and the pure operations on them."""

from kvjax.cache.allocate import advance, fork, release, reserve
from kvjax.cache.append import append
from kvjax.cache.csr import check_csr, from_csr, to_csr
from kvjax.cache.index_keys import IndexKeys, kept_index_keys, write_index
from kvjax.cache.packed import encode_due, encoded_lengths, put_chunk, put_token, recent_slots
from kvjax.cache.pages import (
    copy_pages,
    gather,
    ragged_rows,
    token_slots,
    with_layer,
    with_state,
    write,
)
from kvjax.cache.state import (
    IndexPages,
    PagedKVCache,
    Recent,
    Reservation,
    check_pools,
    init,
    pool_bytes,
)

__all__ = [
    "IndexKeys",
    "IndexPages",
    "PagedKVCache",
    "Recent",
    "Reservation",
    "advance",
    "append",
    "check_csr",
    "check_pools",
    "copy_pages",
    "encode_due",
    "encoded_lengths",
    "fork",
    "from_csr",
    "gather",
    "init",
    "kept_index_keys",
    "pool_bytes",
    "put_chunk",
    "put_token",
    "ragged_rows",
    "recent_slots",
    "release",
    "reserve",
    "to_csr",
    "token_slots",
    "with_layer",
    "with_state",
    "write",
    "write_index",
]
