"""Writing a prefix to the page store against one flat TensorStore array of the same bytes.

    python -m benchmarks.store_writes            # about a minute
    python -m benchmarks.store_writes --quick

Both write through TensorStore's `file` driver with its `file_io_sync` on: a write returns when it
is on the disk. The flat array is written whole, once in each of a few chunk sizes, and the fastest
of these is the baseline. A page store besides writes checksums, tags, shard indexes and a manifest.
"""

import argparse
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
import tensorstore as ts
from rich.console import Console

from benchmarks import report
from benchmarks.report import Row
from kvjax.decode import PrefixConfig
from kvjax.storage.keys import Identity
from kvjax.storage.layout import Layout, numpy_dtype
from kvjax.storage.page_store import PageStore

LAYERS, HEADS, PAGE, DIM = 30, 3, 16, 64
"""Of SmolLM2-135M: 22.5 KiB a token."""

PAGES, QUICK_PAGES = 500, 16
REPEATS, QUICK_REPEATS = 5, 1
FLAT_CHUNKS = (1 << 20, 4 << 20, 16 << 20, 64 << 20)
"""Bytes of a chunk, and so of a file, of the flat array; about, so that all chunks are full."""

LAYOUTS = {
    "a head of a layer": PrefixConfig(),
    "a layer": PrefixConfig(who="layer"),
    "a period": PrefixConfig(who="period"),
}
"""What one unit holds."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    options = report.parser(__doc__.splitlines()[0])
    options.add_argument("--pages", type=int, default=None, help=f"by default {PAGES}")
    options.add_argument("--repeats", type=int, default=None, help=f"by default {REPEATS}")
    options.add_argument("--folder", type=pathlib.Path, help="where to write; by default /tmp")
    parsed = options.parse_args(arguments)
    parsed.pages = parsed.pages or (QUICK_PAGES if parsed.quick else PAGES)
    parsed.repeats = parsed.repeats or (QUICK_REPEATS if parsed.quick else REPEATS)
    return parsed


def main() -> int:
    """Run the benchmark."""
    options = parse()
    with Console(stderr=True).status("writing") as status:
        rows = measure(options.pages, options.repeats, options.folder, status.update)
    report.finish(
        rows,
        options,
        name="store writes",
        title="Writing a prefix to the page store",
        body=f"{options.pages} pages of {PAGE} tokens of SmolLM2-135M's shape in bfloat16, every "
        f"write on the disk before it returns; medians of {options.repeats} rounds, in each of "
        f"which everything is written once.",
    )
    return 0


def measure(
    pages: int, repeats: int, folder: pathlib.Path | None, say: Callable[[str], None]
) -> list[Row]:
    """Seconds of every way of writing, in turns, as rows.

    Args:
      pages: of the prefix.
      repeats: rounds.
      folder: where to write.
      say: what is being done.
    """
    bits = np.random.default_rng(0).integers(0, 1 << 14, (2, LAYERS, pages, HEADS, PAGE, DIM))
    both = bits.astype(np.uint16).view(numpy_dtype("bfloat16"))
    flat = both.reshape(-1).view(np.uint8)
    seconds: dict[str, list[float]] = {}
    for turn in range(repeats):
        for size in FLAT_CHUNKS:
            with tempfile.TemporaryDirectory(dir=folder) as root:
                say(f"round {turn + 1} of {repeats}: flat, chunks of {size >> 20} MiB")
                seconds.setdefault(f"flat {size}", []).append(_write_flat(root, flat, size))
        for name, config in LAYOUTS.items():
            with tempfile.TemporaryDirectory(dir=folder) as root:
                say(f"round {turn + 1} of {repeats}: page store, a unit is {name}")
                layout = config.layout(PAGE, LAYERS, HEADS)
                seconds.setdefault(name, []).append(_write_store(root, both, layout))
    median = {name: statistics.median(times) for name, times in seconds.items()}
    best = min((size for size in FLAT_CHUNKS), key=lambda size: median[f"flat {size}"])
    return [
        Row(
            claim=f"a unit is {name}",
            metric="bytes of keys and values a second",
            unit="MB/s",
            ours=flat.nbytes / median[name] / 1e6,
            baseline=f"one flat array in chunks of {best >> 20} MiB",
            baseline_value=flat.nbytes / median[f"flat {best}"] / 1e6,
            aim=">= 0.8",
        )
        for name in LAYOUTS
    ]


def _write_flat(root: str, flat: np.ndarray, chunk: int) -> float:
    """Seconds to write an array of bytes [n]."""
    count = max(1, round(len(flat) / chunk))
    chunk = -(-len(flat) // count)
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{root}/flat/"},
        "metadata": {
            "shape": [len(flat)],
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [chunk]}},
            "codecs": [{"name": "bytes"}],
        },
    }
    context = ts.Context({"file_io_sync": True, "cache_pool": {"total_bytes_limit": 0}})
    array = ts.open(spec, create=True, context=context).result()
    began = time.perf_counter()
    array.write(flat).result()
    return time.perf_counter() - began


def _write_store(root: str, both: np.ndarray, layout: Layout) -> float:
    """Seconds to put keys and values [2, L, N, H, P, D] into a new store."""
    store = PageStore.open(root)
    tokens = np.arange(both.shape[2] * PAGE, dtype=np.int32)
    began = time.perf_counter()
    store.put(Identity("0" * 64, "measured"), tokens, both[0], both[1], layout=layout)
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
