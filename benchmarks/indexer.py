"""What of a step's attention is read: a distilled lightning indexer against other ways to choose.

    python -m benchmarks.indexer TEXT...                 # about twenty minutes
    python -m benchmarks.indexer --indexer FILE TEXT...  # one that was distilled of these texts
    python -m benchmarks.indexer --quick

Texts are those of `kvjax distill indexer`: a quarter of each, its end, is judged by and not learned
from. Without texts it is Python's language reference.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

import jax
from rich.console import Console

from benchmarks import needles, report
from kvjax.decode import Kept, attention_kept, distill_indexer, learn_and_hold_out
from kvjax.decode.indexer_recall import HELD_OUT
from kvjax.load import load
from kvjax.model import Model
from kvjax.policies import DistilledIndexer

HEADINGS = ("chosen by", "tokens read", "attention kept", "bytes read a token of context")

TOKENS, PAGES = "indexer, tokens", "indexer, pages"
AGAINST = ("page means", "Quest's bounds", "exact keys")
AIM = "page means"
"""The indexer at 1 of 16 is to keep as much as these at 1 of 8."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    options = report.parser(__doc__.splitlines()[0])
    options.add_argument("texts", nargs="*", type=pathlib.Path, metavar="TEXT", help="UTF-8 files")
    options.add_argument("--model", default="smollm2-135m", help="a name or a GGUF file")
    options.add_argument("--tokens", type=int, default=None, help="that are read; by default 12288")
    options.add_argument("--steps", type=int, default=None, help="of training; by default 300")
    options.add_argument(
        "--indexer", type=pathlib.Path, metavar="FILE", help="do not distil one, judge this"
    )
    parsed = options.parse_args(arguments)
    parsed.tokens = parsed.tokens or (1024 if parsed.quick else 12_288)
    parsed.steps = parsed.steps or (5 if parsed.quick else 300)
    return parsed


def main() -> int:
    """Run the benchmark."""
    options = parse()
    jax.config.update("jax_platforms", "cpu")
    with Console(stderr=True).status("loading the model") as status:
        model = load(options.model)
        texts = [file.read_text(encoding="utf-8") for file in options.texts] or [needles.text()]
        learned, held_out = learn_and_hold_out(model, texts, options.tokens)

        def say(phase: str, share: float) -> None:
            status.update(f"{phase}: {share:.0%}")

        if options.indexer is not None:
            indexer = DistilledIndexer.load(options.indexer)
        else:
            indexer = distill_indexer(
                model, learned, tokens=options.tokens, steps=options.steps, progress=say
            )
        tokens = options.tokens // HELD_OUT
        kept = attention_kept(model, indexer, held_out, tokens=tokens, progress=say)
    name = f"indexer {model.name}"
    title = f"A distilled lightning indexer, {model.name}"
    report.finish(claims(kept), options, name=name, title=title, body=body(kept, model, options))
    return 0


def claims(kept: Sequence[Kept]) -> list[report.Row]:
    """What the indexer chooses, tokens and pages, against pages of others, as many and twice.

    Args:
      kept: what was measured.
    """
    return [
        report.Row(
            claim=f"{ours.method}, 1 of {ours.one_of}, {ours.read_bytes:.0f} bytes",
            metric="attention kept",
            unit="",
            ours=ours.attention,
            baseline=f"pages by {each.method}, 1 of {each.one_of}, {each.read_bytes:.0f} bytes",
            baseline_value=each.attention,
            aim=">= 1" if each.method == AIM and each.one_of == 8 else None,
        )
        for ours in kept
        if ours.method in (TOKENS, PAGES)
        for each in kept
        if each.method in AGAINST
    ]


def body(kept: Sequence[Kept], model: Model, options: argparse.Namespace) -> str:
    """The section's text and table.

    Args:
      kept: what was measured.
      model: whose attention.
      options: the command line's.
    """
    lines = [
        [each.method, f"1 of {each.one_of}", f"{each.attention:.3f}", f"{each.read_bytes:.0f}"]
        for each in kept
    ]
    return "\n\n".join(
        [
            f"{model.name} ({model.dtype}), {options.tokens:,} tokens of {len(options.texts) or 1} "
            f"texts, three quarters of each learned from, the last 32 tokens of the rest judged "
            f"by: the share of their attention, mean of heads and layers, that goes to what is "
            f"read. An indexer chooses pages of 16 tokens for all heads of a layer, as `generate` "
            f"reads them, or as many single tokens, as DSA does; others choose pages for each KV "
            f"head. Bytes are those of the index, and of chosen keys and values in bfloat16, a "
            f"layer.",
            report.markdown_table(HEADINGS, lines),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
