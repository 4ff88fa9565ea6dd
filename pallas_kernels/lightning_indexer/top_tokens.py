"""The public function that chooses tokens by score, and its contract."""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from kvjax.pallas_kernels.validate_indexer import check_choice


class TokenChoice(NamedTuple):
    """The tokens of greatest score, a list for each query.

    Attributes:
        token_ids: int32 [T, K], slots of each query's sequence, the best first; S, which is no
            slot, where there are no more.
        counts: int32 [T], how many were chosen: min(K, tokens that the query sees).
    """

    token_ids: Int32[Array, "T K"]
    counts: Int32[Array, "T"]


def top_tokens(
    scores: Float32[Array, "T S"],
    visible: Int32[Array, "T"],
    *,
    k: int,
    implementation: Literal["reference", "xla"] | None = None,
) -> TokenChoice:
    """Choose the tokens of greatest score, exactly; of equal scores the earlier token.

    The order is total, so every device and every batch makes the same choice: -0 equals 0, and a
    NaN score counts as -inf. A token of score -inf is still a token: it is chosen if there is room.
    With K at least the tokens that a query sees, all are.

    There is no Mosaic or Triton kernel: XLA's own top-k, of which equal scores keep their order,
    runs on 4 bytes a token where the scores' kernel has just read a key.

    Args:
        scores: float32 [T, S], as `lightning_scores` gives them.
        visible: int32 [T], tokens that each query sees, the first ones; what is past S does not
            count.
        k: K, static: the most tokens that a query can choose. It may exceed S.
        implementation: None means "xla"; "reference" sorts everything.

    Returns:
        The `TokenChoice`, which `pages_of_tokens` turns into pages to read.

    Raises:
        ValueError: an argument breaks a rule above; the message names it. Raised before anything
            is traced.

    >>> scores = jnp.asarray([[0.5, 2.0, 0.5, 0.5, 9.0]])
    >>> top_tokens(scores, jnp.asarray([4], jnp.int32), k=3).token_ids.tolist()
    [[1, 0, 2]]
    """
    check_choice(scores, visible, k=k, implementation=implementation)
    scores = jnp.asarray(scores)
    slots = scores.shape[1]
    seen = jnp.clip(jnp.asarray(visible), 0, slots)[:, None]
    slot = jnp.arange(slots, dtype=jnp.int32)[None]
    ranked = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    ranked = jnp.where(ranked == 0.0, 0.0, ranked)  # XLA's top-k puts -0 below 0
    # Slots without a token come last in order, so of equal scores those that have one are chosen.
    ranked = jnp.where(slot < seen, ranked, -jnp.inf)
    room = min(k, slots)
    if implementation == "reference":
        best = jnp.argsort(-ranked, axis=1, stable=True)[:, :room]
    else:
        best = lax.top_k(ranked, room)[1]
    counts = jnp.minimum(seen, room)
    place = jnp.arange(room, dtype=jnp.int32)[None]
    listed = jnp.where(place < counts, best.astype(jnp.int32), slots)
    listed = jnp.pad(listed, ((0, 0), (0, k - room)), constant_values=slots)
    return TokenChoice(listed, counts[:, 0])
