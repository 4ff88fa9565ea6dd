"""HBM bytes of the TPU attention kernels against the least possible.

    python -m benchmarks.kernel_traffic [--quick] [--json FILE]

Counted from the work lists that the kernels themselves run (tests check the count against an
interpreted kernel's copies), so it needs no TPU. Least is each needed key, value, query and output
byte once.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks import report
from benchmarks.report import Row
from kvjax.pallas_kernels.mosaic.traffic import Heads, Traffic, decode_traffic, ragged_traffic

AIM = 1.05
LLAMA = Heads(query_heads=32, kv_heads=8, head_dim=128, page_size=16, itemsize=2)
GEMMA = Heads(query_heads=4, kv_heads=1, head_dim=256, page_size=16, itemsize=2, window=512)
SMOLLM = Heads(query_heads=9, kv_heads=3, head_dim=64, page_size=16, itemsize=2)
# bfloat16 operations a byte of HBM traffic at which a TPU v5e's two limits meet: 197 T / 819 G.
V5E_RIDGE = 197e12 / 819e9


class Workload(NamedTuple):
    """One call: `queries` is None for decode, else how many queries each sequence has."""

    name: str
    heads: Heads
    lengths: list[int]
    queries: list[int] | None = None


def workloads(quick: bool) -> list[Workload]:
    """The calls that are counted, all at contexts of 2k and above, of uneven lengths."""
    rng = np.random.default_rng(0)

    def near(context: int, batch: int = 8) -> list[int]:
        return [context + int(extra) for extra in rng.integers(1, 64, batch)]

    contexts = [2048, 8192] if quick else [2048, 8192, 32_768, 131_072]
    calls = [Workload(f"decode, {context} tokens", LLAMA, near(context)) for context in contexts]
    calls += [
        Workload("decode, 8192 tokens, pages of 8", LLAMA._replace(page_size=8), near(8192)),
        Workload("decode, 8192 tokens, pages of 64", LLAMA._replace(page_size=64), near(8192)),
        Workload("decode, 8192 tokens, pages of 128", LLAMA._replace(page_size=128), near(8192)),
        Workload("decode, 8192 tokens, window of 512", GEMMA, near(8192)),
        Workload(
            "decode, 8192 tokens, window of 4096, 4 sinks",
            LLAMA._replace(window=4096, sink_tokens=4),
            near(8192),
        ),
        Workload("decode, 8192 tokens", SMOLLM, near(8192)),
        Workload("8 decodes at 8192", LLAMA, near(8192), [1] * 8),
        Workload("8 decodes and a chunk of 512 at 8192", LLAMA, near(8192, 9), [1] * 8 + [504]),
        Workload("a chunk of 512 at 8192", LLAMA, [8704], [512]),
        Workload("a prompt of 8192 in one call", LLAMA, [8192], [8192]),
    ]
    return calls


def count(call: Workload) -> Traffic:
    width = -(-max(call.lengths) // call.heads.page_size)
    lengths = jnp.asarray(call.lengths, jnp.int32)
    if call.queries is None:
        return decode_traffic(lengths, width, call.heads)
    starts = jnp.asarray(np.concatenate([[0], np.cumsum(call.queries)]), jnp.int32)
    return ragged_traffic(lengths, starts, width, call.heads)


def rows_of(call: Workload, traffic: Traffic) -> list[Row]:
    """Bytes moved against bytes needed, and for prefill their time against the arithmetic's."""
    heads = call.heads
    claim = f"{call.name} ({heads.query_heads}/{heads.kv_heads} heads of {heads.head_dim})"
    read = traffic.kv_read + traffic.queries
    least = traffic.kv_needed + traffic.queries_needed

    def bytes_row(claim: str, moved: int) -> Row:
        return Row(
            claim=claim,
            metric="HBM traffic",
            unit="bytes",
            ours=moved,
            baseline="each needed byte once",
            baseline_value=least,
            aim=f"<= {AIM}",
        )

    rows = [bytes_row(claim, read)]
    if traffic.padding:
        rows.append(bytes_row(f"{claim}, rows padded to 128 lanes", read + traffic.padding))
    if call.queries is not None and min(call.queries) > 1:
        rows.append(
            Row(
                claim=f"{claim}, on a v5e",
                metric="HBM time / MXU time",
                unit="",
                ours=(read + traffic.padding) / traffic.flops * V5E_RIDGE,
                aim="<= 1",
            )
        )
    return rows


def main() -> None:
    """Count the kernels' HBM bytes and set them against the least possible."""
    options = report.parser(__doc__.splitlines()[0]).parse_args()
    rows: list[Row] = []
    for call in track(workloads(options.quick), "counting", console=Console(), transient=True):
        rows += rows_of(call, count(call))
    body = (
        "Counted from the work lists that the kernels run; tests hold the count to the copies of "
        "an interpreted kernel. Least is every needed key, value, query and output byte once. "
        "Where an aim is missed: XLA pads rows of fewer than 128 lanes in HBM, and a prompt "
        "prefilled in one call reads its keys once for each block of queries, which the "
        "arithmetic hides."
    )
    report.finish(rows, options, name="kernel-traffic", title="HBM traffic on TPU", body=body)


if __name__ == "__main__":
    main()
