"""What re-prefill claims, against the baselines of the same run."""

from collections.abc import Iterable, Sequence

from benchmarks.report import Row
from benchmarks.reprefill_measure import STEPS
from benchmarks.reprefill_methods import CONTIGUOUS, FULL, H2O, IMPRESS, MAPPED, OURS, RECOMPUTE
from benchmarks.reprefill_point import Point

BASELINES = (CONTIGUOUS, IMPRESS, "IMPRESS, not reordered", H2O, FULL, MAPPED)
NOISE = 1e-4
"""Nats below which divergences count as equal: bfloat16 in another order is as far away."""

QUALITY = {"smollm2-135m": (10, 0.06)}
"""Budget at which needles are answered as with all keys, and the KL there, by model."""

LARGER = (5, 0.01)
"""The same of a Qwen2.5-class model."""


def claims(
    points: Sequence[Point], model: str, alone: dict[int, float], unhidden: dict[int, Point]
) -> list[Row]:
    """Rows of all aims that the points can judge.

    Args:
      points: what was measured.
      model: its name.
      alone: by context, seconds to prefill a question without its document.
      unhidden: by context, `OURS` without prefetching.
    """
    rows = []
    for context in sorted({p.context for p in points}):
        here = {(p.method, p.budget): p for p in points if p.context == context}
        if (RECOMPUTE, 100) not in here:
            continue
        longest = context == max(p.context for p in points)
        ours = [p for (method, _), p in here.items() if method == OURS and p.budget < 100]
        for mine in ours:
            rows += _of_one(mine, here[RECOMPUTE, 100], model, longest=longest)
        rows += _against_impress(here, context, alone.get(context, 0.0))
        rows += _at_equal_kl(here, context)
        if context in unhidden:
            off = unhidden[context]
            rows.append(_hidden(here[OURS, off.budget], off))
        rows += _overlaps(here.values())
    return rows


def _of_one(mine: Point, base: Point, model: str, *, longest: bool) -> list[Row]:
    where = f"{mine.context} tokens, {mine.budget} %"
    budget, kl = QUALITY.get(model.replace("_", "-"), LARGER)
    judged = mine.budget == budget
    index = (mine.bytes_read or 0) - (mine.bytes_wasted or 0) + (mine.index_bytes or 0)
    return [
        Row(
            claim=f"time to first token, {where}",
            metric="TTFT, pages on disk",
            unit="s",
            ours=mine.ttft_s,
            baseline=RECOMPUTE,
            baseline_value=base.ttft_s,
            aim="<= 0.05" if longest else None,
        ),
        Row(
            claim=f"nothing is read in vain, {where}",
            metric="bytes read on demand / bytes attended to",
            unit="",
            ours=mine.amplification,
            aim="<= 1.01",
        ),
        Row(
            claim=f"shard indexes are small, {where}",
            metric="bytes read on demand and of indexes / bytes attended to",
            unit="",
            ours=index / mine.bytes_used if mine.bytes_used else None,
        ),
        Row(
            claim=f"answers as with all keys and values, {where}",
            metric=f"right answers of {mine.questions}",
            unit="",
            ours=mine.right,
            baseline=RECOMPUTE,
            baseline_value=base.right,
            aim=">= 1" if judged else None,
        ),
        Row(
            claim=f"the distribution is that of all keys and values, {where}",
            metric="KL of the first token",
            unit="nats",
            ours=mine.kl_first,
            aim=f"< {kl}" if judged else None,
        ),
        Row(
            claim=f"the distribution is that of all keys and values, {where}",
            metric=f"mean KL over {STEPS} tokens",
            unit="nats",
            ours=mine.kl_steps,
            aim=f"< {kl}" if judged else None,
        ),
    ]


def _against_impress(here: dict[tuple[str, int], Point], context: int, alone: float) -> list[Row]:
    """At the budgets where IMPRESS and we first answer as well as all keys and values."""
    full = here[RECOMPUTE, 100].right
    good = [b for (m, b), p in here.items() if m == IMPRESS and p.right >= full]
    ours = [b for (m, b), p in here.items() if m == OURS and p.right >= full]
    if not good or not ours:
        return []
    theirs, mine = here[IMPRESS, min(good)], here[OURS, min(ours)]
    label = f"{IMPRESS} at {theirs.budget} %"
    claim = f"{context} tokens, {mine.budget} %: as many right answers"
    return [
        Row(
            claim=claim,
            metric="bytes read",
            unit="bytes",
            ours=mine.bytes_read,
            baseline=label,
            baseline_value=theirs.bytes_read,
            aim="<= 0.25",
        ),
        Row(
            claim=claim,
            metric="load and select: TTFT less the question's own prefill",
            unit="s",
            ours=mine.ttft_s - alone,
            baseline=label,
            baseline_value=theirs.ttft_s - alone,
            aim=f"<= {1 / 3.85:.3f}",
        ),
    ]


def _at_equal_kl(here: dict[tuple[str, int], Point], context: int) -> list[Row]:
    """Each baseline's bytes against the least of ours at no greater KL."""
    ours = [p for (method, _), p in here.items() if method == OURS]
    rows = []
    for (method, budget), theirs in here.items():
        if method not in BASELINES or not ours:
            continue
        enough = [p for p in ours if p.kl_steps <= max(theirs.kl_steps, NOISE)]
        best = min(enough, key=lambda p: p.bytes_read or 0, default=None)
        at = "none of ours is as near" if best is None else f"ours at {best.budget} %"
        rows.append(
            Row(
                claim=f"bytes at equal KL, {context} tokens: {at}",
                metric=f"bytes read at KL <= {max(theirs.kl_steps, NOISE):.2g} over {STEPS} tokens",
                unit="bytes",
                ours=None if best is None else best.bytes_read,
                baseline=f"{method} at {budget} %",
                baseline_value=theirs.bytes_read,
                aim="<= 1.01",
            )
        )
    return rows


def _hidden(on: Point, off: Point) -> Row:
    """How much of the reading is hidden behind computing."""
    return Row(
        claim=f"reads hidden behind compute, {on.context} tokens, {on.budget} %",
        metric="seconds waited for reads",
        unit="s",
        ours=on.wait_s,
        baseline="without prefetch",
        baseline_value=off.wait_s,
        aim="<= 0.5",
    )


def _overlaps(points: Iterable[Point]) -> list[Row]:
    """Inter-period overlap, where periods choose."""
    return [
        Row(
            claim=f"inter-period overlap, {p.context} tokens, {p.method}, {p.budget} %",
            metric="share of a period's pages that the one before chose",
            unit="",
            ours=p.overlap,
        )
        for p in points
        if p.overlap is not None
    ]
