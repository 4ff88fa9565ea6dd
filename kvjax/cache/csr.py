"""Block tables in compressed rows, as FlashInfer and its users know them, and back."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from kvjax.errors import KvjaxError


def to_csr(
    block_tables: Int32[Array, "B M"], lengths: Int32[Array, " B"], page_size: int, num_pages: int
) -> tuple[Int32[Array, " B1"], Int32[Array, " BM"], Int32[Array, " B"]]:
    """Compress padded block tables (FlashInfer, arXiv:2501.01005, section 3.1). Pure, jittable.

    Args:
      block_tables: int32 [B, M].
      lengths: int32 [B], tokens.
      page_size: P, tokens a page.
      num_pages: N.

    Returns:
      `kv_indptr` int32 [B + 1], pages before each sequence; `kv_indices` int32 [B * M], the page
      ids one sequence after the other, N past the end; `kv_last_page_len` int32 [B], tokens in
      each last page, 1 to P, or 0 for an empty sequence.
    """
    batch, width = block_tables.shape
    pages = (lengths + (page_size - 1)) // page_size
    ends = jnp.cumsum(pages, dtype=jnp.int32)
    indptr = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
    column = jnp.arange(width, dtype=jnp.int32)[None, :]
    used = column < pages[:, None]
    target = jnp.where(used, indptr[:-1, None] + column, batch * width)
    indices = jnp.full((batch * width,), num_pages, jnp.int32)
    indices = indices.at[target].set(block_tables, mode="drop")
    last = jnp.where(pages > 0, lengths - (pages - 1) * page_size, 0)
    return indptr, indices, last


def from_csr(
    kv_indptr: Int32[Array, " B1"],
    kv_indices: Int32[Array, " n"],
    kv_last_page_len: Int32[Array, " B"],
    *,
    page_size: int,
    num_pages: int,
    max_pages: int,
) -> tuple[Int32[Array, "B M"], Int32[Array, " B"]]:
    """Expand compressed rows into padded block tables and lengths. Pure, jittable.

    Nothing is checked here; `check_csr` does, on concrete arrays.

    Args:
      kv_indptr: int32 [B + 1].
      kv_indices: int32 [n].
      kv_last_page_len: int32 [B].
      page_size: P, tokens a page.
      num_pages: N, which fills unused entries.
      max_pages: M, width of the tables.

    Returns:
      Block tables int32 [B, M] and lengths int32 [B], tokens.
    """
    pages = jnp.diff(kv_indptr)
    column = jnp.arange(max_pages, dtype=jnp.int32)[None, :]
    entry = kv_indices.at[kv_indptr[:-1, None] + column].get(mode="fill", fill_value=num_pages)
    tables = jnp.where(column < pages[:, None], entry, num_pages)
    return tables, jnp.where(pages > 0, (pages - 1) * page_size + kv_last_page_len, 0)


def check_csr(
    kv_indptr: Int32[Array, " B1"],
    kv_indices: Int32[Array, " n"],
    kv_last_page_len: Int32[Array, " B"],
    *,
    page_size: int,
    num_pages: int,
    max_pages: int,
) -> None:
    """Refuse compressed rows that name pages or slots which are not there. Outside jit.

    Args:
      kv_indptr: as for `from_csr`, concrete, as are the others.
      kv_indices: page ids.
      kv_last_page_len: tokens in each last page.
      page_size: P.
      num_pages: N.
      max_pages: M.

    Raises:
      KvjaxError: an invariant is broken; the message names the array, the entry and the rule.
    """
    arrays = {
        "kv_indptr": np.asarray(kv_indptr),
        "kv_indices": np.asarray(kv_indices),
        "kv_last_page_len": np.asarray(kv_last_page_len),
    }
    for name, array in arrays.items():
        if array.dtype != np.int32 or array.ndim != 1:
            raise KvjaxError(
                f"{name} is {array.dtype} of {array.ndim} dimensions: must be int32 of 1"
            )
    indptr, indices, last = arrays.values()
    if indptr.size != last.size + 1:
        raise KvjaxError(
            f"kv_indptr has {indptr.size} entries for {last.size} sequences: must have one more "
            f"than kv_last_page_len"
        )
    if indptr[0] != 0:
        raise KvjaxError(f"kv_indptr[0] is {indptr[0]}: must be 0")
    pages = np.diff(indptr)
    for b, count in enumerate(pages):
        if count < 0 or count > max_pages:
            raise KvjaxError(
                f"kv_indptr gives sequence {b} {count} pages: must be 0 to max_pages={max_pages}"
            )
        low, high = (1, page_size) if count else (0, 0)
        if not low <= last[b] <= high:
            raise KvjaxError(
                f"kv_last_page_len[{b}] is {last[b]}: must be {low} to {high} for a sequence of "
                f"{count} pages of {page_size} tokens"
            )
    if indptr[-1] > indices.size:
        raise KvjaxError(
            f"kv_indices has {indices.size} entries and kv_indptr ends at {indptr[-1]}: must have "
            f"at least as many"
        )
    live = indices[: indptr[-1]]
    wrong = np.flatnonzero((live < 0) | (live >= num_pages))
    if wrong.size:
        raise KvjaxError(
            f"kv_indices[{wrong[0]}] is {live[wrong[0]]}: must be a page id, 0 to {num_pages - 1}"
        )
