"""Which sequence, and which position in it, each row of a ragged batch of queries is."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from kvjax.pallas_kernels.residual import encoded_before


class QueryRows(NamedTuple):
    """One entry a row of q.

    Attributes:
        sequence: int32 [T], the row's sequence; 0 for padding.
        length: int32 [T], the sequence's cached tokens; 0 for padding.
        position: int32 [T], the query's position.
        padding: bool [T], whether the row is past the last sequence's queries.
    """

    sequence: Int32[Array, "T"]
    length: Int32[Array, "T"]
    position: Int32[Array, "T"]
    padding: Bool[Array, "T"]

    def seen(self, residual: int | None, page_size: int) -> Int32[Array, "T"]:
        """How many of its sequence's first slots each query sees; 0 for padding.

        Args:
            residual: newest tokens that a query does not see, because they were not encoded when it
                came; None sees all up to its own.
            page_size: tokens a page.
        """
        count = self.position + 1
        if residual is not None:
            count = encoded_before(self.position, residual, page_size)
        return jnp.where(self.padding, 0, count)


def query_rows(
    kv_lengths: Int32[Array, "B"], cu_q_lengths: Int32[Array, "B+1"], num_rows: int
) -> QueryRows:
    """Unfold a ragged batch row by row.

    Args:
        kv_lengths: int32 [B], cached tokens a sequence, its queries' own included.
        cu_q_lengths: int32 [B + 1], where each sequence's queries start.
        num_rows: T, the rows of q.

    Returns:
        The `QueryRows`.
    """
    row = jnp.arange(num_rows, dtype=jnp.int32)
    # The last sequence that starts at or before the row: one without queries starts where the
    # next does, so it is passed over.
    sequence = jnp.searchsorted(cu_q_lengths[1:], row, side="right").astype(jnp.int32)
    padding = row >= cu_q_lengths[-1]
    sequence = jnp.where(padding, 0, sequence)
    length = jnp.where(padding, 0, kv_lengths[sequence])
    # Queries are a sequence's last tokens: its last query row stands at length - 1.
    position = kv_lengths[sequence] - cu_q_lengths[sequence + 1] + row
    return QueryRows(sequence, length, position, padding)
