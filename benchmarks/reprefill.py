"""A stored document's first token: ours against what it claims to beat, in one run.

    python -m benchmarks.reprefill                       # about an hour and a half
    python -m benchmarks.reprefill --quick               # one short document, within a minute
    python -m benchmarks.reprefill --model FILE.gguf --contexts 4096 --budgets 5,10,25

Every method answers the same questions about codes hidden in a real text, from the same pages on
disk, with the operating system's page cache dropped before each run and nothing in memory but the
small arrays that pages are chosen by. Who decides by what is compared at one context of them.
"""

import argparse
import dataclasses
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import jax
from rich.console import Console

from benchmarks import report
from benchmarks.mapped_layers import MappedPrefixes
from benchmarks.needles import document
from benchmarks.report import Row
from benchmarks.reprefill_claims import claims
from benchmarks.reprefill_measure import Outcome, Task, alone, hits, recompute, reorder, stored
from benchmarks.reprefill_methods import (
    GRID,
    MAIN,
    MAPPED,
    METHODS,
    OURS,
    RECOMPUTE,
    WHOLE,
)
from benchmarks.reprefill_plot import plot
from benchmarks.reprefill_point import HEADINGS, Point, lines, point, write_points
from kvjax.config import CacheConfig
from kvjax.decode import PrefixCache, PrefixConfig
from kvjax.decode.prefilled_pages import PrefilledPages, prefilled_pages
from kvjax.load import load
from kvjax.model import Model

CONTEXTS, BUDGETS, GRID_CONTEXT = "2048,4096,8000", "5,10,25,50", 4096
REPEATS = 5

GRID_BUDGET = 25
"""The largest at which who decides by what is compared, to end in time."""

HITS_BUDGET = 10
"""Budget at which hits in memory are counted and prefetching is switched off too, or the first."""

DEVICE_SHARE, HOST_SHARE = 0.05, 0.2
"""Memory for pages while hits are counted, of what the whole prefix occupies."""

Say = Callable[[str], None]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    options = report.parser(__doc__.splitlines()[0])
    options.add_argument("--model", default="smollm2-135m", help="a name or a GGUF file")
    options.add_argument("--dtype", default="auto", help="of the matrices")
    options.add_argument("--contexts", default=None, help=f"tokens; by default {CONTEXTS}")
    options.add_argument("--budgets", default=None, help=f"percent; by default {BUDGETS}")
    options.add_argument(
        "--methods",
        nargs="+",
        default=None,
        choices=[*METHODS, "main", "grid"],
        metavar="METHOD",
        help="main (at all contexts), grid (at one), or any of: " + "; ".join(METHODS),
    )
    options.add_argument(
        "--grid-context", type=int, default=GRID_CONTEXT, help="tokens where the grid is measured"
    )
    options.add_argument("--questions", type=int, default=None, help="codes hidden; 4 by default")
    options.add_argument(
        "--repeats", type=int, default=None, help=f"timed runs of a method; {REPEATS} by default"
    )
    options.add_argument("--seed", type=int, default=0, help="of codes and places")
    options.add_argument(
        "--points", type=pathlib.Path, metavar="FILE", help="write what is measured as it comes"
    )
    parsed = options.parse_args(arguments)
    quick = parsed.quick
    parsed.contexts = _numbers(parsed.contexts or ("512" if quick else CONTEXTS))
    parsed.budgets = _numbers(parsed.budgets or ("25" if quick else BUDGETS))
    asked = parsed.methods or ([OURS] if quick else ["main", "grid"])
    groups = {"main": list(MAIN), "grid": list(GRID)}
    parsed.methods = [method for name in asked for method in groups.get(name, [name])]
    parsed.questions = parsed.questions or (1 if quick else 4)
    parsed.repeats = parsed.repeats or (1 if quick else REPEATS)
    if parsed.json and not parsed.points:
        parsed.points = parsed.json.with_suffix(".points.json")
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
    run = Run(options)
    with console.status("loading the model") as status:

        def say(text: str) -> None:
            line = f"{text} ({time.monotonic() - began:.0f} s)"
            status.update(line)
            if not console.is_terminal:
                console.print(line, markup=False)

        model = load(options.model, dtype=options.dtype)
        for context in options.contexts:
            run.measure(model, context, say)
    rows = claims(run.points, model.name, run.alone, run.unhidden)
    _finish(options, run.points, rows, model)
    return 0


class Run:
    """What one run has measured so far.

    Attributes:
      points: of all methods.
      alone: by context, seconds to prefill a question without its document.
      unhidden: by context, ours without prefetching.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.points: list[Point] = []
        self.alone: dict[int, float] = {}
        self.unhidden: dict[int, Point] = {}
        self._options = options

    def measure(self, model: Model, context: int, say: Say) -> None:
        """Every method and budget on one document."""
        assert model.tokenizer is not None
        options = self._options
        ids, needles = document(model.tokenizer, context, options.questions, options.seed)
        task = Task(model, ids, needles, options.repeats)
        exact = recompute(task, lambda text: say(f"{context} tokens, {RECOMPUTE}: {text}"))
        self.alone[context] = alone(task)
        self._keep(point(context, 100, RECOMPUTE, task, exact, exact))
        say(f"{context} tokens: prefill")
        pages = prefilled_pages(model, ids, CacheConfig(), 512, lambda phase, share: None)
        for method in options.methods:
            if method in MAIN or context == options.grid_context or options.quick:
                self._method(task, method, pages, exact, say)

    def _method(
        self, task: Task, method: str, pages: PrefilledPages, exact: Outcome, say: Say
    ) -> None:
        context, config = len(task.document), METHODS[method]
        with tempfile.TemporaryDirectory(prefix="kvjax-reprefill-") as name:
            folder = pathlib.Path(name)
            say(f"{context} tokens, {method}: storing")
            whole = pages.keys.nbytes + pages.values.nbytes
            loading = dataclasses.replace(config, load_policy="load", host_bytes=whole)
            info = PrefixCache(folder, config=loading).put(task.model, task.document, pages)
            if config.reorder:
                say(f"{context} tokens, {method}: earlier questions")
                reorder(task, folder, loading)
            for budget in self._budgets(method):
                label = f"{context} tokens, {method}, {budget} %"
                setting = dataclasses.replace(loading, budget=f"{budget}%")
                outcome = self._stored(task, method, folder, setting, exact, label, say)
                found = None
                if method in MAIN and method != MAPPED and budget == self._hits_budget(method):
                    say(f"{label}: hits in memory")
                    found = hits(task, folder, _with_memory(setting, pages))
                measured = point(
                    context,
                    budget,
                    method,
                    task,
                    exact,
                    outcome,
                    config=config,
                    sketch_bytes=0 if config.sketch() is None else info.sketch_bytes,
                    hits=found,
                )
                self._keep(measured)
                if method == OURS and budget == self._hits_budget(method):
                    off = dataclasses.replace(setting, prefetch=False)
                    slow = self._stored(
                        task, method, folder, off, exact, f"{label}, no prefetch", say
                    )
                    self.unhidden[context] = point(context, budget, method, task, exact, slow)

    def _budgets(self, method: str) -> list[int]:
        if method in WHOLE:
            return [100]
        budgets: list[int] = self._options.budgets
        if method in GRID:
            return [budget for budget in budgets if budget <= GRID_BUDGET]
        return [*budgets, 100] if method == OURS and not self._options.quick else budgets

    def _hits_budget(self, method: str) -> int:
        budgets = self._budgets(method)
        return HITS_BUDGET if HITS_BUDGET in budgets else budgets[0]

    def _stored(
        self,
        task: Task,
        method: str,
        folder: pathlib.Path,
        setting: PrefixConfig,
        exact: Outcome,
        label: str,
        say: Say,
    ) -> Outcome:
        timed = task if method in MAIN else dataclasses.replace(task, repeats=1)
        kind = MappedPrefixes if method == MAPPED else PrefixCache
        forced = [answer.tokens for answer in exact.answers]
        return stored(timed, folder, setting, forced, lambda text: say(f"{label}: {text}"), kind)

    def _keep(self, measured: Point) -> None:
        self.points.append(measured)
        if self._options.points:
            write_points(self._options.points, self.points)


def _with_memory(setting: PrefixConfig, pages: PrefilledPages) -> PrefixConfig:
    whole = pages.keys.nbytes + pages.values.nbytes
    host, device = int(HOST_SHARE * whole), int(DEVICE_SHARE * whole)
    return dataclasses.replace(setting, host_bytes=host, device_bytes=device)


def _finish(
    options: argparse.Namespace, points: Sequence[Point], rows: list[Row], model: Model
) -> None:
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(report.plain_table("Measured", HEADINGS, lines(points)))
    body = [
        f"{model.name} ({model.dtype}), codes hidden in Python's language reference, pages of 16 "
        f"tokens. Times are medians of {options.repeats} runs of the first question and one of "
        f"each other; bytes and KL are means over the questions. IMPRESS's tokens are reordered "
        f"by what earlier, general questions chose. Hits are those of all questions asked twice, "
        f"with {DEVICE_SHARE:.0%} of the prefix in device memory and {HOST_SHARE:.0%} in the "
        f"host's.",
        report.markdown_table(HEADINGS, lines(points)),
    ]
    where = options.docs or (None if options.quick else report.DOCUMENT)
    if where:
        picture = where.parent / where.stem / f"reprefill-{model.name}.png"
        plot([p for p in points if p.method not in GRID], picture)
        body.insert(1, f"![KL against bytes read]({picture.relative_to(where.parent)})")
    name, title = f"reprefill {model.name}", f"First token of a stored prefix, {model.name}"
    report.finish(rows, options, name=name, title=title, body="\n\n".join(body))


if __name__ == "__main__":
    sys.exit(main())
