"""What `generate`, `score` and `demo` have in common: opening a model, and telling what it did."""

import dataclasses
import time
from pathlib import Path
from typing import Any

from kvjax import programs
from kvjax.cli.console import Bars, size_of, table
from kvjax.cli.tiers import tier_rows
from kvjax.decode import PrefixStats, Stats
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
    if stats.tiers is None:
        pages = f"{stats.pages_used:,} / {stats.pages_total:,} of {stats.page_size}"
        rows.append(("pages used / total", pages))
    for dtype, count in stats.cache_bytes.items():
        rows.append((f"cache, {dtype}", size_of(count)))
    rows.append(("a stored token takes", size_of(round(stats.bytes_per_token))))
    if stats.state_bytes:
        rows.append(("and a sequence, however long", size_of(stats.state_bytes)))
    if stats.bytes_read_per_step is not None:
        rows.append(("a step reads, of the cache", size_of(stats.bytes_read_per_step)))
    if stats.prefix is not None:
        rows += prefix_rows(stats.prefix)
    if stats.tiers is not None:
        rows += tier_rows(stats.tiers)
    if stats.prefix_unused is not None:
        rows.append(("stored pages", f"not used: {stats.prefix_unused}"))
    if verbose:
        rows.append(("load", f"{load_seconds:.2f} s"))
        rows.append(("compile", f"{stats.compile_seconds:.2f} s, {stats.compilations} programs"))
        if stats.ttft_seconds is not None and stats.decode_seconds is not None:
            rows.append(("prefill", f"{stats.ttft_seconds:.2f} s"))
            rows.append(("decode", f"{stats.decode_seconds:.2f} s"))
        else:
            rows.append(("run", f"{stats.run_seconds:.2f} s"))
    table(rows)


def prefix_rows(prefix: PrefixStats) -> list[tuple[str, str]]:
    """What a stored prefix gave, as rows of a table."""
    amplification = prefix.read_amplification
    return [
        ("stored pages attended to", f"{prefix.pages_chosen:,} of {prefix.pages:,}"),
        ("read from the store", size_of(prefix.bytes_read)),
        ("of which guessed wrong", size_of(prefix.bytes_wasted)),
        ("read to choose pages by", size_of(prefix.sketch_bytes + prefix.bytes_scored)),
        ("shard indexes and checksums", size_of(prefix.index_bytes)),
        ("read / used, guesses apart", "-" if amplification is None else f"{amplification:.2f}"),
        (
            "already in memory",
            f"{prefix.device_hits + prefix.host_hits:,} of {prefix.units:,} reads",
        ),
        ("waited for reads", f"{prefix.wait_seconds:.3f} s"),
        ("reads were under way", f"{prefix.read_seconds:.3f} s"),
    ]


def stats_as_json(stats: Stats, load_seconds: float) -> dict[str, Any]:
    """The statistics as a JSON object."""
    return {
        **dataclasses.asdict(stats),
        "tokens_per_second": stats.tokens_per_second,
        "load_seconds": load_seconds,
    }
