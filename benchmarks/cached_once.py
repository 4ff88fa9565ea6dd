"""What a decoder-decoder (YOCO) keeps and reads, and what gated retention costs beside a window.

    python -m benchmarks.cached_once [--quick] [--json FILE]

Bytes are of caches as they are allocated and of what steps must read. Time is of one layer with
random numbers.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from benchmarks import report
from benchmarks.report import Row
from kvjax.cache import init, pool_bytes
from kvjax.decode.attend_retention import retain_chunk, retain_token
from kvjax.model import kv_spec
from kvjax.models import LayerConfig, ModelConfig
from kvjax.pallas_kernels import paged_attention, ragged_paged_attention
from kvjax.spec import KVSpec, pages_for

WINDOW, CHUNK, PAGE = 1024, 512, 16
HEADS, DIM = 24, 128
CROSS = LayerConfig(HEADS, 8, DIM)
SELF = {
    "gated retention": LayerConfig(HEADS, HEADS, DIM, retention=True),
    f"windows of {WINDOW}": LayerConfig(HEADS, HEADS, DIM, window=WINDOW),
}


def spec_of(layers: tuple[LayerConfig, ...], cross_from: int | None) -> KVSpec:
    """What the cache of a model of the release's 3B sizes stores, in bfloat16."""
    sizes = {"vocab_size": 100_352, "hidden_size": HEADS * DIM, "intermediate_size": 8192}
    config = ModelConfig("yoco", **sizes, layers=layers, max_context=2**20, cross_from=cross_from)
    return kv_spec(config, "bfloat16")


def specs() -> dict[str, KVSpec]:
    """By self-decoder; the last is of as many layers with keys and values of their own."""
    return {
        **{name: spec_of((layer,) * 13 + (CROSS,) * 13, 13) for name, layer in SELF.items()},
        "all layers": spec_of((CROSS,) * 26, None),
    }


def allocated(spec: KVSpec, tokens: int) -> int:
    """Bytes of the cache of one sequence, rings where layers have windows."""
    pages = pages_for(tokens, PAGE)
    sizes = {"num_pages": pages, "batch": 1, "max_pages": pages, "page_size": PAGE}
    cache = jax.eval_shape(lambda: init(spec, **sizes, window_chunk=CHUNK))
    return sum(pool_bytes(cache).values())


def counted_rows(tokens: int) -> list[Row]:
    """What is kept of a context, and what a step reads of it."""
    *ours, (_, plain) = specs().items()
    metrics = (
        ("allocated a sequence", lambda spec: allocated(spec, tokens)),
        ("read a step", lambda spec: spec.bytes_read_per_step(tokens)),
    )
    return [
        Row(
            claim=f"{tokens:,} tokens, {name}",
            metric=metric,
            unit="bytes",
            ours=count(spec),
            baseline="keys and values in all layers",
            baseline_value=count(plain),
        )
        for name, spec in ours
        for metric, count in metrics
    ]


def layer_calls() -> dict[str, dict[str, Callable[[], Array]]]:
    """A chunk of a prompt and a step, each by retention and by a window that is full."""
    rng = np.random.default_rng(0)

    def drawn(*size: int) -> Float32[Array, "..."]:
        return jnp.asarray(rng.normal(size=size), jnp.float32)

    q, k, v = drawn(3, CHUNK, HEADS, DIM)
    gates, states = -jnp.abs(drawn(CHUNK, HEADS)) / 16, drawn(1, HEADS, DIM, DIM)
    count = 2 * WINDOW // PAGE
    pools = drawn(count, HEADS, PAGE, DIM), drawn(count, HEADS, PAGE, DIM)
    tables, starts = jnp.arange(count, dtype=jnp.int32)[None], jnp.asarray([0, CHUNK], jnp.int32)
    lengths, stores = jnp.asarray([2 * WINDOW], jnp.int32), jnp.ones((1,), bool)
    how = {"scale": DIM**-0.5, "window": WINDOW, "implementation": "xla"}
    chunk, token = jax.jit(retain_chunk), jax.jit(retain_token)
    seen = jax.jit(lambda q: ragged_paged_attention(q, *pools, tables, lengths, starts, **how).out)
    step = jax.jit(lambda q: paged_attention(q, *pools, tables, lengths, **how).out)
    return {
        f"a chunk of {CHUNK} tokens": {
            "ours": lambda: chunk(states, q, k, v, gates, starts)[0],
            "window": lambda: seen(q),
        },
        "a step": {
            "ours": lambda: token(states, q[:1], k[:1], v[:1], gates[:1], stores)[0],
            "window": lambda: step(q[:1]),
        },
    }


def timed_rows(times: int) -> list[Row]:
    """Seconds of both in turn, the least of some times each."""
    rows = []
    for what, calls in layer_calls().items():
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(times + 1):  # the first compiles
            for name, call in calls.items():
                began = time.perf_counter()
                call().block_until_ready()
                seconds[name].append(time.perf_counter() - began)
        rows.append(
            Row(
                claim=f"{what}, gated retention",
                metric="time of a layer, XLA, float32",
                unit="s",
                ours=min(seconds["ours"][1:]),
                baseline=f"attention to a window of {WINDOW}",
                baseline_value=min(seconds["window"][1:]),
            )
        )
    return rows


def main() -> None:
    """Count caches, and time a layer."""
    options = report.parser(__doc__.splitlines()[0]).parse_args()
    contexts = [32_768] if options.quick else [4096, 32_768, 131_072, 1_048_576]
    rows = [row for context in contexts for row in counted_rows(context)]
    rows += timed_rows(1 if options.quick else 10)
    retention = specs()["gated retention"]
    body = (
        "The sizes of YOCO's 3B release: 26 layers, of which 13 are the self-decoder, with 24 "
        "heads of 128, and 8 KV heads where keys and values are kept. A token adds "
        f"{retention.bytes_per_token:,} bytes, and a sequence of any length has "
        f"{retention.state_bytes:,} bytes of float32 states under gated retention. Each of the 13 "
        "cross-decoder layers reads the one layer that is kept, so that reads shrink by half where "
        "capacity shrinks by 26. Time is of one layer on this machine's CPU, the least of ten in "
        "turn; projections are not in it."
    )
    report.finish(rows, options, name="cached-once", title="Keys and values made once", body=body)


if __name__ == "__main__":
    main()
