"""One KV block folded into the running softmax of some rows (FlashAttention, arXiv:2205.14135)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from kvjax.pallas_kernels.mosaic.work import Scalar

# Scores of hidden slots, and the maximum of no scores: finite, so that their differences are, and
# so far apart that exp(HIDDEN - NOTHING) is 0 and hidden slots weigh nothing without another mask.
HIDDEN = -2e38
NOTHING = -1e38


class Accumulators(NamedTuple):
    """Running softmax of a query block, float32 refs in VMEM.

    Attributes:
        running: [Hkv, rows, 2], the greatest score so far and the sum of exp(score - greatest).
        weighted: [Hkv, rows, Dv], the sum of exp(score - greatest) * value.
    """

    running: Any
    weighted: Any

    def clear(self, head: Scalar, rows: Any) -> None:
        """Start some rows of a KV head over: no slot seen."""
        shape = self.weighted[head, rows].shape
        self.running[head, rows, 0:1] = jnp.full((shape[0], 1), NOTHING, jnp.float32)
        self.running[head, rows, 1:2] = jnp.zeros((shape[0], 1), jnp.float32)
        self.weighted[head, rows] = jnp.zeros(shape, jnp.float32)

    def fold(
        self,
        head: Scalar,
        rows: Any,
        mine: Bool[Array, "rows 1"],
        scores: Float[Array, "rows slots"],
        values: Float[Array, "slots Dv"],
        *,
        split_weights: bool,
    ) -> None:
        """Fold a block's scores and values into some rows of a KV head.

        Args:
            head: the KV head.
            rows: slice of the query block's rows.
            mine: [rows, 1], whether the row is of the block's sequence; others stay as they are.
            scores: float32 [rows, slots], `HIDDEN` where a row must not look.
            values: [slots, Dv], 0 where none of the rows may look.
            split_weights: keep 16 bits of a weight, not 8, in a bfloat16 product; half-empty tiles
                make this free for few rows.
        """
        before = self.running[head, rows, 0:1]
        greatest = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - greatest)
        rescale = jnp.exp(before - greatest)
        total = self.running[head, rows, 1:2] * rescale
        self.running[head, rows, 0:1] = greatest
        self.running[head, rows, 1:2] = total + jnp.sum(weights, axis=1, keepdims=True)
        # The other rows' weights are 0 and their rescale 1, but 0 * NaN is NaN.
        weighted = self.weighted[head, rows]
        folded = weighted * rescale + _weigh(weights, values, split_weights)
        self.weighted[head, rows] = jnp.where(mine, folded, weighted)

    def output(self, head: Scalar, rows: Any) -> Float[Array, "rows Dv"]:
        """Return softmax(scores) @ values of some rows; 0 for rows that saw nothing."""
        total = self.running[head, rows, 1:2]
        out: Array = self.weighted[head, rows] / jnp.where(total == 0.0, 1.0, total)
        return out

    def log_normalizer(self, head: Scalar, rows: Any) -> Float[Array, "1 rows"]:
        """Return log(sum(exp(score))) of some rows along lanes; -inf where nothing was seen.

        A [rows, 1] array would occupy 128 lanes a row in HBM; picking the diagonal turns it.
        """
        column = self.running[head, rows, 0:1] + jnp.log(self.running[head, rows, 1:2])
        count = column.shape[0]
        down = lax.broadcasted_iota(jnp.int32, (count, count), 0)
        across = lax.broadcasted_iota(jnp.int32, (count, count), 1)
        return jnp.sum(jnp.where(down == across, column, 0.0), axis=0, keepdims=True)


def attention_scores(
    pairs: Sequence[tuple[Array, Array]],
    visible: Bool[Array, "rows slots"],
    *,
    scale: float,
    soft_cap: float | None,
) -> Float[Array, "rows slots"]:
    """Score the slots of a block; `HIDDEN` where a row must not look, whatever the slot holds.

    Args:
        pairs: queries [rows, D] and what they score, [slots, D]; products add up.
        visible: [rows, slots], what each row may see.
        scale: factor of the scores.
        soft_cap: bound of the scores, or None.
    """
    products = [_dot(q, k, 1) for q, k in pairs]
    scores = sum(products[1:], products[0]) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    return jnp.where(visible, scores, HIDDEN)


def visible_slots(
    slots: Int32[Array, "1 slots"],
    positions: Int32[Array, "rows 1"],
    limits: Int32[Array, "rows 1"],
    *,
    window: int | None,
    sink_tokens: int,
) -> Bool[Array, "rows slots"]:
    """Say which slots each row may see.

    Args:
        slots: int32 [1, slots], each slot's number within its sequence.
        positions: int32 [rows, 1], position of each row's query.
        limits: int32 [rows, 1], the last slot each row may see; -1 for rows of other sequences.
        window: tokens a query sees, itself included, or None.
        sink_tokens: first tokens that stay visible outside the window.

    Returns:
        bool [rows, slots].
    """
    visible = slots <= limits
    if window is None:
        return visible
    recent = slots > positions - window
    return visible & ((recent | (slots < sink_tokens)) if sink_tokens else recent)


def _dot(x: Array, y: Array, y_contracted: int) -> Float[Array, "rows columns"]:
    """Multiply with float32 sums: bfloat16 by bfloat16 is exact, all else is float32 throughout."""
    if x.dtype != jnp.bfloat16 or y.dtype != jnp.bfloat16:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    exact = x.dtype == jnp.float32
    return lax.dot_general(
        x,
        y,
        (((1,), (y_contracted,)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def _weigh(
    weights: Float[Array, "rows slots"], values: Float[Array, "slots Dv"], split: bool
) -> Float[Array, "rows Dv"]:
    if values.dtype != jnp.bfloat16:
        return _dot(weights, values, 0)
    high = weights.astype(jnp.bfloat16)
    if not split:
        return _dot(high, values, 0)
    low = (weights - high.astype(jnp.float32)).astype(jnp.bfloat16)
    both = _dot(jnp.concatenate([high, low], axis=0), values, 0)
    rows = weights.shape[0]
    return both[:rows] + both[rows:]
