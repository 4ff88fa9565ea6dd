"""The public function of attention in float8, and its contract."""

from importlib import import_module
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.pallas_kernels.packed_pages import PackedPages
from kvjax.pallas_kernels.support import Implementation, choose
from kvjax.pallas_kernels.validate_float8 import check_float8

Accumulator = Literal["native", "hopper"]


def float8_paged_attention(
    q: Float[Array, "B Hq D"],
    k_pages: PackedPages,
    v_pages: PackedPages,
    block_tables: Int32[Array, "B M"],
    lengths: Int32[Array, " B"],
    *,
    scale: float | None = None,
    flush_every: int | None = 1,
    accumulator: Accumulator = "native",
    implementation: Implementation | None = None,
) -> AttentionOutput:
    """Attend one query a sequence to float8 pages, both products being of float8 operands.

    `paged_attention` turns codes back into numbers and is exact; this multiplies the codes. Queries
    are rounded to float8_e4m3fn with a scale a head, a power of two by which its largest element
    comes to 128 to 256. Tokens are taken in tiles of as many pages as hold 128 tokens, at least
    one. A token's weight, exp(its score) times the scale of its value, is divided by the greatest
    weight of its tile and those before, and rounded to float8_e4m3fn, 256 standing for 1: what is
    below 2**-18 of it counts nothing. The softmax's denominator, and `lse`, are of weights that
    were not rounded. That is how FlashAttention-3 computes in FP8 (arXiv:2407.08608, section 3.3),
    but for the scales of values, which there are the sequence's.

    Two-level accumulation: the products of `flush_every` tiles are added up where the machine adds
    products, starting from 0, and then join a float32 sum. It matters where the machine keeps fewer
    bits than float32. NVIDIA's Ada and Hopper keep 14 for float8, so that with one level what is
    lost grows with the sequence: on 128k tokens, the needles that vLLM found fell from 91 % to
    13 %, and with two levels rose to 89 % (vllm-project/flash-attention, pull requests 104, 122).

    Row b reads slots 0 .. lengths[b] - 1 of the pages block_tables[b] names, as `paged_attention`
    does; nothing else in the pool has any effect, whatever it holds. Query head h uses KV head
    h // (Hq // Hkv).

    Args:
        q: [B, Hq, D], float32, bfloat16 or float16, position encoding already applied.
        k_pages: [N, Hkv, P, D], float8_e4m3fn codes whose scale is shared by at least a page's
            head ([N or 1, Hkv or 1, 1, 1]); P from 8 to 128 tokens.
        v_pages: [N, Hkv, P, Dv], packed likewise; Dv may differ from D.
        block_tables: int32 [B, M], page ids; unused entries hold N (or anything else from 0 up).
        lengths: int32 [B], cached tokens a sequence; 0 gives out 0.
        scale: factor of the scores; None means D ** -0.5.
        flush_every: tiles whose products are added up before they join the float32 sum; None means
            all of them, the single level.
        accumulator: "native" adds products as the machine does, in float32 on CPU and TPU.
            "hopper" adds them as an H100 does, in software (`float8_attention.hopper`): a model to
            see what it would lose, in "reference" and "xla" only.
        implementation: None picks the Mosaic kernel on a TPU that can run it and XLA elsewhere;
            "reference", "xla", "tpu" or "gpu" insists.

    Returns:
        The `AttentionOutput`, T = B, without page statistics.

    Raises:
        ValueError: an argument breaks a rule above, or the named implementation cannot run (the
            message says why). Raised before anything is traced.
    """
    scale = check_float8(
        q,
        k_pages,
        v_pages,
        block_tables,
        lengths,
        scale=scale,
        flush_every=flush_every,
        accumulator=accumulator,
        implementation=implementation,
    )
    chosen = choose(
        "float8_paged_attention",
        "xla" if implementation is None and accumulator == "hopper" else implementation,
        head_dim=q.shape[2],
        v_head_dim=v_pages.shape[3],
        page_size=k_pages.shape[2],
        dtype=q.dtype,
    )
    # By name and only now: importing Pallas takes longer than importing JAX.
    backend = import_module(f"kvjax.pallas_kernels.float8_attention.{chosen}")
    options = {} if chosen in ("tpu", "gpu") else {"accumulator": accumulator}
    result: AttentionOutput = getattr(backend, f"float8_paged_attention_{chosen}")(
        jnp.asarray(q),
        k_pages,
        v_pages,
        jnp.asarray(block_tables),
        jnp.asarray(lengths),
        scale=scale,
        flush_every=None if flush_every is None else int(flush_every),
        **options,
    )
    return result
