"""Storing tokens in fewer bits: bytes, quality and time of each format, and of two peers' caches.

    python benchmarks/peers/install.py .peers transformers llama_cpp     # once
    python -m benchmarks.formats                         # about half an hour
    python -m benchmarks.formats --quick                 # one short document, a few formats
    python -m benchmarks.formats --model MODEL.gguf --calibration FILE --formats int4 kvquant4

A document with hidden codes is read twice a format: in chunks that see what came before as the
format stored it, as kvjax does; and exactly, to be encoded after. Questions about it are decoded
token by token; distributions at their tokens are compared with those of the exact cache, and
answers are judged. Peers read the same tokens with the same dequantized weights, each judged
against its own exact cache.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from rich.console import Console

from benchmarks import formats_timing, report
from benchmarks.formats_claims import EXACTLY, HEADINGS, OURS, STORED, Point, claims, lines
from benchmarks.formats_measure import ANSWER, Run, against, encoded_after, run
from benchmarks.formats_methods import BF16, METHODS, Method, calibrated
from benchmarks.formats_peers import PEERS, peer_points
from benchmarks.formats_plot import plot
from benchmarks.needles import Needle, document
from kvjax.config import CacheConfig
from kvjax.formats import CALIBRATED
from kvjax.load import load
from kvjax.model import Model
from kvjax.programs import keep_programs
from kvjax.registry import MODELS, model_path
from kvjax.storage.files import publish

CONTEXT, QUICK_CONTEXT = "4096", "512"
QUICK_FORMATS = (BF16, "int4")

Say = Callable[[str], None]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    options = report.parser(__doc__.splitlines()[0])
    options.add_argument("--model", default="smollm2-135m", help="a name or a GGUF file")
    options.add_argument("--contexts", default=None, help=f"tokens; by default {CONTEXT}")
    options.add_argument(
        "--calibration",
        type=pathlib.Path,
        metavar="FILE",
        help="of this model; adds " + ", ".join(CALIBRATED),
    )
    options.add_argument(
        "--formats",
        nargs="*",
        default=None,
        choices=[*METHODS, *CALIBRATED],
        metavar="FORMAT",
        help="all, or any of: " + "; ".join(METHODS),
    )
    options.add_argument(
        "--read",
        nargs="+",
        default=[STORED, EXACTLY],
        choices=[STORED, EXACTLY],
        help="how the document is read; both by default (the first compiles for a minute a format)",
    )
    options.add_argument(
        "--peers", nargs="*", default=None, choices=list(PEERS), help="all by default"
    )
    options.add_argument("--peers-folder", type=pathlib.Path, default=report.REPOSITORY / ".peers")
    options.add_argument("--threads", type=int, default=2, help="of peers")
    options.add_argument("--questions", type=int, default=None, help="codes hidden; 4 by default")
    options.add_argument("--seed", type=int, default=0, help="of codes and places")
    options.add_argument(
        "--points", type=pathlib.Path, metavar="FILE", help="write what is measured as it comes"
    )
    parsed = options.parse_args(arguments)
    contexts = parsed.contexts or (QUICK_CONTEXT if parsed.quick else CONTEXT)
    parsed.contexts = [int(part) for part in contexts.split(",")]
    everything = [*METHODS, *(CALIBRATED if parsed.calibration else ())]
    chosen = QUICK_FORMATS if parsed.quick else everything
    parsed.formats = list(chosen) if parsed.formats is None else parsed.formats
    if parsed.peers is None:
        parsed.peers = [] if parsed.quick else list(PEERS)
    parsed.questions = parsed.questions or (1 if parsed.quick else 4)
    missing = [name for name in parsed.formats if name not in everything]
    if missing:
        options.error(f"{missing[0]} needs --calibration FILE, which `kvjax calibrate` writes")
    return parsed


def main() -> int:
    """Run the benchmark."""
    options = parse()
    report.check_plots(options)
    jax.config.update("jax_platforms", "cpu")
    keep_programs(options.peers_folder / "cache")
    console = Console(stderr=True)
    began = time.monotonic()
    points: list[Point] = []
    with console.status("loading the model") as status:

        def say(text: str) -> None:
            line = f"{text} ({time.monotonic() - began:.0f} s)"
            status.update(line)
            if not console.is_terminal:
                console.print(line, markup=False)

        model = load(options.model, dtype="float32")
        methods = METHODS | (calibrated(options.calibration) if options.calibration else {})
        methods = {name: methods[name] for name in options.formats}
        for context in options.contexts:
            _measure(model, context, methods, options, Keeper(points, options.points), say)
    _finish(options, points, model)
    return 0


@dataclasses.dataclass(frozen=True)
class Keeper:
    """Keeps points, and writes them as they come."""

    points: list[Point]
    path: pathlib.Path | None

    def __call__(self, *points: Point) -> None:
        """Keep some more."""
        self.points.extend(points)
        self._write()

    def time(self, index: int, **times: float) -> None:
        """Fill in a point's times."""
        self.points[index] = dataclasses.replace(self.points[index], **times)
        self._write()

    def _write(self) -> None:
        if self.path:
            with publish(self.path) as unfinished:
                text = json.dumps([dataclasses.asdict(p) for p in self.points], indent=1)
                unfinished.write_text(text + "\n", encoding="utf-8")


def _measure(
    model: Model,
    context: int,
    methods: dict[str, Method],
    options: argparse.Namespace,
    keep: Keeper,
    say: Say,
) -> None:
    """Every format and peer on one document; times come last, so that they come together."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    ids, needles = document(tokenizer, context, options.questions, options.seed)
    questions = [tokenizer.encode(needle.question, add_bos=False) for needle in needles]

    def right(answers: Sequence[list[int]]) -> int:
        said = map(tokenizer.decode, answers)
        return sum(needle.code in text for needle, text in zip(needles, said, strict=True))

    task = _Task(model, ids, questions, needles, right, context)
    exact = run(model, ids, questions, CacheConfig(), lambda text: say(f"exact: {text}"))
    for read in sorted(options.read, reverse=True):
        for name, method in methods.items():

            def told(text: str, at: str = f"{name}, read {read}") -> None:
                say(f"{at}: {text}")

            if read == STORED:
                got = run(model, ids, questions, method.cache(), told)
            else:
                got = encoded_after(model, exact, method, questions, told)
            keep(_point(task, name, read, exact, got))
    for peer in options.peers:
        request = {
            "gguf": str(_gguf(options.model)),
            "document": ids,
            "questions": questions,
            "answer": ANSWER,
            "threads": options.threads,
            "cache_dir": str((options.peers_folder / "cache").resolve()),
        }
        found, why = peer_points(peer, request, options.peers_folder, say)
        keep(*(_peer_point(task, peer, point, found[0]) for point in found))
        if why:
            say(f"{PEERS[peer]} was not measured: {why}")
    _times(task, methods, exact, keep, say)


@dataclasses.dataclass(frozen=True)
class _Task:
    """A document and questions about it."""

    model: Model
    ids: list[int]
    questions: list[list[int]]
    needles: Sequence[Needle]
    right: Callable[[Sequence[list[int]]], int]
    context: int

    @property
    def bf16_bytes(self) -> float:
        """That a token takes in bf16."""
        return 2 * sum(layer.elements_per_token for layer in self.model.spec.layers)


def _point(task: _Task, name: str, read: str, exact: Run, got: Run) -> Point:
    """What one format did."""
    asked = [
        against(task.model, mine, other, [*question[1:], 0])
        for mine, other, question in zip(
            exact.questions, got.questions, task.questions, strict=True
        )
    ]
    weights = [len(question) / sum(map(len, task.questions)) for question in task.questions]
    text = None
    if read == STORED:
        half = len(task.ids) // 2
        pair = (run.document[half:-1] for run in (exact, got))
        text = against(task.model, *pair, task.ids[half + 1 :])
    return Point(
        context=task.context,
        engine=OURS,
        name=name,
        read=read,
        bytes_per_token=got.kept.per_token,
        share=got.kept.per_token / task.bf16_bytes,
        recent=got.kept.recent,
        kl=sum(w * a.kl for w, a in zip(weights, asked, strict=True)),
        agrees=sum(w * a.agrees for w, a in zip(weights, asked, strict=True)),
        right=task.right(got.answers),
        exact_right=task.right(exact.answers),
        questions=len(task.questions),
        kl_text=text.kl if text else None,
        perplexity=math.exp(text.nll) if text else None,
    )


def _peer_point(task: _Task, peer: str, found: dict[str, Any], exact: dict[str, Any]) -> Point:
    """What one kind of a peer's caches did; `exact` is its exact one."""
    return Point(
        context=task.context,
        engine=PEERS[peer],
        name=found["kind"],
        read=EXACTLY if peer == "transformers" else STORED,
        bytes_per_token=found["bytes_per_token"],
        share=found["bytes_per_token"] / task.bf16_bytes,
        kl=found["kl"],
        agrees=found["agrees"],
        right=task.right(found["answers"]),
        exact_right=task.right(exact["answers"]),
        questions=len(task.questions),
    )


def _times(task: _Task, methods: dict[str, Method], exact: Run, keep: Keeper, say: Say) -> None:
    """Attention and encoding alone, bf16 beside each format."""
    largest = max(method.page_size for method in methods.values())
    tokens = formats_timing.tokens_of(exact.state.cache, task.context // largest * largest)
    for name, method in methods.items():
        say(f"timing {name}")
        config, size = task.model.config, method.page_size
        plain = formats_timing.measure(tokens, config, None, size)
        mine = formats_timing.measure(tokens, config, method.format, size)
        times = {"attention_us": 1e6 * mine.attention, "bf16_attention_us": 1e6 * plain.attention}
        if method.format:
            times["encode_us"] = 1e6 * mine.encode
        for index, p in enumerate(keep.points):
            if (p.engine, p.name, p.context) == (OURS, name, task.context):
                keep.time(index, **times)


def _gguf(model: str) -> pathlib.Path:
    return model_path(model) if model in MODELS else pathlib.Path(model).resolve()


def _finish(options: argparse.Namespace, points: Sequence[Point], model: Model) -> None:
    console = Console(width=None if sys.stdout.isatty() else 220)
    console.print(report.plain_table("Measured", HEADINGS, lines(points)))
    body = [
        f"{model.name} (computed in float32), codes hidden in Python's language reference, "
        f"{options.questions} questions. A document is read as stored: in chunks of 512 tokens "
        f"that see earlier ones as the format stored them; or exactly, and encoded after. "
        f"Questions, and answers of {ANSWER} tokens, are decoded. KL and agreement are means over "
        f"the questions' tokens, against the same engine's exact cache (float32; of llama.cpp "
        f"f16); KL text and perplexity are of the document's second half. Bytes are those of the "
        f"arrays, scales and all, and of first tokens that stay bf16; the newest, which do too, "
        f"are counted apart. Behind the answers that are right stand those of the exact cache. "
        f"llama.cpp runs the file's weights in float32. Times are of XLA on this processor, a "
        f"layer's page of 16 tokens with "
        f"all its heads, in a loop over all layers.",
        report.markdown_table(HEADINGS, lines(points)),
    ]
    target = options.docs or (None if options.quick else report.DOCUMENT)
    if target:
        picture = target.parent / target.stem / f"formats-{model.name}.png"
        plot(points, picture, model.name)
        body.insert(1, f"![KL against bytes a token]({picture.relative_to(target.parent)})")
    name, title = f"formats {model.name}", f"Formats, {model.name}"
    report.finish(claims(points), options, name=name, title=title, body="\n\n".join(body))


if __name__ == "__main__":
    sys.exit(main())
