"""A real model converted to latents: bytes a token, and what is lost before and after healing.

    python -m benchmarks.latents            # over an hour on two cores; needs matplotlib
    python -m benchmarks.latents --quick

SmolLM2-135M keeps keys and values of 3 heads of 64 elements a layer: 384 elements. It is converted
to latents (`kvjax convert mla`) of 100 % and less of these bytes, judged on text that it has not
learnt from, healed by distillation from itself, and judged again. All is learnt from Python's
language reference, or from the files of --text; the last eighth of it judges, and so does a text of
another kind and century, the address of 1790 that ships with kvjax. Latents are then stored in int8
and in int4, beside keys and values in the same formats.
"""

import argparse
import dataclasses
import importlib.resources
import pathlib
import sys
import time
from collections.abc import Callable

import numpy as np
from rich.console import Console

from benchmarks import latents_formats, latents_plot, needles, report
from benchmarks.latents_formats import KEYS_AND_VALUES, InFormat, in_formats
from benchmarks.report import Row
from kvjax.convert import (
    Healing,
    Judgement,
    Texts,
    convert_and_judge,
    heal,
    judged,
    split_texts,
)
from kvjax.convert.mla import MEASURED_TOKENS, measured_pairs
from kvjax.convert.pairs import Pairs
from kvjax.convert.texts import WINDOW_TOKENS, windows_of
from kvjax.load import load
from kvjax.model import Model, from_checkpoint
from kvjax.models import Checkpoint
from kvjax.programs import keep_programs

SHARES = (1.0, 0.75, 0.625, 0.5, 0.375, 0.25)
"""Of the bytes that keys and values take."""

AIMS = {0.75: 1.03, 0.5: 1.1}
"""Times the original's perplexity, after healing, by share of the bytes."""

ROTATED = 0.25
"""The share of a token's elements that stay rotated, where there are fewer than before."""

STEPS, QUICK_STEPS = 150, 2
QUICK_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class Point:
    """One size of latents."""

    share: float  # of the bytes of keys and values
    rank: int
    rope_dim: int
    bytes: int  # a token, in float32
    bytes_before: int
    converted: Judgement
    other_converted: Judgement  # on the text of another kind
    convert_seconds: float
    healed: Judgement | None = None
    other_healed: Judgement | None = None
    heal_seconds: float = 0.0
    in_formats: tuple[InFormat, ...] = ()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    options = report.parser(__doc__.splitlines()[0])
    options.add_argument("--model", default="smollm2-135m", help="a name or a GGUF file")
    options.add_argument(
        "--text", type=pathlib.Path, nargs="+", metavar="FILE", help="what to learn from"
    )
    options.add_argument("--shares", type=float, nargs="+", help=f"by default {SHARES}")
    options.add_argument(
        "--tokens", type=int, default=MEASURED_TOKENS, help="that a conversion measures"
    )
    options.add_argument("--steps", type=int, help=f"of healing, by default {STEPS}")
    options.add_argument("--train", default="all", help="what heals: attention, or all")
    options.add_argument("--rate", type=float, default=Healing.learning_rate, help="of learning")
    options.add_argument("--rotated", type=float, default=ROTATED, help="share of the elements")
    parsed = options.parse_args(arguments)
    quick = parsed.quick
    parsed.steps = (QUICK_STEPS if quick else STEPS) if parsed.steps is None else parsed.steps
    parsed.shares = parsed.shares or ((0.5,) if quick else SHARES)
    return parsed


def main() -> int:
    """Run the benchmark."""
    options = parse()
    report.check_plots(options)
    keep_programs()
    model = load(options.model, dtype="float32")
    texts = learnt_from(model, options.text, QUICK_TOKENS if options.quick else None)
    other = other_text(model, texts.held_out.shape[1])
    with Console(stderr=True).status("measuring rotations") as status:
        pairs = measured_pairs(model, texts.learnt, tokens=options.tokens)
        points = [
            measured(model, texts, other, pairs, share, options, status.update)
            for share in options.shares
        ]
        windows = texts.held_out, other
        plain: tuple[InFormat, ...] = ()
        if not options.quick:
            plain = in_formats(model, model, KEYS_AND_VALUES, *windows, status.update)
    packed = [*plain, *(one for point in points for one in point.in_formats)]
    document = options.docs or (None if options.quick else report.DOCUMENT)
    picture = ""
    if document:
        picture = latents_plot.draw(points, document.parent / "benchmarks" / "latents.png")
    source = "the given files" if options.text else "Python's language reference"
    report.finish(
        rows_of(points) + latents_formats.rows_of(packed),
        options,
        name="latents",
        title="Keys and values made into latents",
        body=f"{options.model}, converted by activations and gradients on "
        f"{texts.learnt.size:,} tokens of {source} (at most {options.tokens:,} of them measured), "
        f"healed in {options.steps} steps of {texts.learnt.shape[1]:,} tokens (weights that "
        f"change: {options.train}); judged on {texts.held_out.size:,} other tokens of it, and on "
        f"{other.size:,} of the address of 1790, a kind of text that was not learnt from. Windows "
        f"are texts of their own. {picture}\n\n{curve(points)}\n\nThe same stored in fewer bits, "
        "the newest page of a window as it is, in int4 the first one too; KL of the format is from "
        f"the same model's predictions without it.\n\n{latents_formats.table(packed)}",
    )
    return 0


def learnt_from(model: Model, files: list[pathlib.Path] | None, most: int | None) -> Texts:
    """Windows of the texts.

    Args:
      model: whose tokenizer to use.
      files: texts; None is Python's language reference.
      most: tokens that are learnt from; None is all.
    """
    contents = [file.read_text(encoding="utf-8") for file in files or ()] or [needles.text()]
    if most is not None:
        contents = [text[: 4 * most // len(contents)] for text in contents]
    return split_texts(model, contents, window=WINDOW_TOKENS if most is None else 256)


def other_text(model: Model, window: int) -> np.ndarray:
    """Windows of the address of 1790, which nothing is learnt from.

    Args:
      model: whose tokenizer to use.
      window: tokens of one.
    """
    address = importlib.resources.files("kvjax") / "data" / "state_of_the_union_1790.txt"
    return windows_of(model.tokenizer.encode(address.read_text(encoding="utf-8")), window)


def sizes(model: Model, share: float, rotated: float) -> tuple[int, int]:
    """Elements of a layer's latent, and rotated ones, that take a share of the bytes.

    Args:
      model: the original.
      share: of its bytes.
      rotated: share of the elements that stay rotated; of all bytes, half of them do.
    """
    layer = model.config.layers[0]
    most = layer.num_kv_heads * layer.head_dim
    if share >= 1:
        return most, most
    elements = round(2 * most * share)
    rope_dim = round(elements * rotated / 2) * 2
    return elements - rope_dim, rope_dim


def measured(
    model: Model,
    texts: Texts,
    other: np.ndarray,
    pairs: list[Pairs],
    share: float,
    options: argparse.Namespace,
    say: Callable[[str], None],
) -> Point:
    """Convert to a share of the bytes, judge, heal and judge again.

    Args:
      model: the original.
      texts: to learn from and to judge by.
      other: windows of another kind of text.
      pairs: of `measured_pairs`.
      share: of the bytes; with all of them nothing is healed.
      options: of the command line.
      say: what is being done.
    """
    rank, rope_dim = sizes(model, share, options.rotated)
    name = f"{share:.1%} of the bytes ({rank} + {rope_dim} elements)"
    began = time.perf_counter()
    made = convert_and_judge(
        model,
        texts,
        rank=rank,
        rope_dim=rope_dim,
        tokens=options.tokens,
        pairs=pairs,
        progress=lambda phase, done: say(f"{name}: {phase}, {done:.0%}"),
    )
    between = time.perf_counter()
    point = Point(
        share=share,
        rank=rank,
        rope_dim=rope_dim,
        bytes=made.bytes_after,
        bytes_before=made.bytes_before,
        converted=made.converted,
        other_converted=_judged(model, made.checkpoint, other),
        convert_seconds=between - began,
    )

    def tell(what: str, one: Judgement, other_one: Judgement) -> None:
        """As it comes: what follows takes long, and may be cut short."""
        print(
            f"{name}, {what}: KL {one.kl:.4f}, perplexity {one.ratio - 1:+.1%}; address of 1790: "
            f"KL {other_one.kl:.4f}, perplexity {other_one.ratio - 1:+.1%}",
            file=sys.stderr,
        )

    tell("converted", point.converted, point.other_converted)

    def with_formats(point: Point, checkpoint: Checkpoint) -> Point:
        if options.quick:  # a format compiles for minutes
            return point
        now = from_checkpoint(checkpoint, name="latents")
        stored = f"latents, {share:.1%} of the bytes"
        return dataclasses.replace(
            point, in_formats=in_formats(model, now, stored, texts.held_out, other, say)
        )

    if share >= 1 or not options.steps:
        return with_formats(point, made.checkpoint)
    between = time.perf_counter()
    learnt = heal(
        model,
        made.checkpoint,
        texts.learnt,
        Healing(options.steps, parts=options.train, learning_rate=options.rate),
        progress=lambda step, loss: say(f"{name}: step {step} of {options.steps}, KL {loss:.4f}"),
    )
    seconds, healed = time.perf_counter() - between, learnt.checkpoint
    after, other_after = (_judged(model, healed, x) for x in (texts.held_out, other))
    tell(f"healed in {seconds:.0f} s", after, other_after)
    point = dataclasses.replace(point, heal_seconds=seconds, healed=after, other_healed=other_after)
    return with_formats(point, healed)


def _judged(model: Model, checkpoint: Checkpoint, windows: np.ndarray) -> Judgement:
    return judged(model, from_checkpoint(checkpoint, name="latents"), windows)


def rows_of(points: list[Point]) -> list[Row]:
    """Bytes, KL and perplexity against the original's, a few rows a point."""
    rows = []
    for point in points:
        claim = f"{point.share:.1%} of the bytes: {point.rank} + {point.rope_dim} elements a layer"
        rows.append(
            Row(
                claim=claim,
                metric="stored of a token",
                unit="bytes (float32)",
                ours=point.bytes,
                baseline="keys and values",
                baseline_value=point.bytes_before,
                aim=f"<= {point.share + 0.005:.3f}",
            )
        )
        for name, one, other in (
            ("converted", point.converted, point.other_converted),
            ("healed", point.healed, point.other_healed),
        ):
            if one is None or other is None:
                continue
            aim = AIMS.get(point.share) if name == "healed" else None
            aim = 1.0001 if point.share >= 1 else aim
            rows.append(_perplexity(claim, f"perplexity, {name}", one, aim))
            rows.append(_perplexity(claim, f"perplexity of 1790, {name}", other, None))
            rows.append(Row(claim=claim, metric=f"KL, {name}", unit="nats", ours=one.kl))
    return rows


def _perplexity(claim: str, metric: str, one: Judgement, aim: float | None) -> Row:
    return Row(
        claim=claim,
        metric=metric,
        unit="",
        ours=one.perplexity,
        baseline="the original",
        baseline_value=one.original_perplexity,
        aim=None if aim is None else f"<= {aim:g}",
    )


def curve(points: list[Point]) -> str:
    """A Markdown table, a line a size."""
    headings = (
        "bytes", "latent + rotated", "KL", "KL healed", "perplexity", "healed", "of 1790",
        "of 1790, healed",
    )  # fmt: skip

    def times(one: Judgement | None) -> str:
        return "-" if one is None else f"{one.ratio - 1:+.1%}"

    lines = [
        (
            f"{point.share:.1%}",
            f"{point.rank} + {point.rope_dim}",
            f"{point.converted.kl:.4f}",
            "-" if point.healed is None else f"{point.healed.kl:.4f}",
            times(point.converted),
            times(point.healed),
            times(point.other_converted),
            times(point.other_healed),
        )
        for point in points
    ]
    seconds = [point.heal_seconds for point in points if point.heal_seconds]
    healing = f" Healing took {min(seconds):.0f} to {max(seconds):.0f} s." if seconds else ""
    took = [point.convert_seconds for point in points]
    return (
        f"{report.markdown_table(headings, lines)}\n\nPerplexities are against the original's on "
        f"the same text. A conversion took {min(took):.0f} to {max(took):.0f} s, compiling and "
        f"judging included.{healing}"
    )


if __name__ == "__main__":
    sys.exit(main())
