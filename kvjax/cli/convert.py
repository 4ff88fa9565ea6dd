"""`kvjax convert`: models made into others."""

import importlib.resources
import json
from pathlib import Path
from typing import Annotated, Any

import rich.table
import typer

from kvjax.cli import options, prompt
from kvjax.cli.console import Bars, bars, errors, note
from kvjax.cli.running import open_model
from kvjax.convert import Healing, Report, convert_and_judge, save_folder, split_texts
from kvjax.convert.healing_files import check_healing_folder
from kvjax.convert.mla import MEASURED_TOKENS, check_convertible, check_sizes
from kvjax.convert.plot import can_plot, plot_losses
from kvjax.convert.texts import LEAST_TOKENS
from kvjax.errors import KvjaxError

app = typer.Typer(no_args_is_help=True, help="Make a model into another one.")


@app.callback()
def _group() -> None:
    """Make a model into another one."""


@app.command("mla", no_args_is_help=True)
def convert_mla(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A name that `kvjax pull` lists, a GGUF file or a folder."
        ),
    ],
    output: Annotated[
        Path, typer.Argument(metavar="OUT", help="The folder to write, which must not be there.")
    ],
    *,
    rank: Annotated[
        int,
        typer.Option(help="Elements of a layer's latent, of keys and values together; a mean."),
    ],
    rope_dim: Annotated[
        int,
        typer.Option(help="Elements of a layer that stay rotated, for all heads; a mean, even."),
    ],
    tokens: Annotated[
        int,
        typer.Option(
            "--tokens",
            "-n",
            min=LEAST_TOKENS,
            help="Most that are measured; fewer are faster, and worse on other texts.",
        ),
    ] = MEASURED_TOKENS,
    even: Annotated[
        bool, typer.Option("--even", help="Give all layers the same sizes, not what each needs.")
    ] = False,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="UTF-8 text like what will come; once for each file. The last eighth of each "
            "judges.",
            show_default="an address of 1790 that ships with kvjax",
        ),
    ] = None,
    heal: Annotated[
        int, typer.Option(min=0, help="Steps of distillation, one window of text each.")
    ] = 0,
    train: Annotated[
        str, typer.Option(help="What distillation changes: attention, or all layers' weights.")
    ] = Healing.parts,
    learning_rate: Annotated[
        float, typer.Option(help="Of distillation, at its height.")
    ] = Healing.learning_rate,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn and shuffled.")] = 0,
    dtype: options.DTypeName = "float32",
    cache_dir: options.CacheDir = None,
    as_json: options.AsJson = False,
) -> None:
    """Make a model with keys and values into one that keeps latents (MLA), in fewer bytes.

    Takes minutes. A token takes rank + rope-dim elements a layer, where it took 2 x KV heads x head
    size. Distillation that is stopped goes on when the same command is given again.

    Example: kvjax convert mla smollm2-135m smollm2-mla --rank 224 --rope-dim 64 --text report.txt
    --heal 200
    """
    _check_output(output)
    kept = output.with_name(f"{output.name}.healing")
    healing = None
    for option, value, default in (
        ("train", train, Healing.parts),
        ("learning-rate", learning_rate, Healing.learning_rate),
    ):
        if not heal and value != default:
            raise KvjaxError(
                f"--{option} is of use with --heal only: say how many steps, such as --heal 200"
            )
    if heal:
        check_healing_folder(kept)
        settings: dict[str, Any] = {"parts": train, "learning_rate": learning_rate, "seed": seed}
        healing = Healing(steps=heal, **settings)
    contents = [prompt.read_text(file) for file in text] if text else [_shipped()]
    with bars() as progress:
        opened, _ = open_model(model, dtype=dtype, cache_dir=cache_dir, progress=progress)
        check_convertible(opened)
        check_sizes(opened, rank=rank, rope_dim=rope_dim)
        texts = split_texts(opened, contents)
        found = convert_and_judge(
            opened,
            texts,
            rank=rank,
            rope_dim=rope_dim,
            tokens=tokens,
            even=even,
            seed=seed,
            healing=healing,
            folder=kept,
            progress=progress.share,
            healing_progress=lambda step, loss: _show_step(progress, step, heal, loss),
        )
        save_folder(output, found.checkpoint, more=lambda folder: _tell(folder, found))
    if found.files is not None:
        found.files.drop()
        if not can_plot():
            note("no picture of the losses: matplotlib is missing; pip install 'kvjax[docs]'")
    if as_json:
        print(json.dumps({"output": str(output), **found.as_dict()}))
    else:
        _show(found)
    if found.verdict is not None:
        note(f"warning: {found.verdict}", "yellow")
    note(f"use with: kvjax generate --model {output} ...")


def _check_output(path: Path) -> None:
    """Refuse, minutes before it is needed, a folder that cannot be written.

    Raises:
      KvjaxError: something is there.
      OSError: its parent takes no folders.
    """
    if path.exists():
        raise KvjaxError(f"{path} is already there: name a new folder")
    path.mkdir(parents=True)
    path.rmdir()


def _tell(folder: Path, found: Report) -> None:
    """Writes beside a model what became of it."""
    told = json.dumps(found.as_dict(), indent=1) + "\n"
    (folder / "conversion.json").write_text(told, encoding="utf-8")
    if found.losses and can_plot():
        plot_losses(folder / "healing.png", found.losses)


def _shipped() -> str:
    file = importlib.resources.files("kvjax") / "data" / "state_of_the_union_1790.txt"
    return file.read_text(encoding="utf-8")


def _show_step(progress: Bars, step: int, steps: int, loss: float) -> None:
    progress.count("heal", step, steps)
    progress.describe("heal", f"healing, KL {loss:.4f}")


def _show(found: Report) -> None:
    """Writes what was kept of each layer, and what it costs."""
    layers = rich.table.Table(title="what layers keep", title_justify="left")
    for name in ("layer", "rank", "rotated", "of rotations", "of latents"):
        layers.add_column(name, justify="right")
    for index, layer in enumerate(found.layers):
        shares = f"{layer.rotation:.2%}", f"{layer.energy:.2%}"
        layers.add_row(str(index), str(layer.rank), str(layer.rope_dim), *shares)
    grid = rich.table.Table(title="on text that was not learnt from", title_justify="left")
    for name in ("model", "bytes a token", "perplexity", "KL, nats", "same likeliest token"):
        grid.add_column(name, justify="left" if name == "model" else "right")
    original = f"{found.converted.original_perplexity:.3f}"
    grid.add_row("original", f"{found.bytes_before:,}", original, "-", "-")
    for name, one in (("converted", found.converted), ("healed", found.healed)):
        if one is not None:
            numbers = f"{one.perplexity:.3f}", f"{one.kl:.4f}", f"{one.agreement:.1%}"
            grid.add_row(name, f"{found.bytes_after:,}", *numbers)
    errors().print(layers)
    errors().print(grid)
