"""`kvjax distill`: small networks that learn from a model."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import rich.table
import typer

from kvjax import decode
from kvjax.cli import options, prompt
from kvjax.cli.calibrate import check_output
from kvjax.cli.console import bars, errors, note
from kvjax.cli.running import open_model
from kvjax.decode.distill_indexer import check_settings
from kvjax.decode.indexer_recall import HELD_OUT, Kept
from kvjax.decode.layer_attention import LEAST_TOKENS
from kvjax.policies.indexer import DistilledIndexer

app = typer.Typer(no_args_is_help=True, help="Learn a small network from a model.")


@app.callback()
def _commands() -> None:
    """Learn a small network from a model."""


@app.command("indexer", no_args_is_help=True)
def distill_indexer(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="UTF-8 texts like those that will come."),
    ],
    *,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Where to write what `--indexer` of others reads."),
    ],
    tokens: Annotated[
        int,
        typer.Option(
            "--tokens",
            "-n",
            min=HELD_OUT * LEAST_TOKENS,
            help="Most that are read, of all texts in equal shares.",
        ),
    ] = 8192,
    heads: Annotated[int, typer.Option(help="Query heads of the indexer.")] = 8,
    dim: Annotated[int, typer.Option(help="Dimensions of its one key a token.")] = 64,
    steps: Annotated[int, typer.Option(help="Of training, each layer.")] = 300,
    learning_rate: Annotated[float, typer.Option(help="Adam's, at its greatest.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Of first weights and of the order of steps.")] = 0,
    model: options.ModelName = "smollm2-135m",
    dtype: options.DTypeName = "auto",
    cache_dir: options.CacheDir = None,
    as_json: options.AsJson = False,
) -> None:
    """Train a lightning indexer on a model's own attention, for `generate --indexer`.

    Takes minutes. A quarter of every text, its end, is not learned from: there the indexer is
    compared with other ways to choose. Steps of `generate` read pages that it chooses; what single
    tokens would keep is told too, as in DeepSeek's sparse attention.

    Example: kvjax distill indexer report.txt -o indexer.json
    """
    check_output(output)
    settings: dict[str, Any] = {
        "heads": heads, "dim": dim, "steps": steps, "learning_rate": learning_rate, "seed": seed,
    }  # fmt: skip
    check_settings(**settings)
    texts = [prompt.read_text(file) for file in files]
    with bars() as progress:
        opened, _ = open_model(model, dtype=dtype, cache_dir=cache_dir, progress=progress)
        learned, held_out = decode.learn_and_hold_out(opened, texts, tokens)
        found = decode.distill_indexer(
            opened,
            learned,
            tokens=tokens,
            **settings,
            progress=progress.share,
        )
        found.save(output)
        kept = decode.attention_kept(
            opened, found, held_out, tokens=tokens // HELD_OUT, progress=progress.share
        )
    if as_json:
        print(json.dumps(_told(found, kept, output)))
        return
    _show(kept)
    note(
        f"{len(found.learned)} layers; loss {_mean(found, 0):.2f} to {_mean(found, -1):.2f} nats; "
        f"use with: kvjax generate --indexer {output} ..."
    )


def _told(found: DistilledIndexer, kept: list[Kept], output: Path) -> dict[str, Any]:
    return {
        "output": str(output),
        "model": found.model,
        "layers": len(found.learned),
        "losses": {"first": _mean(found, 0), "last": _mean(found, -1)},
        "attention_kept": [dataclasses.asdict(each) for each in kept],
    }


def _mean(found: DistilledIndexer, step: int) -> float:
    """The loss of a step, mean of layers."""
    losses = [each[step] for each in found.losses if each]
    return sum(losses) / len(losses)


def _show(kept: list[Kept]) -> None:
    """Writes what each way to choose keeps."""
    grid = rich.table.Table(title="what of a step's attention is read", title_justify="left")
    for name in ("chosen by", "tokens read", "attention", "bytes read a token"):
        grid.add_column(name, justify="left" if name == "chosen by" else "right")
    for each in kept:
        grid.add_row(
            each.method, f"1 of {each.one_of}", f"{each.attention:.1%}", f"{each.read_bytes:,.0f}"
        )
    errors().print(grid)
