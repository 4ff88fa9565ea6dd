"""What DeepSeek's sparse attention (DSA) has that others do not: static facts of a layer."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Indexer:
    """A layer's queries attend to a few tokens, which a lightning indexer chooses (DSA).

    Of DeepSeek-V3.2-Exp (section 2.1). A layer that `shares` has no indexer of its own: it attends
    to what the nearest layer before it chose that does not share (arXiv:2603.12201; GLM-5).
    """

    num_heads: int  # index heads; they share one key a token
    head_dim: int  # elements of an index query and key, of which the first are rotated
    top_k: int  # most tokens that a query attends to
    interleaved: bool = False  # rotated pairs are (2i, 2i + 1), not (i, i + half)
    shares: bool = False

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"indexer: {name}={getattr(self, name)} must be at least 1")

    @property
    def scale(self) -> float:
        """What a token's score is multiplied by."""
        return float((self.num_heads * self.head_dim) ** -0.5)


def check_sharing(indexers: tuple[Indexer | None, ...]) -> None:
    """Refuses a layer that shares a choice that no layer before it makes.

    Args:
        indexers: one a layer, in order.

    Raises:
        ValueError: there is one; it is named.
    """
    chose: Indexer | None = None
    for index, indexer in enumerate(indexers):
        if indexer is None:
            continue
        if not indexer.shares:
            chose = indexer
        elif chose is None:
            raise ValueError(
                f"layer {index} shares a choice of tokens, and no layer before it has one"
            )
        elif chose.top_k != indexer.top_k:
            raise ValueError(
                f"layer {index} shares a choice of {chose.top_k} tokens, and its top_k is "
                f"{indexer.top_k}"
            )
