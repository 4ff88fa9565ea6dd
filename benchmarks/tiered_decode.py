"""Decoding over a long document of whose pages a step reads few: ours, variants, published ones.

    python -m benchmarks.tiered_decode                      # about an hour
    python -m benchmarks.tiered_decode --quick              # one short document, within minutes
    python -m benchmarks.tiered_decode --contexts 8000 --budgets 6.25 --methods "Quest"

A document with hidden codes is prefilled exactly, once a method. Each question about it, and then
its answer, is decoded token by token over selected pages, so nothing but the selection decides what
is found. Distributions are compared with those of all pages over the same forced tokens.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from rich.console import Console

from benchmarks import report
from benchmarks.needles import Needle, document
from benchmarks.reprefill_measure import Answer, divergence, right_answers
from benchmarks.tiered_claims import HEADINGS, Point, claims, lines
from benchmarks.tiered_measure import Decoded, decoded
from benchmarks.tiered_methods import EXACT, MAPPED, METHODS, OURS, Method, place
from benchmarks.tiered_windows import planned
from kvjax.config import CacheConfig
from kvjax.decode.tiered_layers import selecting
from kvjax.load import load
from kvjax.model import Model
from kvjax.policies import Window
from kvjax.storage.files import publish

CONTEXTS, BUDGETS = "4096,8000", "1.56,6.25"

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
        choices=[MAPPED, *METHODS],
        metavar="METHOD",
        help="all, or any of: " + "; ".join([MAPPED, *METHODS]),
    )
    options.add_argument("--questions", type=int, default=None, help="codes hidden; 4 by default")
    options.add_argument("--seed", type=int, default=0, help="of codes and places")
    options.add_argument(
        "--points", type=pathlib.Path, metavar="FILE", help="write what is measured as it comes"
    )
    parsed = options.parse_args(arguments)
    contexts = parsed.contexts or ("512" if parsed.quick else CONTEXTS)
    budgets = parsed.budgets or ("25" if parsed.quick else BUDGETS)
    parsed.contexts = [int(part) for part in contexts.split(",")]
    parsed.budgets = [float(part) for part in budgets.split(",")]
    parsed.methods = parsed.methods or ([OURS] if parsed.quick else [MAPPED, *METHODS])
    parsed.questions = parsed.questions or (1 if parsed.quick else 4)
    return parsed


def main() -> int:
    """Run the benchmark."""
    options = parse()
    jax.config.update("jax_platforms", "cpu")
    console = Console(stderr=True)
    began = time.monotonic()
    points: list[Point] = []
    with console.status("loading the model") as status:

        def say(text: str) -> None:
            line = f"{text} ({time.monotonic() - began:.0f} s)"
            status.update(line)
            if not console.is_terminal:
                console.print(line, markup=False)

        model = load(options.model, dtype=options.dtype)
        for context in options.contexts:
            _measure(model, context, options, points, say)
    _finish(options, points, model)
    return 0


def _measure(
    model: Model, context: int, options: argparse.Namespace, points: list[Point], say: Say
) -> None:
    """Every method and budget on one document."""
    assert model.tokenizer is not None
    ids, needles = document(model.tokenizer, context, options.questions, options.seed)
    exact = decoded(
        model, ids, needles, CacheConfig(), None, lambda text: say(f"{context}, {EXACT}: {text}")
    )
    forced = [answer.tokens for answer in exact.answers]
    keep = _Keeper(model, needles, exact, points, options.points)
    keep(context, 100, EXACT, exact, None)
    if MAPPED in options.methods:
        with tempfile.TemporaryDirectory(prefix="kvjax-mapped-") as folder:
            got = decoded(
                model,
                ids,
                needles,
                CacheConfig(),
                forced,
                lambda text: say(f"{context}, {MAPPED}: {text}"),
                mapped=pathlib.Path(folder) / "prompt",
            )
        keep(context, 100, MAPPED, got, None)
    for name in (name for name in options.methods if name != MAPPED):
        for budget in options.budgets:
            label = f"{context} tokens, {name}, {budget:g} %"
            with tempfile.TemporaryDirectory(prefix="kvjax-tiered-") as folder:
                cache = _cache(model, METHODS[name], budget, folder, len(ids))

                def told(text: str, at: str = label) -> None:
                    say(f"{at}: {text}")

                if METHODS[name].planned:
                    plan = planned(model, cache, len(ids), options.seed, told)
                    cache = dataclasses.replace(cache, window=Window(plan=plan))
                got = decoded(model, ids, needles, cache, forced, told)
            keep(context, budget, name, got, METHODS[name])


def _cache(model: Model, method: Method, budget: float, folder: str, tokens: int) -> CacheConfig:
    prompt_bytes = selecting(model.spec).bytes_per_token * tokens
    where = place(method, f"{folder}/pages", prompt_bytes)
    return CacheConfig(
        select=method.select(f"{budget}%"),
        window=method.window,
        place=where,
        format=method.format,
    )


@dataclasses.dataclass(frozen=True)
class _Keeper:
    """Makes points of what was decoded, and writes them as they come."""

    model: Model
    needles: Sequence[Needle]
    exact: Decoded
    points: list[Point]
    path: pathlib.Path | None

    def __call__(
        self, context: int, budget: float, name: str, got: Decoded, method: Method | None
    ) -> None:
        first, steps = divergence(self.exact.answers, got.answers)
        size = CacheConfig().page_size
        fetched = scanned = 0.0
        if method is not None:
            spec = selecting(self.model.spec)  # layers with a sliding window choose nothing
            layer = spec.layers[0]
            a_page = spec.bytes_per_page(size) / len(spec.layers) / layer.kv_heads
            fetched = got.missed * a_page
            index = method.select("5%").index()
            each = index.scanned_bytes_per_page(layer.kv_heads, layer.head_dim, size)
            scanned = each * (context // size) * len(spec.layers)
        elif name == MAPPED:
            fetched = self.model.spec.bytes_per_token * context
        self.points.append(
            Point(
                context=context,
                budget=budget,
                method=name,
                step_ms=1e3 * got.step_s,
                pages=0 if got.tiers is None else got.tiers.pages_chosen,
                hit_ratio=1 - got.missed / got.chosen if got.chosen else None,
                fetched=fetched,
                index_bytes=0 if got.tiers is None else got.tiers.index_bytes,
                scanned=scanned,
                kl_first=first,
                kl_steps=steps,
                agrees=_agreement(self.exact.answers, got.answers),
                right=right_answers(self.model, self.needles, got.answers),
                questions=len(self.needles),
            )
        )
        if self.path:
            with publish(self.path) as unfinished:
                text = json.dumps([dataclasses.asdict(p) for p in self.points], indent=1)
                unfinished.write_text(text + "\n", encoding="utf-8")


def _agreement(exact: Sequence[Answer], other: Sequence[Answer]) -> float:
    return statistics.mean(
        float(np.mean(a.logprobs.argmax(-1) == b.logprobs.argmax(-1)))
        for a, b in zip(exact, other, strict=True)
    )


def _finish(options: argparse.Namespace, points: Sequence[Point], model: Model) -> None:
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(report.plain_table("Measured", HEADINGS, lines(points)))
    body = [
        f"{model.name} ({model.dtype}), codes hidden in Python's language reference, pages of 16 "
        f"tokens, one sequence. The document is prefilled exactly; questions and answers are "
        f"decoded. Time, pages and bytes are means or medians over the steps of "
        f"{options.questions} questions and answers of 32 tokens. All methods run in this "
        f"framework, with host memory as the tier unless the name says otherwise; on a CPU the "
        f"device's memory is host memory too, so fetching costs calls and copies, not a bus.",
        report.markdown_table(HEADINGS, lines(points)),
    ]
    name, title = f"tiered {model.name}", f"Decoding over selected pages, {model.name}"
    report.finish(claims(points), options, name=name, title=title, body="\n\n".join(body))


if __name__ == "__main__":
    sys.exit(main())
