"""HBM bytes of the TPU attention kernels against the least possible.

    python -m benchmarks.kernel_traffic [--quick] [--json FILE]

Counted from the work lists that the kernels themselves run (tests check the count against an
interpreted kernel's copies), so it needs no TPU. Least is each needed key, value, query and output
byte once.
"""

import json
import pathlib
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

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


def row(
    claim: str, metric: str, unit: str, ours: float, baseline: str, least: float
) -> dict[str, Any]:
    ratio = ours / least
    return {
        "claim": claim,
        "metric": metric,
        "unit": unit,
        "ours": ours,
        "baseline": baseline,
        "baseline_value": least,
        "ratio": round(ratio, 4),
        "aim": f"<= {AIM}",
        "met": ratio <= AIM,
    }


def rows_of(call: Workload, traffic: Traffic) -> list[dict[str, Any]]:
    heads = call.heads
    kernel = "paged_attention" if call.queries is None else "ragged_paged_attention"
    shape = f"{heads.query_heads}/{heads.kv_heads} heads of {heads.head_dim}"
    metric = f"{kernel}: {call.name} ({shape})"
    read = traffic.kv_read + traffic.queries
    least = traffic.kv_needed + traffic.queries_needed
    once = "each needed byte once"
    rows = [row("the kernel reads no more than it must", metric, "HBM bytes", read, once, least)]
    if traffic.padding:
        padded = f"{metric}, with HBM rows padded to 128 lanes"
        rows.append(
            row(
                "the kernel reads no more than it must",
                padded,
                "HBM bytes",
                read + traffic.padding,
                once,
                least,
            )
        )
    if call.queries is not None and min(call.queries) > 1:
        intensity = (read + traffic.padding) / traffic.flops * V5E_RIDGE
        rows.append(
            {
                "claim": "prefill is not bound by memory",
                "metric": metric,
                "unit": "HBM time / MXU time on a v5e",
                "ours": round(intensity, 4),
                "baseline": "the MXU's time",
                "baseline_value": 1.0,
                "ratio": round(intensity, 4),
                "aim": "<= 1",
                "met": intensity <= 1,
            }
        )
    return rows


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Leave the longest contexts out.")] = False,
    json_file: Annotated[
        pathlib.Path | None, typer.Option("--json", help="Also write the rows here.")
    ] = None,
) -> None:
    """Count the kernels' HBM bytes and print them against the least possible."""
    console = Console()
    rows = []
    for call in track(workloads(quick), "counting", console=console, transient=True):
        rows += rows_of(call, count(call))
    table = Table(title="HBM traffic of the TPU attention kernels")
    for name, justify in (
        ("call", "left"),
        ("unit", "left"),
        ("ours", "right"),
        ("least", "right"),
    ):
        table.add_column(name, justify="left" if justify == "left" else "right")
    table.add_column("ratio", justify="right")
    table.add_column("aim", justify="right")
    table.add_column("met")
    for entry in rows:
        table.add_row(
            entry["metric"],
            entry["unit"],
            f"{entry['ours']:,}",
            f"{entry['baseline_value']:,}",
            f"{entry['ratio']:.3f}",
            entry["aim"],
            "yes" if entry["met"] else "no",
        )
    console.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
