"""A stored document's first token: ours against what it claims to beat, in one run.

    python -m benchmarks.reprefill                       # about half an hour
    python -m benchmarks.reprefill --quick               # one short document, within a minute
    python -m benchmarks.reprefill --model FILE.gguf --contexts 4096 --budgets 5,10

Every method answers the same questions about codes hidden in a real text, from the same pages on
disk, with the operating system's page cache dropped before each run and nothing in memory but the
small arrays that pages are chosen by.
"""

import argparse
import dataclasses
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable

import jax
from rich.console import Console

from benchmarks import report
from benchmarks.mapped_layers import MappedPrefixes
from benchmarks.needles import document
from benchmarks.report import Row, shown
from benchmarks.reprefill_measure import (
    STEPS,
    Outcome,
    Task,
    divergence,
    recompute,
    right_answers,
    stored,
)
from benchmarks.reprefill_plot import plot
from kvjax.config import CacheConfig
from kvjax.decode import PrefixCache, PrefixConfig
from kvjax.decode.prefixes import prefilled_pages
from kvjax.load import load
from kvjax.model import Model

CONTEXTS, BUDGETS = "2048,4096,8000", "5,10,25,50"
SMALL_BUDGETS = (10,)
"""Budgets at all contexts but the longest."""

OURS = "low-bit keys, per head"
CONTIGUOUS = "ContiguousKV"
IMPRESS = "IMPRESS"
FULL = "full load (AttentionStore), LRU"
MAPPED = "mapped layers (FlexGen)"
METHODS: dict[str, PrefixConfig] = {
    OURS: PrefixConfig(by="low-bit"),
    "low-bit keys, per layer": PrefixConfig(by="low-bit", who="layer"),
    "low-bit keys, per period": PrefixConfig(by="low-bit", who="period"),
    "2-bit keys, per head": PrefixConfig(by="low-bit", bits=2),
    "page means, per head": PrefixConfig(by="mean"),
    "Quest bounds, per head": PrefixConfig(by="quest"),
    CONTIGUOUS: PrefixConfig(by="keys", who="period"),
    IMPRESS: PrefixConfig(by="impress", who="layer", placement="impress", prefetch=False),
    "H2O, 64-token chunks, LFU": PrefixConfig(
        by="h2o", who="layer", placement="lfu", prefetch=False
    ),
    FULL: PrefixConfig(by="all", who="layer", placement="lru"),
    MAPPED: PrefixConfig(by="all", who="layer", placement="lru", prefetch=False),
}
TENTH = {"low-bit keys, per period", "2-bit keys, per head"}
"""Methods that are only tried at `SMALL_BUDGETS`."""

SHORT = {OURS, CONTIGUOUS, IMPRESS, FULL}
"""Methods at contexts but the longest."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One method at one budget on one document."""

    context: int
    budget: int  # percent
    method: str
    outcome: Outcome
    kl_first: float
    kl_steps: float
    right: int
    questions: int


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    options = report.parser(__doc__.splitlines()[0])
    options.add_argument("--model", default="smollm2-135m", help="a name or a GGUF file")
    options.add_argument("--dtype", default="auto", help="of the matrices")
    options.add_argument("--contexts", default=None, help=f"tokens; by default {CONTEXTS}")
    options.add_argument("--budgets", default=None, help=f"percent; by default {BUDGETS}")
    options.add_argument("--methods", nargs="+", default=None, choices=list(METHODS))
    options.add_argument("--questions", type=int, default=None, help="codes hidden; 4 by default")
    options.add_argument("--repeats", type=int, default=None, help="of each question; by default 5")
    options.add_argument("--seed", type=int, default=0, help="of codes and places")
    parsed = options.parse_args(arguments)
    quick = parsed.quick
    parsed.contexts = _numbers(parsed.contexts or ("512" if quick else CONTEXTS))
    parsed.budgets = _numbers(parsed.budgets or ("25" if quick else BUDGETS))
    parsed.methods = parsed.methods or ([OURS] if quick else list(METHODS))
    parsed.questions = parsed.questions or (1 if quick else 4)
    parsed.repeats = parsed.repeats or (1 if quick else 5)
    return parsed


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    """Run the benchmark."""
    options = parse()
    report.check_plots(options)
    jax.config.update("jax_platforms", "cpu")
    console = Console(stderr=True)
    began = time.monotonic()
    with console.status("loading the model") as status:

        def say(text: str) -> None:
            line = f"{text} ({time.monotonic() - began:.0f} s)"
            status.update(line)
            if not console.is_terminal:
                console.print(line, markup=False)

        model = load(options.model, dtype=options.dtype)
        points, rows = [], []
        for context in options.contexts:
            some, extra = measure_context(model, context, options, say)
            points += some
            rows += extra
    rows += claims(points)
    _finish(options, points, rows, model)
    return 0


def measure_context(
    model: Model, context: int, options: argparse.Namespace, say: Callable[[str], None]
) -> tuple[list[Point], list[Row]]:
    """Every method and budget on one document."""
    assert model.tokenizer is not None
    ids, needles = document(model.tokenizer, context, options.questions, options.seed)
    task = Task(model, ids, needles, options.repeats)
    longest = context == max(options.contexts)
    exact = recompute(task, lambda text: say(f"{context} tokens, recompute: {text}"))
    forced = [answer.tokens for answer in exact.answers]
    points = [_point(context, 100, "recompute", task, exact, exact)]
    rows: list[Row] = []
    say(f"{context} tokens: prefill")
    pages = prefilled_pages(model, ids, CacheConfig(), 512, lambda phase, share: None)
    with tempfile.TemporaryDirectory(prefix="kvjax-reprefill-") as root:
        for method in options.methods:
            if not longest and method not in SHORT:
                continue
            config = METHODS[method]
            folder = pathlib.Path(root) / method.replace(" ", "-").replace(",", "")
            say(f"{context} tokens, {method}: storing")
            PrefixCache(folder, config=config).put(model, ids, pages)
            budgets = (
                options.budgets if longest else [b for b in options.budgets if b in SMALL_BUDGETS]
            )
            if method in (FULL, MAPPED):
                budgets = [100]
            for budget in budgets:
                label = f"{context} tokens, {method}, {budget} %"
                setting = dataclasses.replace(config, budget=f"{budget}%", load_policy="load")
                if method in TENTH and longest and budget not in SMALL_BUDGETS:
                    continue
                kind = MappedPrefixes if method == MAPPED else PrefixCache

                def tell(text: str, label: str = label) -> None:
                    say(f"{label}: {text}")

                outcome = stored(task, folder, setting, forced, tell, kind)
                points.append(_point(context, budget, method, task, exact, outcome))
            if method == OURS and longest:
                budget = options.budgets[0]
                off = dataclasses.replace(
                    config, budget=f"{budget}%", load_policy="load", prefetch=False
                )
                say(f"{context} tokens, {method}, {budget} %, no prefetch")
                rows.append(_hidden(points, task, stored(task, folder, off, forced, say), budget))
    return points, rows


def _point(
    context: int, budget: int, method: str, task: Task, exact: Outcome, outcome: Outcome
) -> Point:
    first, steps = divergence(exact.answers, outcome.answers)
    right = right_answers(task.model, task.needles, outcome.answers)
    return Point(context, budget, method, outcome, first, steps, right, len(task.needles))


def _hidden(points: list[Point], task: Task, off: Outcome, budget: int) -> Row:
    """How much of the reading is hidden behind computing."""
    on = next(
        p.outcome.stats
        for p in reversed(points)
        if p.method == OURS and p.budget == budget and p.outcome.stats is not None
    )
    assert off.stats is not None
    return Row(
        claim=f"reads hidden behind compute, {len(task.document)} tokens, {budget} %",
        metric="seconds waited for reads",
        unit="s",
        ours=on.wait_seconds,
        baseline="without prefetch",
        baseline_value=off.stats.wait_seconds,
        aim="<= 0.5",
    )


def claims(points: list[Point]) -> list[Row]:
    """What is aimed at, against the baselines of the same run."""
    rows = []
    for context in sorted({p.context for p in points}):
        here = {(p.method, p.budget): p for p in points if p.context == context}
        base = here["recompute", 100]
        for (method, budget), point in here.items():
            if method != OURS or point.outcome.stats is None:
                continue
            where = f"{context} tokens, {budget} %"
            stats = point.outcome.stats
            rows += [
                Row(
                    claim=f"time to first token, {where}",
                    metric="TTFT, pages on disk",
                    unit="s",
                    ours=point.outcome.ttft_s,
                    baseline="recompute",
                    baseline_value=base.outcome.ttft_s,
                    aim="<= 0.05" if context == max(p.context for p in points) else None,
                ),
                Row(
                    claim=f"nothing is read in vain, {where}",
                    metric="bytes read on demand / bytes used",
                    unit="",
                    ours=stats.read_amplification,
                    aim="<= 1.01",
                ),
                Row(
                    claim=f"answers as with all keys and values, {where}",
                    metric="right answers",
                    unit="",
                    ours=point.right,
                    baseline="recompute",
                    baseline_value=base.right,
                    aim=">= 1",
                ),
                Row(
                    claim=f"the distribution is that of all keys and values, {where}",
                    metric=f"mean KL over {STEPS} tokens",
                    unit="nats",
                    ours=point.kl_steps,
                    aim="<= 0.06" if budget >= 10 else None,
                ),
            ]
        rows += _against_impress(here, context)
    return rows


def _against_impress(here: dict[tuple[str, int], Point], context: int) -> list[Row]:
    """At the budget where IMPRESS first answers as well as all keys and values."""
    full = here["recompute", 100].right
    good = [b for (m, b), p in here.items() if m == IMPRESS and p.right >= full]
    ours = [b for (m, b), p in here.items() if m == OURS and p.right >= full]
    if not good or not ours:
        return []
    theirs, mine = here[IMPRESS, min(good)], here[OURS, min(ours)]
    assert theirs.outcome.stats is not None and mine.outcome.stats is not None  # noqa: PT018
    label = f"{IMPRESS} at {theirs.budget} %"
    claim = f"{context} tokens, {mine.budget} %: as many right answers"
    return [
        Row(
            claim=claim,
            metric="bytes read",
            unit="bytes",
            ours=mine.outcome.stats.bytes_read,
            baseline=label,
            baseline_value=theirs.outcome.stats.bytes_read,
            aim="<= 0.25",
        ),
        Row(
            claim=claim,
            metric="TTFT",
            unit="s",
            ours=mine.outcome.ttft_s,
            baseline=label,
            baseline_value=theirs.outcome.ttft_s,
            aim="<= 0.26",
        ),
    ]


def _lines(points: list[Point]) -> list[list[str]]:
    lines = []
    for p in points:
        stats = p.outcome.stats
        again = p.outcome.again
        lines.append(
            [
                f"{p.context:,}",
                p.method,
                f"{p.budget} %",
                shown(p.outcome.ttft_s),
                "-" if stats is None else shown(stats.bytes_read / 1e6),
                "-" if stats is None else shown(stats.bytes_scored / 1e6),
                "-" if stats is None else shown(stats.bytes_wasted / 1e6),
                "-" if stats is None else shown(stats.read_amplification),
                "-" if again is None else f"{again.host_hits / max(again.units, 1):.0%}",
                shown(p.kl_first),
                shown(p.kl_steps),
                f"{p.right} of {p.questions}",
            ]
        )
    return lines


HEADINGS = (
    "context",
    "method",
    "budget",
    "TTFT s",
    "read MB",
    "of which keys to choose by",
    "guessed wrong MB",
    "amplification",
    "next question's host hits",
    "KL first",
    f"KL {STEPS} steps",
    "right",
)


def _finish(
    options: argparse.Namespace, points: list[Point], rows: list[Row], model: Model
) -> None:
    console = Console(width=None if sys.stdout.isatty() else 180)
    table = report.plain_table("Measured", HEADINGS, _lines(points))
    console.print(table)
    body = [
        f"{model.name} ({model.dtype}), codes hidden in Python's language reference, pages of 16 "
        f"tokens; medians of {options.repeats} runs a question.",
        report.markdown_table(HEADINGS, _lines(points)),
    ]
    document = options.docs or (None if options.quick else report.DOCUMENT)
    if document:
        picture = document.parent / document.stem / f"reprefill-{model.name}.png"
        plot(points, picture)
        body.insert(1, f"![KL against bytes read]({picture.relative_to(document.parent)})")
    name, title = f"reprefill {model.name}", f"First token of a stored prefix, {model.name}"
    report.finish(rows, options, name=name, title=title, body="\n\n".join(body))


if __name__ == "__main__":
    sys.exit(main())
