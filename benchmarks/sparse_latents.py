"""Bytes that decoding with DeepSeek's sparse attention reads, against attention to all latents.

    python -m benchmarks.sparse_latents [--quick] [--json FILE]

Counted from what caches of DeepSeek-V3.2's shapes store and from the lists that kernels are given,
so it needs no accelerator and no weights.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from benchmarks import report
from benchmarks.report import Row
from kvjax.pallas_kernels import pages_of_tokens
from kvjax.spec import INDEX_FLOAT4, INDEX_FLOAT8, KVSpec, LayerSpec

AIM = "<= 0.125"
TOP = 2048
LATENT, ROPE, INDEX = 512, 64, 128
DENSE = LayerSpec.mla(LATENT, ROPE)
CHOOSES = LayerSpec.mla(LATENT, ROPE, index_dim=INDEX, top_tokens=TOP)
SHARES = LayerSpec.mla(LATENT, ROPE, top_tokens=TOP)
DTYPES = {"bfloat16": None, "float8": INDEX_FLOAT8, "float4": INDEX_FLOAT4}
RUN = 16  # tokens of a piece of text that is chosen whole


class Grain(NamedTuple):
    """What is read together: `tokens` of a page."""

    name: str
    tokens: int


GRAINS = (
    Grain("tokens (XLA)", 1),
    Grain("parts of 8 (kernels)", 8),
    Grain("pages of 16", 16),
    Grain("pages of 64", 64),
)


def choices(context: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Ids of the chosen tokens: any ones, and pieces of text that begin anywhere."""
    rng = np.random.default_rng(seed)
    starts = rng.choice(context // RUN - 1, TOP // RUN, replace=False) * RUN + rng.integers(RUN)
    return {
        "any tokens": rng.choice(context, TOP, replace=False),
        f"pieces of {RUN} tokens": (starts[:, None] + np.arange(RUN)).reshape(-1),
    }


def tokens_read(chosen: np.ndarray, context: int, grain: int) -> int:
    """Tokens that are read for a choice, as the kernels' lists name them."""
    tables = jnp.arange(context // grain, dtype=jnp.int32)[None]
    listed = pages_of_tokens(
        jnp.asarray(chosen, jnp.int32)[None], tables, num_pages=context // grain, page_size=grain
    )
    return int(listed.pages[0]) * grain


def least_rows(context: int) -> list[Row]:
    """Index keys and chosen latents, each once, a layer and step."""
    dense = KVSpec((DENSE,)).bytes_read_per_step(context)
    rows = []
    for name, index_dtype in DTYPES.items():
        for layers, who in (((CHOOSES,), ""), ((CHOOSES, *[SHARES] * 3), ", shared by 4 layers")):
            spec = KVSpec(layers, index_dtype=index_dtype)
            rows.append(
                Row(
                    claim=f"{context} tokens, {name} index keys{who}",
                    metric="read a layer and step",
                    unit="bytes",
                    ours=spec.bytes_read_per_step(context) / len(layers),
                    baseline="all latents",
                    baseline_value=dense,
                    aim=AIM if context == 32_768 else None,
                )
            )
    return rows


def amplified_rows(context: int) -> list[Row]:
    """The same with what is read beside the chosen tokens."""
    dense = KVSpec((DENSE,)).bytes_read_per_step(context)
    spec = KVSpec((CHOOSES,), index_dtype=INDEX_FLOAT8)
    latent = DENSE.elements_read_per_token * spec.bytes_per_element
    index = context * spec.index_bytes_per_token(CHOOSES)
    return [
        Row(
            claim=f"{context} tokens, float8 index keys, {kind}, {grain.name}: "
            f"{read / TOP:.1f} tokens for one",
            metric="read a layer and step",
            unit="bytes",
            ours=index + read * latent,
            baseline="all latents",
            baseline_value=dense,
        )
        for kind, chosen in choices(context).items()
        for grain in GRAINS
        for read in (tokens_read(chosen, context, grain.tokens),)
    ]


def main() -> None:
    """Count, and set the counts against attention to all latents."""
    options = report.parser(__doc__.splitlines()[0]).parse_args()
    contexts = [32_768] if options.quick else [8192, 32_768, 131_072]
    rows = [row for context in contexts for row in least_rows(context)]
    for context in contexts:
        rows += amplified_rows(context)
    body = (
        f"DeepSeek-V3.2's shapes: latents of {LATENT} + {ROPE} elements in bfloat16, index keys of "
        f"{INDEX} (a float8 or float4 key has a float32 scale), the best {TOP} tokens. Every index "
        "key is read in every step, so that the ratio cannot go below that of a key to a latent: "
        "0.22 in bfloat16, 0.11 in float8, 0.06 in float4, less where layers share a choice, as "
        f"GLM-5's do. The chosen tokens' latents add {TOP} tokens' at every context. With single "
        "tokens nothing else is read; a TPU copies at least 8 rows, and a page is the worst grain "
        "where any tokens may be chosen. Scores, 4 bytes a token written and read, are not counted."
    )
    report.finish(rows, options, name="sparse-latents", title="Sparse attention", body=body)


if __name__ == "__main__":
    main()
