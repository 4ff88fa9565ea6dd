"""Puts the subcommands together, and says what goes wrong in one line."""

import errno
import importlib.metadata
import os
import sys
from typing import Any

import typer
import typer.core

from kvjax.cli import calibrate, convert, demo, distill, generate, info, prefix, pull, score, store
from kvjax.cli.console import say_error, warnings_as_lines
from kvjax.cli.wording import of_options
from kvjax.errors import KvjaxError
from kvjax.storage.errors import (
    NotAStoreError,
    ReadFailedError,
    ReadOnlyStoreError,
    SegmentError,
    SegmentTooLargeError,
    StoreError,
    StoreFullError,
    UnitError,
    UnknownKeyError,
)

BAD_INPUT = (
    KvjaxError,
    NotAStoreError,
    ReadOnlyStoreError,
    SegmentTooLargeError,
    UnknownKeyError,
)
"""What is raised for what the user gave; the store, a pillar, has names of its own for it."""

STORE_FAILS = (ReadFailedError, SegmentError, StoreError, StoreFullError, UnitError)
"""What is raised for a store that is damaged, full, or on a device that fails."""

CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
"""Of errors that name no file: those that the user can do something about."""

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


class Commands(typer.core.TyperGroup):
    """The group of subcommands: the boundary where an error becomes a line and an exit code.

    What the user gave wrong is one of `BAD_INPUT`, a store that fails one of `STORE_FAILS`, a file
    that is not there or not readable an `OSError` that names it. Anything else, other `ValueError`s
    too, is a fault of kvjax or of what it is built on and keeps its traceback.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Takes --traceback after the subcommand too."""
        own = args[: args.index("--")] if "--" in args else args
        if "--traceback" in own:
            args = ["--traceback", *(word for word in args if word != "--traceback")]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Runs the subcommand."""
        try:
            with warnings_as_lines():
                result = super().invoke(ctx)
                sys.stdout.flush()
                return result
        except KeyboardInterrupt:
            say_error("stopped")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BAD_INPUT as error:
            if ctx.params.get("traceback"):
                raise
            say_error(of_options(str(error)))
            raise typer.Exit(EXIT_BAD_INPUT) from None
        except STORE_FAILS as error:
            if ctx.params.get("traceback"):
                raise
            say_error(of_options(error.strerror or str(error)))
            raise typer.Exit(EXIT_BAD_INPUT) from None
        except OSError as error:
            full = error.filename is None and error.errno in CANNOT_WRITE
            if ctx.params.get("traceback") or not (error.filename or full):
                raise
            if full:
                _drop_output()
            say_error(f"{error.filename or 'cannot write'}: {error.strerror}")
            raise typer.Exit(EXIT_BAD_INPUT) from None


app = typer.Typer(
    name="kvjax",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
    help="Long-context inference in JAX through a paged KV cache.",
    epilog="Start with: [bold]kvjax demo[/bold]",
)
app.command(no_args_is_help=True)(generate.generate)
app.command(no_args_is_help=True)(score.score)
app.command()(info.info)
app.command()(pull.pull)
app.command()(demo.demo)
app.add_typer(calibrate.app, name="calibrate")
app.add_typer(distill.app, name="distill")
app.add_typer(convert.app, name="convert")
app.add_typer(prefix.app, name="prefix")
app.add_typer(store.app, name="store")


def _drop_output() -> None:
    """Lets go of what standard output did not take: Python would try again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say_version(wanted: bool) -> bool:
    if wanted:
        print(f"kvjax {importlib.metadata.version('kvjax')}")
        raise typer.Exit
    return wanted


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_say_version, is_eager=True, help="Show the version."
    ),
    traceback: bool = typer.Option(False, "--traceback", help="Show where an error came from."),
) -> None:
    """Long-context inference in JAX through a paged KV cache."""
    del version, traceback  # read by _say_version and Commands.invoke


def main() -> None:
    """The entry point."""
    if sys.stdout is None:  # as Python has it where a shell closed it
        sys.exit("error: standard output is closed: there is nowhere to write to")
    app()
