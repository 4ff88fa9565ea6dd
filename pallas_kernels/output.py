"""What every attention operation returns."""

from typing import NamedTuple

from jaxtyping import Array, Float


class AttentionOutput(NamedTuple):
    """Attention's values, their normalizer, and what each page contributed to it.

    The attention mass of a page, the share of a query's softmax that fell into it, is
    `exp(page_max - lse) * page_sum`: no second pass over the keys is needed. Two outputs over
    disjoint keys merge by their `lse` as in FlashAttention (arXiv:2205.14135, section 3.1).

    Attributes:
        out: [T, Hq, Dv], in the queries' dtype: softmax(scores) @ values; exactly 0 where a query
            sees no key.
        lse: float32 [T, Hq], the natural logarithm of the sum of exp(score) over the visible keys
            and, with `sink_logits`, the sink; -inf where there is neither.
        page_max: float32 [T, Hq, M], the greatest visible score in each page of the query's block
            table (or list: M is K); -inf where no key of the page is visible. None unless
            statistics were asked for.
        page_sum: float32 [T, Hq, M], the sum of exp(score - page_max) over the page's visible
            keys; 0 where none is. None unless statistics were asked for.
    """

    out: Float[Array, "T Hq Dv"]
    lse: Float[Array, "T Hq"]
    page_max: Float[Array, "T Hq M"] | None = None
    page_sum: Float[Array, "T Hq M"] | None = None
