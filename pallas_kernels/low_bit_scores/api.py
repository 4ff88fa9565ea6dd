"""The public function that scores pages by their low-bit keys, and its contract."""

from collections.abc import Mapping
from importlib import import_module

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from kvjax.pallas_kernels.support import Implementation, choose
from kvjax.pallas_kernels.validate_low_bit import check_low_bit


def low_bit_scores(
    q: Float[Array, "B Hq D"],
    pages: Mapping[str, Array],
    page_ids: Int32[Array, "B Hkv M"] | None,
    page_counts: Int32[Array, "B Hkv"],
    *,
    bits: int,
    scale: float | None = None,
    soft_cap: float | None = None,
    implementation: Implementation | None = None,
) -> Float32[Array, "B Hq M"]:
    """Score listed pages for one query a sequence, by keys of few bits that stay packed in memory.

    A page's score is the log-sum-exp of its tokens' attention scores, so exp(score - logsumexp over
    all pages) is the page's share of the softmax. Channel d of token t of a page is

        middle[d] * unit[1] + step[d] * unit[0] * (code[t, d] - (2**bits - 1) / 2)

    (per channel, the page as the group: KIVI's axis for keys, arXiv:2402.02750, section 3.2). Keys
    exist unpacked only a block at a time, never in device memory as a whole. Query head h reads KV
    head h // (Hq // Hkv). Sums are float32. What unlisted pages hold has no effect.

    Args:
        q: [B, Hq, D], float32, bfloat16 or float16, position encoding already applied.
        pages: a pool of N pages, head-major: `codes` (and at 3 bits `top`) uint8 [Hkv, N, rows, D],
            packed as `packed_bits` says; `step` and `middle` float8_e4m3fn [Hkv, N, D]; `unit`
            bfloat16 [Hkv, N, 2], powers of two for step and middle. P, from 8 to 128 tokens, is
            what the rows of `codes` hold.
        page_ids: int32 [B, Hkv, M], pages for each KV head to score; an entry exists if it is one
            of the list's first page_counts[b, h] and names a page from 0 to N - 1. None lists all
            pages of the pool, in order; M is N then.
        page_counts: int32 [B, Hkv]; what is past M does not count.
        bits: 2, 3 or 4, of each code.
        scale: factor of the scores; None means D ** -0.5.
        soft_cap: c in c * tanh(score / c) (Gemma 2, arXiv:2408.00118, section 2); None means no
            cap.
        implementation: None picks the Mosaic kernel on a TPU that can run it and XLA elsewhere;
            "reference", "xla", "tpu" or "gpu" insists.

    Returns:
        float32 [B, Hq, M]; -inf for entries that do not exist. A page whose step, middle or unit is
        NaN has a NaN score, and no other page has.

    Raises:
        ValueError: an argument breaks a rule above, or the named implementation cannot run (the
            message says why). Raised before anything is traced.
    """
    scale, page_size = check_low_bit(
        q, pages, page_ids, page_counts, bits=bits, scale=scale, soft_cap=soft_cap
    )
    chosen = choose(
        "low_bit_scores", implementation, head_dim=q.shape[2], page_size=page_size, dtype=q.dtype
    )
    # By name and only now: importing Pallas takes longer than importing JAX.
    backend = import_module(f"kvjax.pallas_kernels.low_bit_scores.{chosen}")
    kv_heads, num_pages, _ = pages["step"].shape
    every = jnp.broadcast_to(jnp.arange(num_pages, dtype=jnp.int32), (len(q), kv_heads, num_pages))
    ids = every if page_ids is None else jnp.asarray(page_ids)
    counts = jnp.clip(jnp.asarray(page_counts), 0, ids.shape[2])
    entry = jnp.arange(ids.shape[2], dtype=jnp.int32)[None, None]
    exists = (entry < counts[..., None]) & (ids >= 0) & (ids < num_pages)
    in_order = page_ids is None and chosen == "xla"  # which then gathers nothing
    scores: Array = getattr(backend, f"low_bit_scores_{chosen}")(
        jnp.asarray(q),
        {name: jnp.asarray(each) for name, each in pages.items()},
        None if in_order else jnp.clip(ids, 0, num_pages - 1),
        counts,
        bits=bits,
        scale=scale,
        soft_cap=soft_cap,
    )
    return jnp.where(jnp.repeat(exists, q.shape[1] // kv_heads, axis=1), scores, -jnp.inf)
