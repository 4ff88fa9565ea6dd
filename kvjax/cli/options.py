"""Options that several commands share: each is defined here, once, as a group.

A group is a function whose parameters are options and whose result is the value they describe. A
command takes that value; `with_options` puts the group's options in the value's place.
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kvjax.config import CacheConfig
from kvjax.decode import Sampling
from kvjax.errors import KvjaxError
from kvjax.formats import CALIBRATED, NAMED, Format, load_calibrated

_CACHE, _SAMPLING = "Cache", "Sampling"

ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="A name that `kvjax pull` lists, hf:ORG/NAME, a GGUF file or a checkpoint folder.",
    ),
]
CacheDir = Annotated[
    Path | None,
    typer.Option(help="The folder of models, weights and programs that kvjax keeps."),
]
DTypeName = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="Of the model's matrices: float32, bfloat16, or auto (bfloat16 where the hardware "
        "multiplies it).",
    ),
]
PrefillChunk = Annotated[
    int, typer.Option(help="Most prompt tokens run at once.", rich_help_panel=_CACHE)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show compilations and where the time went.")
]


def cache_options(
    page_size: Annotated[
        int, typer.Option(help="Tokens a page, 8 to 128.", rich_help_panel=_CACHE)
    ] = 16,
    num_pages: Annotated[
        int | None,
        typer.Option(
            help="Pages in the pool.", rich_help_panel=_CACHE, show_default="as many as needed"
        ),
    ] = None,
    cache_dtype: Annotated[
        str | None,
        typer.Option(
            help="Of stored keys and values: float32, bfloat16 or float16.",
            rich_help_panel=_CACHE,
            show_default="the model's",
        ),
    ] = None,
    index_dtype: Annotated[
        str | None,
        typer.Option(
            help="Of the keys that an indexer chooses tokens by (DeepSeek V3.2, GLM-5): fp8, fp4.",
            rich_help_panel=_CACHE,
            show_default="the cache's",
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help=f"How full pages are stored: {', '.join(NAMED)}; or, with --format-calibration, "
            f"{', '.join(CALIBRATED)}.",
            rich_help_panel=_CACHE,
            show_default="as they are",
        ),
    ] = None,
    format_calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What `kvjax calibrate formats` wrote for the model.",
            rich_help_panel=_CACHE,
            show_default=False,
        ),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(
            help="Insist on an attention implementation; `kvjax info` lists them.",
            rich_help_panel=_CACHE,
            show_default="chosen for the hardware",
        ),
    ] = None,
) -> CacheConfig:
    """How the KV cache is configured; every command that runs a model takes these."""
    return CacheConfig(
        page_size=page_size,
        num_pages=num_pages,
        dtype=cache_dtype,
        index_dtype=index_dtype,
        format=_format(format, format_calibration),
        attention=attention,  # type: ignore[arg-type]  # any text comes in, CacheConfig refuses
    )


def _format(name: str | None, calibration: Path | None) -> Format | str | None:
    """The format of a name, which may be one of a calibration's."""
    if calibration is None:
        if name in CALIBRATED:
            raise KvjaxError(
                f"--format is {name}: it needs --format-calibration FILE, which `kvjax calibrate "
                f"formats` writes"
            )
        return name
    if name not in CALIBRATED:
        raise KvjaxError(
            f"--format-calibration is {calibration} and --format is {name}: it serves "
            f"{', '.join(CALIBRATED)}"
        )
    return load_calibrated(calibration, name)


def format_flags(cache: CacheConfig) -> str:
    """The options that say a cache's format again.

    Args:
      cache: with a format, as `cache_options` gave it.
    """
    named = next((name for name, known in NAMED.items() if known == cache.format), None)
    if named is None:
        return "--format NAME --format-calibration FILE, the same as here,"
    return f"--format {named}"


def sampling_options(
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", "-t", help="0 takes the likeliest token.", rich_help_panel=_SAMPLING
        ),
    ] = 0.0,
    top_k: Annotated[
        int | None,
        typer.Option(help="Draw from the k likeliest tokens.", rich_help_panel=_SAMPLING),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Draw from the likeliest tokens that together have probability p.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Draw from tokens at least this times as likely as the likeliest.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
) -> Sampling:
    """How tokens are drawn."""
    return Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def with_options(**groups: Callable[..., Any]) -> Callable[[Callable[..., None]], Any]:
    """Gives a command the options of groups instead of the parameters named here.

    Args:
      groups: for each of the command's keyword parameters, the group that makes its value.
    """
    options = {name: inspect.signature(group).parameters for name, group in groups.items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = [p for name, p in signature.parameters.items() if name not in groups]
        added = [
            p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameters in options.values()
            for p in parameters.values()
        ]

        @functools.wraps(command)
        def run(*arguments: Any, **given: Any) -> None:
            values = {
                name: group(**{option: given.pop(option) for option in options[name]})
                for name, group in groups.items()
            }
            command(*arguments, **given, **values)

        # Typer reads both of these to learn a command's options.
        shown = signature.replace(parameters=[*own, *added], return_annotation=None)
        run.__signature__ = shown  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in shown.parameters.values()}
        return run

    return decorate
