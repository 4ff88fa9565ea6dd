"""What the tiered decode benchmark claims, as rows against baselines and aims."""

import dataclasses
from collections.abc import Sequence

from benchmarks.report import Row
from benchmarks.tiered_methods import EXACT, MAPPED, OURS, PLANNED, QUARTER, SYSTEMS

HEADINGS = (
    "tokens", "budget", "method", "ms a step", "pages read", "near", "KB fetched a step",
    "index MB", "KB scanned a step", "KL first", "KL 32", "top-1 agrees", "right",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Point:
    """One method at one budget on one document; KL in nats, of all pages' distributions."""

    context: int
    budget: float  # percent; 100 for all pages
    method: str
    step_ms: float
    pages: int  # K
    hit_ratio: float | None
    fetched: float  # bytes a step
    index_bytes: float
    scanned: float  # bytes of it that a step reads
    kl_first: float
    kl_steps: float
    agrees: float  # share of forced steps whose likeliest token is that of all pages
    right: int
    questions: int


def lines(points: Sequence[Point]) -> list[list[str]]:
    """The points as lines under `HEADINGS`."""
    return [
        [
            str(p.context),
            f"{p.budget:g} %",
            p.method,
            f"{p.step_ms:.1f}",
            str(p.pages) if p.pages else "all",
            "-" if p.hit_ratio is None else f"{p.hit_ratio:.3f}",
            f"{p.fetched / 1e3:.0f}",
            f"{p.index_bytes / 1e6:.2f}",
            f"{p.scanned / 1e3:.0f}",
            f"{p.kl_first:.4f}",
            f"{p.kl_steps:.4f}",
            f"{p.agrees:.2f}",
            f"{p.right} of {p.questions}",
        ]
        for p in points
    ]


def claims(points: Sequence[Point]) -> list[Row]:
    """Rows with aims, for every context and budget that was measured."""
    rows: list[Row] = []
    for context, budget in dict.fromkeys((p.context, p.budget) for p in points):
        here = {p.method: p for p in points if (p.context, p.budget) == (context, budget)}
        whole = {p.method: p for p in points if (p.context, p.budget) == (context, 100)}
        if OURS in here and EXACT in whole:
            claim = f"{context} tokens, {budget:g} %"
            rows += _ours(here, whole[EXACT], whole.get(MAPPED), claim)
    return rows


def _ours(here: dict[str, Point], exact: Point, mapped: Point | None, claim: str) -> list[Row]:
    ours = here[OURS]
    rows = [
        Row(claim=claim, metric="hit ratio", unit="", ours=ours.hit_ratio, aim=">= 0.9"),
        Row(
            claim=claim,
            metric="needles answered",
            unit="",
            ours=ours.right,
            baseline=EXACT,
            baseline_value=exact.right,
            aim=">= 1",
        ),
        Row(
            claim=claim,
            metric="time a step",
            unit="ms",
            ours=ours.step_ms,
            baseline=EXACT,
            baseline_value=exact.step_ms,
        ),
    ]
    if mapped is not None:
        rows.append(
            Row(
                claim=claim,
                metric="time a step",
                unit="ms",
                ours=ours.step_ms,
                baseline=MAPPED,
                baseline_value=mapped.step_ms,
            )
        )
    quarter = here.get(QUARTER)
    if quarter is not None:
        rows.append(
            Row(
                claim=f"{claim}, a quarter in host memory, all on disk",
                metric="decode speed",
                unit="tokens/s",
                ours=1e3 / quarter.step_ms,
                baseline="all in host memory",
                baseline_value=1e3 / ours.step_ms,
                aim=">= 0.6",
            )
        )
    dropping = here.get("low-bit keys, window x0")
    if dropping is not None:
        rows.append(
            Row(
                claim=claim,
                metric="bytes fetched a step",
                unit="bytes",
                ours=ours.fetched,
                baseline="window x0",
                baseline_value=dropping.fetched,
                aim="<= 0.1",
            )
        )
    for evict in ("LRU", "LFU"):
        other = here.get(f"{OURS}, {evict}")
        if other is not None:
            rows.append(
                Row(
                    claim=claim,
                    metric="bytes fetched a step",
                    unit="bytes",
                    ours=ours.fetched,
                    baseline=evict,
                    baseline_value=other.fetched,
                    aim="<= 1",
                )
            )
    planned = here.get(PLANNED)
    if planned is not None:
        rows.append(
            Row(
                claim=f"{claim}, 2-D scaling cuts a further 15 % of traffic at equal memory",
                metric="bytes fetched a step",
                unit="bytes",
                ours=planned.fetched,
                baseline="window x3",
                baseline_value=ours.fetched,
                aim="<= 0.85",
            )
        )
    systems = [here[name] for name in SYSTEMS if name in here]
    if systems:
        best = min(systems, key=lambda p: p.kl_steps)
        fastest = min(systems, key=lambda p: p.step_ms)
        rows += [
            Row(
                claim=claim,
                metric="KL over 32 steps",
                unit="nats",
                ours=ours.kl_steps,
                baseline=f"{best.method} (least of the published)",
                baseline_value=best.kl_steps,
                aim="<= 0.5",
            ),
            Row(
                claim=claim,
                metric="time a step",
                unit="ms",
                ours=ours.step_ms,
                baseline=f"{fastest.method} (fastest of the published)",
                baseline_value=fastest.step_ms,
                aim=f"<= {1 / 1.74:.3f}",
            ),
        ]
    return rows
