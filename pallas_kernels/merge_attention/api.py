"""The public function that merges partial attention, and its contract."""

from importlib import import_module
from math import prod

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.support import Implementation, choose
from kvjax.pallas_kernels.validate import check_parts


def merge_attention(
    out: Float[Array, "n *rows D"],
    lse: Float[Array, "n *rows"],
    *,
    implementation: Implementation | None = None,
) -> AttentionOutput:
    """Merge attention of the same queries over n disjoint sets of keys into attention over all.

    Part i's values count with the weight exp(lse[i] - lse), lse being the logarithm of the sum of
    exp(lse[i]) (FlashAttention, arXiv:2205.14135, section 3.1; the cascade of a shared prefix and
    what follows it, arXiv:2501.01005, section 3.1.2). A part whose lse is -inf saw no key: it
    contributes nothing, whatever its values are, NaN too. All arithmetic is float32. An attention
    sink is a part of value 0 whose lse is the sink's logit.

    Args:
        out: [n, ..., D], float32, bfloat16 or float16: each part's normalized output.
        lse: float32 [n, ...], each part's log-sum-exp.
        implementation: None picks XLA, on every platform: the merge is one pass over `out`, and
            XLA fuses it with what made the parts and with what takes the result. "reference",
            "xla", "tpu" or "gpu" insists.

    Returns:
        The `AttentionOutput` without page statistics: `out` [..., D] in out's dtype, 0 where no
        part saw a key; `lse` float32 [...], -inf there.

    Raises:
        ValueError: an argument breaks a rule above, or the named implementation cannot run (the
            message says why). Raised before anything is traced.
    """
    check_parts(out, lse)
    chosen = choose(
        "merge_attention",
        "xla" if implementation is None else implementation,
        head_dim=out.shape[-1],
        dtype=out.dtype,
    )
    backend = import_module(f"kvjax.pallas_kernels.merge_attention.{chosen}")
    count, rows, width = out.shape[0], out.shape[1:-1], out.shape[-1]
    merged: AttentionOutput = getattr(backend, f"merge_attention_{chosen}")(
        jnp.asarray(out).reshape(count, prod(rows), width),
        jnp.asarray(lse).reshape(count, prod(rows)),
    )
    return AttentionOutput(merged.out.reshape(*rows, width), merged.lse.reshape(rows))
