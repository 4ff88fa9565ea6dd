"""What `generate`, `score` and `demo` have in common: opening a model, and telling what it did."""

import dataclasses
import time
from pathlib import Path
from typing import Any

from kvjax import programs
from kvjax.cli.console import Bars, size_of, table
from kvjax.decode import Stats
from kvjax.load import load
from kvjax.model import Model


def open_model(
    name: str, *, dtype: str, cache_dir: Path | None, progress: Bars
) -> tuple[Model, float]:
    """Opens a model, with compiled programs kept between runs.

    Returns:
      The model, and the seconds it took.
    """
    programs.keep_programs(cache_dir)
    began = time.perf_counter()
    model = load(name, dtype=dtype, cache_dir=cache_dir, progress=progress.share)  # type: ignore[arg-type]
    return model, time.perf_counter() - began


def show_stats(model: Model, stats: Stats, load_seconds: float, *, verbose: bool = False) -> None:
    """Writes the closing table."""
    rows = [("model", f"{model.name} ({model.dtype})")]
    rows.append(("prompt tokens", f"{stats.prompt_tokens:,}"))
    if stats.new_tokens:
        rows.append(("new tokens", f"{stats.new_tokens:,}"))
        if stats.ttft_seconds is not None:
            rows.append(("time to first token", f"{stats.ttft_seconds:.2f} s"))
        rows.append(("tokens a second", f"{stats.tokens_per_second:.1f}"))
    rows.append(
        ("pages used / total", f"{stats.pages_used:,} / {stats.pages_total:,} of {stats.page_size}")
    )
    for dtype, count in stats.cache_bytes.items():
        rows.append((f"cache, {dtype}", size_of(count)))
    if verbose:
        rows.append(("load", f"{load_seconds:.2f} s"))
        rows.append(("compile", f"{stats.compile_seconds:.2f} s, {stats.compilations} programs"))
        if stats.ttft_seconds is not None and stats.decode_seconds is not None:
            rows.append(("prefill", f"{stats.ttft_seconds:.2f} s"))
            rows.append(("decode", f"{stats.decode_seconds:.2f} s"))
        else:
            rows.append(("run", f"{stats.run_seconds:.2f} s"))
    table(rows)


def stats_as_json(stats: Stats, load_seconds: float) -> dict[str, Any]:
    """The statistics as a JSON object."""
    return {
        **dataclasses.asdict(stats),
        "tokens_per_second": stats.tokens_per_second,
        "load_seconds": load_seconds,
    }
