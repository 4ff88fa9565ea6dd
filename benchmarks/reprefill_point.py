"""What the re-prefill benchmark measured of one method, as it is written to disk."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Sequence

from benchmarks.report import shown
from benchmarks.reprefill_measure import STEPS, Hits, Outcome, Task, divergence, right_answers
from kvjax.decode import PrefixConfig
from kvjax.storage.files import publish


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One method at one budget on one document. Bytes are means over its questions, from disk."""

    context: int
    budget: int  # percent
    method: str
    ttft_s: float  # median
    runs: int  # that it is of
    kl_first: float  # nats, of the first token's distribution
    kl_steps: float  # nats, mean over forced steps
    right: int
    questions: int
    wait_s: float | None = None  # median
    bytes_read: float | None = None
    bytes_used: float | None = None
    bytes_scored: float | None = None  # keys read to choose by
    bytes_wasted: float | None = None  # guessed wrong
    index_bytes: float | None = None
    sketch_bytes: int | None = None  # what stays in memory to choose by
    guessed: float | None = None  # share of the bytes needed whose read had begun on a guess
    overlap: float | None = None  # of which pages that the period before had chosen too
    device_hits: float | None = None
    host_hits: float | None = None

    @property
    def amplification(self) -> float | None:
        """Bytes read, but those guessed wrong, over bytes attended to."""
        if not self.bytes_used or self.bytes_read is None or self.bytes_wasted is None:
            return None
        return (self.bytes_read - self.bytes_wasted) / self.bytes_used


def point(
    context: int,
    budget: int,
    method: str,
    task: Task,
    exact: Outcome,
    outcome: Outcome,
    *,
    config: PrefixConfig | None = None,
    sketch_bytes: int | None = None,
    hits: Hits | None = None,
) -> Point:
    """What was measured, without the answers.

    Args:
      context: tokens of the document.
      budget: percent.
      method: its name.
      task: what was asked.
      exact: the reference's outcome.
      outcome: the method's.
      config: the method's, if it reads what is stored.
      sketch_bytes: what it keeps in memory to choose by.
      hits: shares found in memory, if they were measured.
    """
    first, steps = divergence(exact.answers, outcome.answers)
    used, scored = outcome.mean("bytes_used"), outcome.mean("bytes_scored")
    begun = outcome.mean("bytes_prefetched")
    needed = (used or 0) + (scored or 0)
    guessed = begun / needed if needed and begun is not None else None
    return Point(
        context=context,
        budget=budget,
        method=method,
        ttft_s=outcome.ttft_s,
        runs=outcome.runs,
        kl_first=first,
        kl_steps=steps,
        right=right_answers(task.model, task.needles, outcome.answers),
        questions=len(task.needles),
        wait_s=outcome.wait_s,
        bytes_read=outcome.mean("bytes_read"),
        bytes_used=used,
        bytes_scored=scored,
        bytes_wasted=outcome.mean("bytes_wasted"),
        index_bytes=outcome.mean("index_bytes"),
        sketch_bytes=sketch_bytes,
        guessed=guessed,
        overlap=_overlap(guessed, config, len(task.model.config.layers)),
        device_hits=None if hits is None else hits.device,
        host_hits=None if hits is None else hits.host,
    )


def _overlap(guessed: float | None, config: PrefixConfig | None, layers: int) -> float | None:
    """Share of a period's pages that the period before chose, from the share of all guessed right.

    Where a period chooses, the units after its first are always guessed right, and the first
    period's first never is; what remains is the overlap of periods.
    """
    if guessed is None or config is None or config.who != "period" or config.sketch() is None:
        return None
    units = layers // config.layout(16, layers, 1).layers
    periods = -(-layers // config.period)
    if periods < 2 or not config.prefetch:
        return None
    return (guessed * units - (units - periods)) / (periods - 1)


def write_points(path: str | os.PathLike[str], points: Iterable[Point]) -> None:
    """Write what was measured so far, in place of what was written before."""
    text = json.dumps([dataclasses.asdict(p) for p in points], indent=1)
    with publish(pathlib.Path(path)) as unfinished:
        unfinished.write_text(text + "\n", encoding="utf-8")


HEADINGS = (
    "context",
    "method",
    "budget",
    "TTFT s",
    "read MB",
    "of which keys to choose by",
    "guessed wrong MB",
    "amplification",
    "guessed right",
    "in memory to choose by MB",
    "device hits",
    "host hits",
    "KL first",
    f"KL {STEPS} steps",
    "right",
)


def lines(points: Sequence[Point]) -> list[list[str]]:
    """The points as lines of a table under `HEADINGS`."""

    def mega(number: float | None) -> str:
        return "-" if number is None else shown(number / 1e6)

    def share(number: float | None) -> str:
        return "-" if number is None else f"{number:.0%}"

    return [
        [
            f"{p.context:,}",
            p.method,
            f"{p.budget} %",
            shown(p.ttft_s),
            mega(p.bytes_read),
            mega(p.bytes_scored),
            mega(p.bytes_wasted),
            shown(p.amplification),
            share(p.guessed),
            mega(p.sketch_bytes),
            share(p.device_hits),
            share(p.host_hits),
            shown(p.kl_first),
            shown(p.kl_steps),
            f"{p.right} of {p.questions}",
        ]
        for p in points
    ]
