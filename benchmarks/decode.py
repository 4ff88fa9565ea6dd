"""Decode and prefill of kvjax against four peers, in one run and from the same weights.

    python benchmarks/peers/install.py                 # once: the peers, an environment each
    python -m benchmarks.decode                        # all of it, about twenty minutes
    python -m benchmarks.decode --quick                # one context, within a minute
    python -m benchmarks.decode --only kvjax openvino --contexts 512 --batches 1

Engines run one after the other, each in a process of its own. A batch above 1 decodes copies of
one sequence's cache, each with memory of its own; engines that cannot copy a cache prefill every
prompt.
"""

import argparse
import pathlib
import sys
import time
from typing import Any

import jax
from rich.console import Console

from benchmarks import contiguous, precision, report
from benchmarks.decode_plot import plot
from benchmarks.decode_rows import (
    PREFILL_CONTEXT,
    comparison_rows,
    count_rows,
    engines_markdown,
    measurements,
    sweep_fit,
)
from benchmarks.engines import NAMES, Engine, Outcome, choose, run
from benchmarks.peers.measure import Request
from kvjax.config import CacheConfig
from kvjax.load import cpu_multiplies_bfloat16, load
from kvjax.model import Model, kv_spec
from kvjax.registry import MODELS, model_path

CONTEXTS, BATCHES = "512,2048,8192", "1,8"
STEPS, QUICK_STEPS = 16, 4
BUDGET_S, QUICK_BUDGET_S = 170.0, 12.0

QUICK_S = 40.0
"""Seconds into a quick run after which it starts no engine and no further measurement."""

QUICK_ORDER = ("kvjax:float32", "llama_cpp", "openvino", "transformers", "kvjax:bf16")
"""vLLM is not among them: it compiles for a minute or more before it answers."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = report.parser(__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a name or a GGUF file")
    parser.add_argument("--peers", type=pathlib.Path, default=report.REPOSITORY / ".peers")
    parser.add_argument("--contexts", default=None, help=f"tokens; by default {CONTEXTS}")
    parser.add_argument("--batches", default=None, help=f"by default {BATCHES}")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budget", type=float, default=None, help="seconds a peer may measure")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="ENGINE", help=f"of {', '.join(NAMES)}"
    )
    options = parser.parse_args(arguments)
    options.steps = QUICK_STEPS if options.quick else STEPS
    options.budget = options.budget or (QUICK_BUDGET_S if options.quick else BUDGET_S)
    contexts = options.contexts or ("256" if options.quick else CONTEXTS)
    batches = options.batches or ("1" if options.quick else BATCHES)
    options.contexts = [int(text) for text in contexts.split(",")]
    options.batches = [int(text) for text in batches.split(",")]
    if min(options.contexts) < 32 or min(options.batches) < 1:
        parser.error("contexts must be 32 tokens or more, batches 1 or more")
    options.batches = sorted({1, *options.batches})  # a batch is made of one sequence
    return options


def text_tokens(model: Model) -> list[int]:
    """The ids of a long real text that every Python carries: its language reference."""
    from pydoc_data.topics import topics

    if model.tokenizer is None:
        raise ValueError(f"{model.name} has no tokenizer: the benchmark needs the ids of a text")
    text = "\n\n".join(topics[name] for name in sorted(topics, key=lambda n: -len(topics[n])))
    return model.tokenizer.encode(text)


def make_request(options: argparse.Namespace, model: Model, gguf: pathlib.Path) -> Request:
    """What every engine is asked for."""
    room = model.config.max_context - 2 * options.steps - 16
    contexts = sorted({min(context, room) for context in options.contexts})
    batches = dict.fromkeys(contexts, options.batches)
    if not options.quick and contexts[0] < PREFILL_CONTEXT < contexts[-1]:
        batches.setdefault(PREFILL_CONTEXT, [1])
    tokens = text_tokens(model)
    needed = max(context * max(batches[context]) for context in batches)
    while len(tokens) < needed:
        tokens = tokens + tokens
    prompts = {
        str(context): [tokens[row * context : (row + 1) * context] for row in range(max(rows))]
        for context, rows in batches.items()
    }
    spec = kv_spec(model.config, "float32")
    return Request(
        gguf=str(gguf.resolve()),
        prompts=prompts,
        batches={str(context): rows for context, rows in batches.items()},
        steps=options.steps,
        repeats=2,
        threads=options.threads,
        dtype="float32",
        budget_s=options.budget,
        cache_dir=str((options.peers / "cache").resolve()),
        max_context=model.config.max_context,
        cache_bytes=needed * spec.bytes_per_token,
        quick=options.quick,
    )


def run_all(
    engines: list[Engine], request: Request, peers: pathlib.Path, last_start: float
) -> list[Outcome]:
    """Run the engines one after the other, telling what they do; none starts after `last_start`."""
    console = Console(stderr=True)
    outcomes = []
    for index, engine in enumerate(engines):
        head = f"[{index + 1}/{len(engines)}] {engine.label}"
        begin = time.monotonic()
        if begin > last_start:
            outcomes.append(Outcome(engine, None, "no time left in a quick run", 0.0))
            continue
        with console.status(head) as status:

            def say(text: str, head: str = head, begin: float = begin) -> None:
                line = f"{head}: {text}"
                status.update(line)
                if not console.is_terminal:
                    console.print(f"{line} ({time.monotonic() - begin:.0f} s)")

            outcome = run(engine, request, peers, say)
        said = "done" if outcome.answer else f"did not run: {outcome.why}"
        console.print(f"{head}: {said} in {outcome.seconds:.0f} s", markup=False)
        outcomes.append(outcome)
    return outcomes


def attention_rows(model: Model, context: int, dtypes: list[str]) -> list[report.Row]:
    """Paged decode attention against contiguous, alone, over all layers' keys and values."""
    rows = []
    for dtype in dtypes:
        found = contiguous.measure(model.config, context, 1, dtype)
        rows.append(
            report.Row(
                claim=f"paged decode attention, {context} tokens, batch 1, {dtype} KV",
                metric="KV bandwidth",
                unit="GB/s",
                ours=found.paged / 1e9,
                baseline="contiguous attention in the same process",
                baseline_value=found.contiguous / 1e9,
                aim=">= 0.7",
            )
        )
    return rows


def precision_row(exact: Model, gguf: pathlib.Path, cache: str, count: int) -> report.Row:
    """KL between the two dtypes on a text."""
    fast = load(gguf, dtype="bfloat16", cache_dir=cache)
    found = precision.divergence(exact, fast, text_tokens(exact)[:count])
    return report.Row(
        claim=f"bf16 against float32, {found.tokens} tokens of a text "
        f"(largest KL {found.largest:.2g}, same likeliest token {found.same_top:.1%})",
        metric="mean KL of next-token distributions",
        unit="nats",
        ours=found.mean,
    )


def main() -> int:
    """Run the benchmark."""
    options = parse()
    report.check_plots(options)
    jax.config.update("jax_platforms", "cpu")  # where the peers run
    last_start = time.monotonic() + QUICK_S if options.quick else float("inf")
    console = Console(stderr=True)
    gguf = model_path(options.model) if options.model in MODELS else pathlib.Path(options.model)
    try:
        names = options.only or (list(QUICK_ORDER) if options.quick else [])
        engines = choose(names, cpu_multiplies_bfloat16())
    except ValueError as error:
        console.print(f"--only: {error}", markup=False)
        return 2
    cache = str((options.peers / "cache").resolve())
    with console.status("loading the model"):
        model = load(options.model, dtype="float32", cache_dir=cache if gguf.is_file() else None)
    request = make_request(options, model, gguf)
    points = [(int(c), batch) for c, batches in request.batches.items() for batch in batches]
    points.sort()
    outcomes = run_all(engines, request, options.peers, last_start)

    rows: list[report.Row] = []
    ours = [outcome for outcome in outcomes if outcome.engine.name == "kvjax"]
    peers = [outcome for outcome in outcomes if outcome.engine.name != "kvjax"]
    for outcome in ours:
        rows += [row for row in comparison_rows(outcome, peers, points) if row.aim]
        rows += count_rows(outcome, points, CacheConfig().page_size)
    if ours and time.monotonic() < last_start:
        longest = points[-1][0] // 16 * 16
        with console.status("paged attention against contiguous"):
            dtypes = ["float32"] if options.quick else ["float32", "bfloat16"]
            rows += attention_rows(model, longest, dtypes)
        with console.status("bf16 against float32"):
            rows.append(precision_row(model, gguf, cache, 128 if options.quick else 2048))
    finish(options, outcomes, points, rows, model.name)
    return 0


def finish(
    options: argparse.Namespace,
    outcomes: list[Outcome],
    points: list[Any],
    rows: list[report.Row],
    model: str,
) -> None:
    """Show the tables and write what was asked for."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    tables = measurements(outcomes, points)
    for title, headings, lines in tables:
        console.print(report.plain_table(title, headings, lines))
    fits = []
    for outcome in outcomes:
        for context, batch in points:
            line = sweep_fit(outcome.point(context, batch) or {})
            if line is not None:
                fits.append(f"{outcome.engine.label}, batch {batch}: {line}")
    for text in fits:
        print(text)
    body = [
        f"{model}, {options.threads} threads; every engine reads the same GGUF file.",
        engines_markdown(outcomes),
        *(f"{title}:\n\n{report.markdown_table(*table)}" for title, *table in tables),
        *fits,
    ]
    document = options.docs or (None if options.quick else report.DOCUMENT)
    if document:
        picture = document.parent / document.stem / "decode.png"
        plot(outcomes, picture, f"{model}: one decode step on {options.threads} cores")
        link = picture.relative_to(document.parent)
        body.insert(1, f"![milliseconds a step against tokens of context]({link})")
    report.finish(rows, options, name="decode", title="Decode and prefill", body="\n\n".join(body))


if __name__ == "__main__":
    sys.exit(main())
