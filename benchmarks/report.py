"""What every benchmark reports: rows of ours against a baseline, as a table, JSON and Markdown."""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import math
import operator
import os
import pathlib
import platform
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvjax.storage.files import publish

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
"""Where the benchmarks are run from."""

DOCUMENT = REPOSITORY / "docs" / "benchmarks.md"
"""Where a full run writes its section."""

_COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One number of ours, what it is measured against, and whether that is as good as we want.

    `ratio` is always `ours / baseline_value`, so an aim says in which direction it should go:
    ">= 2" for tokens a second, "<= 1.05" for bytes. A row without a ratio compares `ours` itself.

    Attributes:
      claim: what is compared and where, e.g. "decode, 2048 tokens, batch 1".
      metric: what is measured, e.g. "decode speed".
      unit: of both numbers.
      ours: kvjax's number; None if it could not be measured.
      baseline: what it is compared with; where that could not be measured, also why.
      baseline_value: its number, or None.
      aim: a comparison and a number, e.g. ">= 0.7", or None if nothing is aimed at.

    Raises:
      ValueError: an aim of another form.
    """

    claim: str
    metric: str
    unit: str
    ours: float | None
    baseline: str | None = None
    baseline_value: float | None = None
    aim: str | None = None

    def __post_init__(self) -> None:
        if self.aim is not None:
            _parsed(self.aim)

    @property
    def ratio(self) -> float | None:
        """`ours / baseline_value`, None where either is missing or the baseline is 0."""
        if self.ours is None or not self.baseline_value:
            return None
        return self.ours / self.baseline_value

    @property
    def met(self) -> bool | None:
        """Whether the aim is met; None if there is none, or nothing to judge it by."""
        judged = self.ours if self.baseline is None else self.ratio
        if self.aim is None or judged is None or not math.isfinite(judged):
            return None
        compare, bound = _parsed(self.aim)
        return bool(compare(judged, bound))

    def as_dict(self) -> dict[str, Any]:
        """The row as `--json` writes it."""
        return dataclasses.asdict(self) | {"ratio": self.ratio, "met": self.met}


def _parsed(aim: str) -> tuple[Any, float]:
    sign, _, number = aim.partition(" ")
    try:
        return _COMPARISONS[sign], float(number)
    except (KeyError, ValueError):
        raise ValueError(
            f"aim is {aim!r}: must be one of {', '.join(_COMPARISONS)}, a space and a number"
        ) from None


def shown(value: float | None) -> str:
    """A number for people: four figures, thousands separated; a dash for None."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 0.001 <= abs(value) < 1000:
        return f"{value:.4g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2e}"


def _cells(row: Row) -> list[str]:
    verdict = {True: "yes", False: "no", None: ""}[row.met]
    return [
        row.claim,
        row.metric,
        f"{shown(row.ours)} {row.unit}".strip(),
        row.baseline or "",
        "" if row.baseline is None else shown(row.baseline_value),
        "" if row.ratio is None else f"{row.ratio:.3g}",
        row.aim or "",
        verdict,
    ]


_HEADINGS = ("claim", "metric", "kvjax", "baseline", "its value", "ratio", "aim", "met")


def table(rows: Iterable[Row], title: str) -> Table:
    """The rows as a terminal table."""
    shape = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for heading in _HEADINGS:
        number = heading in ("kvjax", "its value", "ratio", "aim")
        shape.add_column(heading, justify="right" if number else "left")
    for row in rows:
        style = {True: "green", False: "red", None: None}[row.met]
        cells = _cells(row)
        cells[-1] = f"[{style}]{cells[-1]}[/]" if style else ""
        shape.add_row(*cells)
    return shape


def plain_table(title: str, headings: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    """Any lines as a terminal table."""
    shape = Table(*headings, title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for line in lines:
        shape.add_row(*line)
    return shape


def markdown_table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a bar in a cell is escaped."""
    text = [list(headings), ["---"] * len(headings), *[list(line) for line in lines]]
    escaped = [" | ".join(cell.replace("|", "\\|") for cell in line) for line in text]
    return "\n".join(f"| {line} |" for line in escaped)


def markdown_rows(rows: Iterable[Row]) -> str:
    """The rows as a Markdown table."""
    return markdown_table(_HEADINGS, [_cells(row) for row in rows])


def write_json(path: str | os.PathLike[str], rows: Iterable[Row]) -> None:
    """Write the rows as a JSON list."""
    text = json.dumps([row.as_dict() for row in rows], indent=1)
    with publish(path) as unfinished:
        unfinished.write_text(text + "\n", encoding="utf-8")


def write_section(document: str | os.PathLike[str], name: str, body: str) -> None:
    """Put a benchmark's section into a document, in place of the one it wrote before.

    Sections stand between marks of their own; all other text of the document stays as it is.

    Args:
      document: a Markdown file; made if it is not there.
      name: of the benchmark; one section a name.
      body: Markdown, heading included.

    Raises:
      ValueError: the document has one mark of the section without the other, or out of order.
    """
    path = pathlib.Path(document)
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        text = "# Benchmarks\n"
    section = f"{begin}\n{body.strip()}\n{end}"
    if begin not in text and end not in text:
        text = f"{text.rstrip()}\n\n{section}\n"
    elif text.count(begin) == text.count(end) == 1 and text.index(begin) < text.index(end):
        before, _, rest = text.partition(begin)
        text = before + section + rest.partition(end)[2]
    else:
        raise ValueError(f"{path} must have {begin} once, then {end} once; mend or delete them")
    with publish(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def machine() -> str:
    """The processor, its cores and the memory, in words."""
    name, memory = platform.processor() or platform.machine(), ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        names = {line.partition(":")[2].strip() for line in file if line.startswith("model name")}
        name = ", ".join(sorted(names)) or name
    with contextlib.suppress(ValueError, AttributeError):  # not on every system
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory = f", {size / 2**30:.0f} GiB of memory"
    return f"{name}, {os.cpu_count()} cores{memory}"


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--quick", action="store_true", help="end within a minute on two cores")
    options.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the rows there")
    options.add_argument(
        "--docs",
        type=pathlib.Path,
        metavar="FILE",
        help="write the section there; by default docs/benchmarks.md, and with --quick nowhere",
    )
    return options


def check_plots(options: argparse.Namespace) -> None:
    """Refuse to begin a long run whose picture could not be drawn at its end.

    Raises:
      SystemExit: matplotlib is missing.
    """
    writes = options.docs or not options.quick
    if writes and importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("matplotlib is missing: pip install -e '.[docs]'")


def finish(
    rows: Sequence[Row], options: argparse.Namespace, *, name: str, title: str, body: str
) -> None:
    """End a benchmark: show the table, write what was asked for.

    Args:
      rows: what was measured.
      options: as `parser` reads them.
      name: of the benchmark; marks its section.
      title: of the table and the section.
      body: Markdown that stands between the heading and the rows.
    """
    console = Console()
    wide = Console(width=max(console.width, 140)) if not console.is_terminal else console
    wide.print(table(rows, title))
    if options.json:
        write_json(options.json, rows)
        console.print(f"rows written to {options.json}")
    document = options.docs or (None if options.quick else DOCUMENT)
    if document:
        section = f"## {title}\n\n{machine()}.\n\n{body.strip()}\n\n{markdown_rows(rows)}"
        write_section(document, name, section)
        console.print(f"section {name!r} written to {document}")
