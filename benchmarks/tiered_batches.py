"""Decoding batches over selected pages: tokens a second, bytes moved, and time spent on fetching.

    python -m benchmarks.tiered_batches                     # about half an hour
    python -m benchmarks.tiered_batches --quick             # a short document, within minutes

Every row of a batch is another part of a long document; the 32 tokens that follow it are decoded
one by one. Every method decodes the same tokens.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

from benchmarks import needles, report
from benchmarks.tiered_measure import rules
from benchmarks.tiered_methods import EXACT, METHODS, OURS, PACKED, SYSTEMS, Method, place
from kvjax.config import CacheConfig
from kvjax.decode.generate import prefill
from kvjax.decode.inputs import flat_prompts
from kvjax.decode.program import compiled
from kvjax.decode.shapes import plan
from kvjax.decode.step import DecodeState, Rules, decode_step
from kvjax.decode.tiered_layers import selecting
from kvjax.decode.told import told
from kvjax.load import load
from kvjax.model import Model
from kvjax.storage.files import publish

STEPS, RUNS = 32, 3

SHORT = 512
"""Tokens of a context that no method need shorten."""

HEADINGS = (
    "tokens", "batch", "method", "tokens/s", "ms a step", "near", "KB fetched a step",
    "of the step, fetching", "index MB",
)  # fmt: skip

DEFAULT = (OURS, "Quest", "ShadowKV's landmarks", "RetroInfer", "PQCache")


@dataclasses.dataclass(frozen=True)
class Batch:
    """What one method made of a batch."""

    context: int
    rows: int
    method: str
    step_s: float
    hit_ratio: float | None = None
    moved: float = 0.0  # bytes a step
    fetching: float = 0.0  # share of a step
    index_bytes: int = 0

    @property
    def speed(self) -> float:
        """Tokens a second, of all rows."""
        return self.rows / self.step_s


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    options = report.parser(__doc__.splitlines()[0])
    options.add_argument("--model", default="smollm2-135m", help="a name or a GGUF file")
    options.add_argument("--dtype", default="auto", help="of the matrices")
    options.add_argument("--contexts", default=None, help="tokens of a row; by default 512,4096")
    options.add_argument("--batches", default=None, help="rows; by default 1,2,4,8")
    options.add_argument("--budget", default="6.25%", help="pages of a step")
    options.add_argument(
        "--methods",
        nargs="+",
        default=None,
        choices=list(METHODS),
        metavar="METHOD",
        help="any of: " + "; ".join(METHODS),
    )
    options.add_argument(
        "--points",
        type=pathlib.Path,
        metavar="FILE",
        help="write what is measured as it comes; what the file has already is not measured again",
    )
    parsed = options.parse_args(arguments)
    contexts = parsed.contexts or ("256" if parsed.quick else "512,4096")
    batches = parsed.batches or ("2" if parsed.quick else "1,2,4,8")
    parsed.contexts = [int(part) for part in contexts.split(",")]
    parsed.batches = [int(part) for part in batches.split(",")]
    parsed.methods = parsed.methods or ([OURS] if parsed.quick else list(DEFAULT))
    return parsed


def main() -> int:
    """Run the benchmark."""
    options = parse()
    jax.config.update("jax_platforms", "cpu")
    console = Console(stderr=True)
    began = time.monotonic()
    found = _read_points(options.points)
    with console.status("loading the model") as status:

        def say(text: str) -> None:
            line = f"{text} ({time.monotonic() - began:.0f} s)"
            status.update(line)
            if not console.is_terminal:
                console.print(line, markup=False)

        model = load(options.model, dtype=options.dtype)
        for context in options.contexts:
            for rows in options.batches:
                prompts, given = texts(model, context, rows)
                for name in (EXACT, *(options.methods if context != SHORT else ())):
                    if any((b.context, b.rows, b.method) == (context, rows, name) for b in found):
                        continue
                    say(f"{rows} x {context} tokens, {name}")
                    found.append(_measure(model, prompts, given, name, options.budget))
                    _write_points(options.points, found)
    _finish(options, sorted(found, key=lambda b: (b.context, b.rows)), model)
    return 0


def _measure(
    model: Model, prompts: list[list[int]], given: list[list[int]], name: str, budget: str
) -> Batch:
    if name == EXACT:
        step_s = exact_step(model, prompts, given)
        return Batch(len(prompts[0]), len(prompts), EXACT, step_s)
    return _over_tiers(model, prompts, given, name, METHODS[name], budget)


def _read_points(path: pathlib.Path | None) -> list[Batch]:
    if path is None or not path.exists():
        return []
    return [Batch(**fields) for fields in json.loads(path.read_text())]


def _write_points(path: pathlib.Path | None, found: Sequence[Batch]) -> None:
    if path is not None:
        with publish(path) as unfinished:
            unfinished.write_text(json.dumps([dataclasses.asdict(b) for b in found]))


def texts(model: Model, context: int, rows: int) -> tuple[list[list[int]], list[list[int]]]:
    """Consecutive parts of a document, each with the tokens that follow it.

    Args:
      model: for its tokenizer.
      context: tokens of a part.
      rows: parts.
    """
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(needles.text())
    while len(ids) < rows * (context + STEPS):
        ids = ids + ids
    parts = [ids[row * (context + STEPS) :][: context + STEPS] for row in range(rows)]
    return [part[:context] for part in parts], [part[context:] for part in parts]


def _over_tiers(
    model: Model,
    prompts: list[list[int]],
    given: list[list[int]],
    name: str,
    method: Method,
    budget: str,
) -> Batch:
    tokens = sum(map(len, prompts))
    with tempfile.TemporaryDirectory(prefix="kvjax-batches-") as folder:
        where = place(method, f"{folder}/pages", selecting(model.spec).bytes_per_token * tokens)
        cache = CacheConfig(
            select=method.select(budget), window=method.window, place=where, format=method.format
        )
        got = told(model, prompts, given, cache, runs=RUNS)
    return Batch(
        context=len(prompts[0]),
        rows=len(prompts),
        method=name,
        step_s=got.step_seconds,
        hit_ratio=got.tiers.hit_ratio,
        moved=got.tiers.bytes_moved / (STEPS * RUNS),
        fetching=got.fetch_seconds / got.step_seconds,
        index_bytes=got.tiers.index_bytes,
    )


def exact_step(model: Model, prompts: list[list[int]], given: list[list[int]]) -> float:
    """Median seconds of a step that attends to all pages.

    Args:
      model: what runs.
      prompts: token ids, a row each.
      given: what follows them.
    """
    shapes = plan(
        model.config,
        model.spec,
        [len(row) for row in prompts],
        new_tokens=STEPS + 1,
        prefill_chunk=512,
        cache=CacheConfig(),
    )
    tokens = np.zeros((STEPS, shapes.batch), np.int32)
    tokens[:, : len(given)] = np.asarray(given, np.int32).T
    limits = np.zeros(shapes.batch, np.int32)
    limits[: len(given)] = np.iinfo(np.int32).max
    asking = dataclasses.replace(rules(model, shapes.batch), limits=jnp.asarray(limits))
    static = (model.graphdef, shapes)
    opening = (model.params, flat_prompts(prompts, shapes), asking)
    state = compiled(_prefill, static, *opening)[0](*opening)
    following = (model.params, state, asking, jnp.asarray(tokens))
    program, _ = compiled(_decode, static, *following)
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        jax.block_until_ready(program(*following))
        times.append((time.perf_counter() - began) / STEPS)
    return statistics.median(times)


def _prefill(static: Any, params: Any, prompts: Any, asking: Rules) -> DecodeState:
    graphdef, shapes = static
    return prefill(nnx.merge(graphdef, params), shapes, prompts, asking)


def _decode(
    static: Any, params: Any, state: DecodeState, asking: Rules, given: jax.Array
) -> tuple[DecodeState, jax.Array]:
    graphdef, shapes = static
    decoder = nnx.merge(graphdef, params)

    def step(state: DecodeState, tokens: jax.Array) -> tuple[DecodeState, jax.Array]:
        state = dataclasses.replace(state, tokens=tokens)
        state = decode_step(decoder, state, asking, implementation=shapes.attention)
        return state, jax.nn.log_softmax(decoder.logits(state.hidden), axis=-1)

    return jax.lax.scan(step, state, given)


def claims(found: Sequence[Batch]) -> list[report.Row]:
    """Ours against all pages, the fastest of the published systems, and pages in fewer bits.

    Args:
      found: what was measured.
    """
    rows = []
    for context, batch in dict.fromkeys((b.context, b.rows) for b in found):
        here = {b.method: b for b in found if (b.context, b.rows) == (context, batch)}
        if OURS not in here:
            continue
        published = [here[name] for name in SYSTEMS if name in here]
        against = [(EXACT, here[EXACT], None)]
        if published:
            best = max(published, key=lambda b: b.speed)
            against.append((f"{best.method} (fastest of the published)", best, ">= 1.74"))
        short = next((b for b in found if (b.context, b.rows) == (SHORT, batch)), None)
        if short is not None and context > SHORT:
            rows.append(
                report.Row(
                    claim=f"{batch} x {context} tokens",
                    metric="time a step",
                    unit="ms",
                    ours=1e3 * here[OURS].step_s,
                    baseline=f"{short.method}, {SHORT} tokens",
                    baseline_value=1e3 * short.step_s,
                    aim="<= 1.3" if context >= 8000 else None,
                )
            )
        rows += [
            report.Row(
                claim=f"{batch} x {context} tokens",
                metric="decode speed",
                unit="tokens/s",
                ours=here[OURS].speed,
                baseline=name,
                baseline_value=other.speed,
                aim=aim,
            )
            for name, other, aim in against
        ]
        rows += [
            row for packed in PACKED.values() if packed in here for row in _packed(here, packed)
        ]
    return rows


def _packed(here: dict[str, Batch], name: str) -> list[report.Row]:
    """What pages in fewer bits fetch, and how long a step waits for them, against plain ones."""
    plain, packed = here[OURS], here[name]
    what = f"{packed.rows} x {packed.context} tokens, {name}"
    metrics = (
        ("fetched a step", "KB", packed.moved / 1e3, plain.moved / 1e3),
        (
            "fetching a step",
            "ms",
            1e3 * packed.fetching * packed.step_s,
            1e3 * plain.fetching * plain.step_s,
        ),
    )
    return [
        report.Row(
            claim=what,
            metric=metric,
            unit=unit,
            ours=ours,
            baseline=OURS,
            baseline_value=value,
            aim="<= 1",
        )
        for metric, unit, ours, value in metrics
    ]


def _finish(options: argparse.Namespace, found: Sequence[Batch], model: Model) -> None:
    lines = [
        [
            str(b.context),
            str(b.rows),
            b.method,
            f"{b.speed:.1f}",
            f"{1e3 * b.step_s:.1f}",
            "-" if b.hit_ratio is None else f"{b.hit_ratio:.3f}",
            f"{b.moved / 1e3:.0f}",
            f"{b.fetching:.0%}",
            f"{b.index_bytes / 1e6:.2f}",
        ]
        for b in found
    ]
    body = [
        f"{model.name} ({model.dtype}), parts of Python's language reference, pages of 16 tokens, "
        f"{options.budget} of the pages a step, host memory as the tier. Steps over {STEPS} given "
        f"tokens, median of {RUNS} runs after one prefill; fetching is the time that host "
        f"callbacks take.",
        report.markdown_table(HEADINGS, lines),
    ]
    name, title = f"tiered batches {model.name}", f"Batches over selected pages, {model.name}"
    report.finish(claims(found), options, name=name, title=title, body="\n\n".join(body))


if __name__ == "__main__":
    sys.exit(main())
