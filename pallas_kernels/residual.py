"""How much of a sequence is encoded when a token comes: a rule of its position alone."""

from typing import TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Int32

Positions = TypeVar("Positions", int, Int32[Array, "..."])


def encoded_before(positions: Positions, residual: int, page_size: int) -> Positions:
    """Tokens of a sequence that are encoded while the token at a position is computed.

    Before it stand `positions` tokens, of which the newest `residual` at most are kept as they are:
    as many whole pages are encoded as that takes, from the first on.

    Args:
        positions: of the token, from 0, which is the tokens before it.
        residual: most tokens before it that are not encoded; at least `page_size`.
        page_size: tokens a page.

    Returns:
        A multiple of `page_size`, at most `positions`.

    >>> [encoded_before(n, 16, 16) for n in (0, 16, 17, 32, 33)]
    [0, 0, 16, 16, 32]
    """
    behind = positions - residual
    if isinstance(behind, int):
        return max(-(-behind // page_size), 0) * page_size
    return jnp.maximum((behind + (page_size - 1)) // page_size, 0) * page_size
