"""`kvjax calibrate`: short runs that choose settings for this machine."""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Annotated

import rich.table
import typer

from kvjax import decode
from kvjax.cli import options, prompt, stored, tiers
from kvjax.cli.console import bars, errors, note
from kvjax.cli.running import open_model
from kvjax.config import CacheConfig
from kvjax.decode import Calibration, PrefixConfig, Trial
from kvjax.decode.calibrate_formats import LEAST_TOKENS
from kvjax.errors import KvjaxError
from kvjax.formats import CALIBRATED
from kvjax.policies import Select, Window

app = typer.Typer(no_args_is_help=True, help="Choose settings for this machine by short runs.")


@app.command("tiers", no_args_is_help=True)
@options.with_options(
    cache=options.cache_options, config=stored.prefix_options, selected=tiers.tier_options
)
def calibrate_tiers(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="UTF-8 texts like the prompts that will come; several are run as one batch.",
        ),
    ],
    *,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Where to write what `--calibration` of others reads."),
    ],
    new_tokens: Annotated[
        int,
        typer.Option(
            "--new-tokens", "-n", help="Last tokens of a text that are decoded one by one."
        ),
    ] = 32,
    runs: Annotated[int, typer.Option(help="Of every setting; times are medians.")] = 3,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Also share the window's slots out among layers and KV heads, by what each "
            "misses; for prompts as long as these.",
        ),
    ] = False,
    model: options.ModelName = "smollm2-135m",
    dtype: options.DTypeName = "auto",
    store: stored.StoreUrl = None,
    cache_dir: options.CacheDir = None,
    as_json: options.AsJson = False,
    cache: CacheConfig,
    config: PrefixConfig,
    selected: tiers.TierOptions,
) -> None:
    """Choose centroids, window and micro-batches for `generate --select`; takes minutes.

    Every setting runs on the texts' last tokens. Centroids are tried where --select has some
    (hierarchical, kvdrive, retroinfer).

    Example: kvjax calibrate tiers report.txt --select hierarchical -o tiers.json
    """
    if selected.calibration is not None:
        raise KvjaxError("--calibration is what this makes: name a new file with --output")
    if dataclasses.replace(selected.window, evict=Window.evict) != Window():
        raise KvjaxError("--window and --window-plan are what this chooses: leave them out")
    check_output(output)
    select = selected.select or Select()
    selected = dataclasses.replace(selected, select=select)
    cache = tiers.with_tiers(cache, selected, config, store=store)
    texts = [prompt.read_text(file) for file in files]
    with bars() as progress:
        opened, _ = open_model(model, dtype=dtype, cache_dir=cache_dir, progress=progress)
        found = decode.calibrate(
            opened,
            texts,
            cache,
            new_tokens=new_tokens,
            runs=runs,
            plan=plan,
            progress=progress.share,
        )
    found.save(output)
    if as_json:
        print(json.dumps(dataclasses.asdict(found)))
        return
    _show(found)
    note(f"use with: kvjax generate {selected.selected_by} --calibration {output} ...")


@app.command("formats", no_args_is_help=True)
def calibrate_formats(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="UTF-8 texts like those that will come."),
    ],
    *,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Where to write what `--format-calibration` of others reads."
        ),
    ],
    tokens: Annotated[
        int,
        typer.Option(
            "--tokens",
            "-n",
            min=LEAST_TOKENS,
            help="Most that are measured, of all texts in equal shares.",
        ),
    ] = 4096,
    model: options.ModelName = "smollm2-135m",
    dtype: options.DTypeName = "auto",
    cache_dir: options.CacheDir = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure keys and values for the formats fp8-calibrated, mixed4, mixed3 and kvquant4 to 2.

    The model reads the texts, for kvquant's levels goes back through them, and for the mixed ones
    tries each layer alone; takes minutes.

    Example: kvjax calibrate formats report.txt -o formats.json
    """
    check_output(output)
    texts = [prompt.read_text(file) for file in files]
    with bars() as progress:
        opened, _ = open_model(model, dtype=dtype, cache_dir=cache_dir, progress=progress)
        found = decode.calibrate_formats(opened, texts, tokens=tokens, progress=progress.share)
    found.save(output)
    if as_json:
        print(
            json.dumps(
                {
                    "output": str(output),
                    "model": found.model,
                    "tokens": found.tokens,
                    "layers": len(found.layers),
                    "formats": CALIBRATED,
                }
            )
        )
        return
    note(
        f"{found.tokens:,} tokens, {len(found.layers)} layers; use with: kvjax generate "
        f"--format {CALIBRATED[1]} --format-calibration {output} ..."
    )


def check_output(path: Path) -> None:
    """Refuse, minutes before it is needed, a file that cannot be written.

    Args:
      path: of the file.

    Raises:
      KvjaxError: it is a folder.
      OSError: its folder takes no files.
    """
    if path.is_dir():
        raise KvjaxError(f"--output is {path}, a folder: name a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def _show(found: Calibration) -> None:
    """Writes a table of trials, those that were chosen marked."""
    taken = {
        "centroids": found.per_centroid,
        "window": found.times,
        "micro-batches": found.micro_batches,
    }
    grid = rich.table.Table(title="what was tried (* is taken)", title_justify="left")
    for name in ("setting", "value", "step ms", "fetch ms", "look-up ms", "hits", "KL"):
        grid.add_column(name, justify="left" if name == "setting" else "right")
    for trial in found.trials:
        mark = " *" if trial.value == taken[trial.setting] else ""
        grid.add_row(f"{trial.setting}{mark}", *_numbers(trial))
    errors().print(grid)


def _numbers(trial: Trial) -> list[str]:
    evaluated, ratio, kl = trial.evaluate_seconds, trial.hit_ratio, trial.kl
    return [
        f"{trial.value:g}",
        f"{1e3 * trial.step_seconds:.1f}",
        f"{1e3 * trial.fetch_seconds:.2f}",
        "-" if evaluated is None else f"{1e3 * evaluated:.2f}",
        "-" if ratio is None else f"{ratio:.1%}",
        "-" if kl is None else f"{kl:.4f}",
    ]
