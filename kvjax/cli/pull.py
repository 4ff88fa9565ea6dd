"""`kvjax pull`: put a model into the local cache."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import rich.table
import typer
from rich.console import Console

from kvjax import registry
from kvjax.cli import options
from kvjax.cli.console import bars, errors, note, size_of
from kvjax.errors import KvjaxError
from kvjax.pull import license_terms
from kvjax.pull import pull as pull_model


def pull(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME|hf:ORG/NAME[@REVISION]]", show_default=False)
    ] = None,
    *,
    accept_license: Annotated[
        bool, typer.Option("--accept-license", help="Accept the model's terms without being asked.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Fetch again what is there.")] = False,
    cache_dir: options.CacheDir = None,
) -> None:
    """Fetch a model into the local cache. Without a name, list the models that have one.

    Example: kvjax pull smollm2-135m
    """
    if name is None:
        _list(cache_dir)
        return
    fetch(name, cache_dir, accept_license=accept_license, force=force)


def fetch(
    name: str, cache_dir: Path | None, *, accept_license: bool = False, force: bool = False
) -> None:
    """Fetches a model with a progress bar, asking about its terms if it has any.

    Raises:
      KvjaxError: as `kvjax.pull.pull`.
    """
    is_there = registry.model_path(name, cache_dir).exists()
    if (force or not is_there) and not accept_license:
        accept_license = _ask(name)
    with _ending_cleanly(), bars("bytes") as progress:
        result = pull_model(
            name,
            cache_dir,
            force=force,
            accept_license=accept_license,
            progress=progress.count,
        )
    note(
        f"{name} is already at {result.path}" if result.already_there else f"{name}: {result.path}"
    )


@contextlib.contextmanager
def _ending_cleanly() -> Iterator[None]:
    """Makes SIGTERM an exception, so that what is half fetched is removed as on Ctrl-C."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _ask(name: str) -> bool:
    terms = license_terms(name)
    if terms is None:
        return True
    errors().print(terms, markup=False, soft_wrap=True)
    if sys.stdin is None or not sys.stdin.isatty():
        raise KvjaxError(
            f"{name} comes under the terms above: --accept-license accepts them where nobody can "
            "be asked"
        )
    if not typer.confirm("Do you accept these terms?", err=True):
        raise KvjaxError(f"{name} was not fetched: its terms were not accepted")
    return True


def _list(cache_dir: Path | None) -> None:
    grid = rich.table.Table()
    for title in ("name", "model", "licence", "download", "here"):
        grid.add_column(title, no_wrap=title == "name")
    for name, source in registry.MODELS.items():
        here = registry.model_path(name, cache_dir).exists()
        size = size_of(source.download_size)
        grid.add_row(name, source.description, source.license, size, "yes" if here else "no")
    Console().print(grid)
