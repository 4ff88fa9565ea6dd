"""What goes to stderr: progress, errors, warnings and the closing table. Results go to stdout."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence

import rich.progress
import rich.table
from rich.console import Console
from rich.text import Text

PHASES = {
    "check": "checking the file",
    "weights": "reading weights",
    "device": "placing weights on the device",
    "compile": "compiling",
    "prefill": "reading the prompt",
    "decode": "generating",
    "calibrate": "trying settings",
    "convert": "measuring, and converting",
    "heal": "healing",
    "distill": "learning, layer by layer",
    "judge": "judging",
    "download": "downloading",
    "unpack": "unpacking and checking",
}
"""What a phase of the library is called on the screen."""


def errors() -> Console:
    """The console on stderr; made anew, because tests and shells exchange `sys.stderr`."""
    return Console(stderr=True, highlight=False)


def say_error(message: str) -> None:
    """Says in red what went wrong."""
    errors().print(Text(f"error: {message}", style="red"), soft_wrap=True)


def note(message: str, style: str = "dim") -> None:
    """Says something besides the result."""
    errors().print(Text(message, style=style), soft_wrap=True)


@contextlib.contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Makes Python's warnings one yellow line each, without the source line that gave them."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        note(f"warning: {message}", "yellow")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


class Bars:
    """Progress bars, one a phase, on a terminal; nothing elsewhere."""

    def __init__(self, progress: rich.progress.Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, rich.progress.TaskID] = {}

    def share(self, phase: str, share: float) -> None:
        """Shows how much of a phase is done, 0 to 1."""
        self.count(phase, round(1000 * share), 1000)

    def count(self, phase: str, done: int, total: int) -> None:
        """Shows how much of a phase is done, in any unit."""
        if phase not in self._tasks:
            self._tasks[phase] = self._progress.add_task(PHASES.get(phase, phase), total=total)
        # A phase that reports only its two ends has no share to show in between.
        unknown = phase in ("weights", "device", "compile", "decode") and done == 0
        self._progress.update(self._tasks[phase], completed=done, total=None if unknown else total)

    def describe(self, phase: str, text: str) -> None:
        """Puts a text in the place of what a phase that is shown is called."""
        self._progress.update(self._tasks[phase], description=text)

    def stop(self) -> None:
        """Takes the bars off the screen, so that the result can be written there."""
        self._progress.stop()


@contextlib.contextmanager
def bars(unit: str = "share") -> Iterator[Bars]:
    """Shows progress bars on stderr while the block runs, and takes them away after it.

    Args:
      unit: "share" shows percentages, "bytes" shows sizes and speed as well.
    """
    columns: list[rich.progress.ProgressColumn] = [
        rich.progress.TextColumn("{task.description:>30}"),
        rich.progress.BarColumn(bar_width=30),
    ]
    if unit == "bytes":
        columns += [rich.progress.DownloadColumn(), rich.progress.TransferSpeedColumn()]
    else:
        columns += [rich.progress.TaskProgressColumn(), rich.progress.TimeElapsedColumn()]
    console = errors()
    with rich.progress.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        yield Bars(progress)


def table(rows: Sequence[tuple[str, str]], title: str | None = None) -> None:
    """Writes a table of names and values to stderr."""
    grid = rich.table.Table(title=title, show_header=False, title_justify="left")
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(justify="right")
    for name, value in rows:
        grid.add_row(name, value)
    errors().print(grid)


def size_of(count: int) -> str:
    """A number of bytes for people: 98,304 bytes are 96.0 KiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
