"""SplitZip in NumPy and in JAX against zstd and blosc, on a real model's keys and values.

    python -m benchmarks.lossless            # about a minute
    python -m benchmarks.lossless --quick

A text is prefilled; its keys and values in bfloat16 are encoded and decoded page by page, a page of
one layer and KV head at a time, as the page store keeps them, and in pieces of 1 MiB. The codebook
comes from another text. zstd and blosc are TensorStore's zarr3 codecs, a chunk a page or piece,
in memory and with one thread; "no codec" is what that costs without any. Seconds are those of the
processor, of all threads, so that other work on the machine counts little.
"""

import argparse
import dataclasses
import functools
import importlib.resources
import math
import operator
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorstore as ts
from rich.console import Console

from benchmarks import needles, report
from benchmarks.report import Row
from kvjax.config import CacheConfig
from kvjax.decode.inputs import token_ids
from kvjax.decode.prefilled_pages import prefilled_pages
from kvjax.formats import lossless
from kvjax.load import load
from kvjax.programs import keep_programs
from kvjax.storage import splitzip

TOKENS, QUICK_TOKENS = 4096, 512
PIECE = 1 << 19
"""Numbers in a piece of 1 MiB."""

SHARD = 256
"""Rows in a file of TensorStore's."""

REPEATS, QUICK_REPEATS = 5, 1

Codec = list[dict[str, Any]]


def zstd(level: int) -> Codec:
    """TensorStore's zstd."""
    return [{"name": "zstd", "configuration": {"level": level}}]


def blosc(name: str, level: int) -> Codec:
    """TensorStore's blosc, with bits shuffled."""
    settings = {"cname": name, "clevel": level, "shuffle": "bitshuffle", "typesize": 2}
    return [{"name": "blosc", "configuration": settings | {"blocksize": 0}}]


BASELINES: dict[str, Codec] = {
    "no codec": [],
    "zstd, level 1": zstd(1),
    "zstd, level 3": zstd(3),
    "blosc: bits shuffled, LZ4": blosc("lz4", 5),
    "blosc: bits shuffled, zstd level 1": blosc("zstd", 1),
}


@dataclasses.dataclass(frozen=True)
class Point:
    """What one codec did to some rows of numbers."""

    codec: str
    numbers: int  # a row
    share: float  # of the bytes that are left
    encode: float  # bytes of the numbers, a second of the processor
    decode: float


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    options = report.parser(__doc__.splitlines()[0])
    options.add_argument("--model", default="smollm2-135m", help="a name or a GGUF file")
    options.add_argument("--tokens", type=int, default=None, help=f"by default {TOKENS}")
    parsed = options.parse_args(arguments)
    parsed.tokens = parsed.tokens or (QUICK_TOKENS if parsed.quick else TOKENS)
    parsed.repeats = QUICK_REPEATS if parsed.quick else REPEATS
    return parsed


def main() -> int:
    """Run the benchmark."""
    options = parse()
    keep_programs()
    with Console(stderr=True).status("prefilling") as status:
        both, other = prefilled(options.model, options.tokens)
        points, body = measured(both, other, options.repeats, status.update)
    report.finish(
        rows_of(points),
        options,
        name="lossless",
        title="Keys and values without loss in fewer bytes",
        body=f"{options.model}, {options.tokens:,} tokens of Python's language reference, K and V "
        f"of all layers in bfloat16; the codebook is of the address of 1790 that ships with "
        f"kvjax. Seconds are the processor's, of all threads; medians of {options.repeats} rounds. "
        f"Rows of 4 KiB are the store's pages: there TensorStore's own work for each chunk, which "
        f"'no codec' shows, is most of what zstd and blosc take; rows of 1 MiB show the codecs. "
        f"{body}",
    )
    return 0


def prefilled(name: str, tokens: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Keys and values [L, N, H, P, D] in bfloat16 of two texts.

    Args:
      name: of the model.
      tokens: of the longer text.
    """
    model = load(name, dtype="float32")
    address = importlib.resources.files("kvjax") / "data" / "state_of_the_union_1790.txt"
    found = []
    for text, count in ((needles.text(), tokens), (address.read_text(encoding="utf-8"), 1024)):
        ids = token_ids(model, text[: 8 * count])[:count]
        cache = CacheConfig(dtype="bfloat16")
        pages = prefilled_pages(model, ids, cache, 512, lambda phase, share: None)
        found.append([pages.keys, pages.values])
    return found[0], found[1]


def measured(
    both: list[np.ndarray], other: list[np.ndarray], repeats: int, say: Callable[[str], None]
) -> tuple[list[Point], str]:
    """What every codec does to pages and to pieces, and a text that says so.

    Args:
      both: keys and values [L, N, H, P, D].
      other: those that the codebook is made of.
      repeats: rounds.
      say: what is being done.
    """
    codebook = splitzip.fit_codebook(*other)
    points = []
    for rows in (pages_of(*both), pieces_of(*both)):
        points += measure(rows, codebook, repeats, say)
    shares = [
        f"{share_of_escapes(x, codebook):.3%} of the numbers in {name} have an exponent without a "
        f"code ({share_of_escapes(x, splitzip.fit_codebook(x)):.3%} by a codebook of its own)"
        for name, x in zip("KV", both, strict=True)
    ]
    headings = ("codec", "a row", "bytes left", "encoding", "decoding")
    lines = [
        (
            point.codec,
            f"{point.numbers // 512:,} KiB",
            f"{point.share:.1%}",
            f"{point.encode / 1e6:,.0f} MB/s",
            f"{point.decode / 1e6:,.0f} MB/s",
        )
        for point in points
    ]
    return points, f"{'; '.join(shares)}.\n\n{report.markdown_table(headings, lines)}"


def pages_of(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Rows [L * N * H, 2 * P * D]: a page of one layer and KV head, its keys and its values."""
    both = np.stack([keys.view(np.uint16), values.view(np.uint16)], axis=3)
    return both.reshape(-1, math.prod(both.shape[3:])).view(keys.dtype)


def pieces_of(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Rows of at most 1 MiB, of keys first."""
    flat = np.concatenate([keys.view(np.uint16).reshape(-1), values.view(np.uint16).reshape(-1)])
    size = min(PIECE, len(flat))
    return flat[: len(flat) // size * size].reshape(-1, size).view(keys.dtype)


def share_of_escapes(numbers: np.ndarray, codebook: np.ndarray) -> float:
    """The share of numbers whose exponent has no code."""
    return float(splitzip.count_escapes(numbers.reshape(-1), codebook)) / numbers.size


def measure(
    rows: np.ndarray, codebook: np.ndarray, repeats: int, say: Callable[[str], None]
) -> list[Point]:
    """What every codec does to rows of numbers, in turns.

    Args:
      rows: bfloat16 [n, m].
      codebook: of splitzip.
      repeats: rounds.
      say: what is being done.

    Raises:
      AssertionError: what was decoded is not what was encoded.
    """
    ways = {"SplitZip, NumPy": _numpy(rows, codebook), "SplitZip, JAX": _jax(rows, codebook)}
    for name, codec in BASELINES.items():
        ways[name] = _tensorstore(rows, codec)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    sizes = {}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            say(f"{name}, rows of {rows.shape[1] // 512} KiB, round {turn} of {repeats}")
            began = time.process_time()
            encoded = way.encode()
            between = time.process_time()
            back = way.decode(encoded)
            seconds[name].append((between - began, time.process_time() - between))
            if not turn:  # which compiles, and is not counted
                if np.asarray(back).tobytes() != rows.tobytes():
                    raise AssertionError(f"{name}: what was decoded is not what was encoded")
                sizes[name] = way.size(encoded)
                seconds[name].clear()
    return [
        Point(
            name,
            rows.shape[1],
            sizes[name] / rows.nbytes,
            *(rows.nbytes / statistics.median(times) for times in zip(*taken, strict=True)),
        )
        for name, taken in seconds.items()
    ]


def rows_of(points: list[Point]) -> list[Row]:
    """SplitZip against the best of the others in each respect, for each size of rows."""
    rows = []
    for numbers in sorted({point.numbers for point in points}):
        here = [point for point in points if point.numbers == numbers]
        others = [x for x in here if x.codec in BASELINES and x.codec != "no codec"]
        numpy, jax_ = here[:2]
        for ours in (numpy, jax_):
            smallest = min(others, key=lambda x: x.share)
            found = [("bytes left", "%", 100 * ours.share, smallest.codec, 100 * smallest.share)]
            for metric, rate in (("encoding", "encode"), ("decoding", "decode")):
                best = max(others, key=operator.attrgetter(rate))
                mine, theirs = getattr(ours, rate) / 1e6, getattr(best, rate) / 1e6
                found.append((metric, "MB/s", mine, best.codec, theirs))
            rows += [
                Row(
                    claim=f"{ours.codec}, rows of {numbers // 512:,} KiB",
                    metric=metric,
                    unit=unit,
                    ours=value,
                    baseline=f"the best of four: {codec}",
                    baseline_value=other,
                    aim="<= 1" if unit == "%" else ">= 1",
                )
                for metric, unit, value, codec, other in found[ours is jax_ :]  # the same bytes
            ]
    return rows


class Way(NamedTuple):
    """One codec, ready to run on some rows."""

    encode: Callable[[], Any]
    decode: Callable[[Any], Any]
    size: Callable[[Any], int]  # bytes of what `encode` gave


def _numpy(rows: np.ndarray, codebook: np.ndarray) -> Way:
    room = int(splitzip.count_escapes(rows, codebook).max())
    return Way(
        encode=lambda: splitzip.encode(rows, codebook, room).rows,
        decode=lambda encoded: splitzip.decode(encoded, codebook, rows.shape[1]),
        size=lambda encoded: encoded.nbytes,
    )


def _jax(rows: np.ndarray, codebook: np.ndarray) -> Way:
    room = int(splitzip.count_escapes(rows, codebook).max())
    numbers, book = jax.device_put((rows, codebook))
    encode: Any = jax.jit(functools.partial(lossless.encode, room=room))
    decode: Any = jax.jit(functools.partial(lossless.decode, n=rows.shape[1]))
    return Way(
        encode=lambda: jax.block_until_ready(encode(numbers, book).rows),
        decode=lambda encoded: jax.block_until_ready(decode(encoded, book)),
        size=lambda encoded: encoded.nbytes,
    )


def _tensorstore(rows: np.ndarray, codec: Codec) -> Way:
    count, numbers = rows.shape
    plain = {"name": "bytes", "configuration": {"endian": "little"}}
    sharding = {
        "chunk_shape": [1, numbers],
        "codecs": [plain, *codec],
        "index_codecs": [plain, {"name": "crc32c"}],
    }
    shard = min(count, SHARD)
    metadata = {
        "shape": [count, numbers],
        "data_type": "bfloat16",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [shard, numbers]}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    one_thread = {"data_copy_concurrency": {"limit": 1}, "cache_pool": {"total_bytes_limit": 0}}
    spec = {
        "driver": "zarr3",
        "kvstore": "memory://",
        "metadata": metadata,
        "store_data_equal_to_fill_value": True,
    }
    array = ts.open(spec, create=True, context=ts.Context(one_thread)).result()

    def size(_: Any) -> int:
        names = [name for name in array.kvstore.list().result() if name.startswith(b"c/")]
        indexes = len(names) * (16 * shard + 4)
        return sum(len(array.kvstore[name]) for name in names) - indexes

    return Way(
        encode=lambda: array.write(rows).result(), decode=lambda _: array.read().result(), size=size
    )


if __name__ == "__main__":
    sys.exit(main())
