"""From what engines measured to rows: ratios against the peers, the fit, and equal tokens."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.engines import Outcome
from benchmarks.report import Row, markdown_table, shown

NEAR_TIE = 0.5
"""Nats: a peer whose token kvjax finds less likely by at most this much computes the same model."""

PREFILL_CONTEXT = 4096
"""Where prefill is aimed at being level with OpenVINO."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """step = intercept_ms + slope_ms_per_mb * MB of keys and values."""

    intercept_ms: float
    slope_ms_per_mb: float
    r_squared: float

    @property
    def gb_per_s(self) -> float:
        """The bandwidth that the slope implies."""
        return 1.0 / self.slope_ms_per_mb if self.slope_ms_per_mb > 0 else float("inf")

    def __str__(self) -> str:
        return (
            f"step = {self.intercept_ms:.2f} ms + {self.slope_ms_per_mb:.4f} ms/MB of KV "
            f"(R² {self.r_squared:.3f}; {self.gb_per_s:.1f} GB/s)"
        )


def fit(points: Sequence[tuple[float, float]]) -> Fit:
    """Least squares over (KV megabytes, milliseconds) of at least two lengths.

    Raises:
      ValueError: there are fewer than two points.
    """
    if len(points) < 2:
        raise ValueError(f"a fit needs at least 2 points, got {len(points)}")
    x, y = np.array(points).T
    slope, intercept = np.polyfit(x, y, 1)
    spread = float(((y - y.mean()) ** 2).sum())
    error = float(((y - intercept - slope * x) ** 2).sum())
    return Fit(float(intercept), float(slope), 1.0 - error / spread if spread else 1.0)


def sweep_fit(point: dict[str, Any]) -> Fit | None:
    """The fit over the lengths that kvjax decoded in one program, if it decoded several."""
    pairs = [(each["kv_bytes"] / 1e6, each["step_ms"]) for each in point.get("sweep", [])]
    return fit(pairs) if len(pairs) > 1 else None


def decode_aim(peer: str, context: int, longest: int, batch: int) -> str | None:
    """What is aimed at against a peer, as a ratio of tokens a second."""
    if peer == "transformers":
        return ">= 2"
    if peer == "vllm":
        return ">= 1" if batch == 1 else ">= 1.5"
    if peer == "openvino" and context == longest >= PREFILL_CONTEXT and batch == 1:
        return ">= 1"
    return None


def comparison_rows(ours: Outcome, peers: Iterable[Outcome], points: list[Any]) -> list[Row]:
    """Decode and prefill of one kvjax engine against every peer.

    Args:
      ours: kvjax in one dtype.
      peers: the others.
      points: (context, batch) pairs that were asked for.
    """
    rows = []
    longest = max(context for context, _ in points)
    for context, batch in points:
        mine = ours.point(context, batch) or {}
        for peer in peers:
            theirs = peer.point(context, batch) or {}
            label = peer.engine.label
            if not theirs:
                label += f" (not measured: {peer.why_not(context, batch)})"
            name = peer.engine.name
            rows.append(
                Row(
                    claim=f"decode, {context} tokens, batch {batch}, {ours.engine.label}",
                    metric="decode speed",
                    unit="tokens/s",
                    ours=mine.get("decode_tokens_per_s"),
                    baseline=label,
                    baseline_value=theirs.get("decode_tokens_per_s"),
                    aim=decode_aim(name, context, longest, batch),
                )
            )
            if batch == 1:
                aims = {"transformers": ">= 3"}
                if context == PREFILL_CONTEXT:
                    aims["openvino"] = ">= 1"
                rows.append(
                    Row(
                        claim=f"prefill, {context} tokens, {ours.engine.label}",
                        metric="prefill speed",
                        unit="tokens/s",
                        ours=mine.get("prefill_tokens_per_s"),
                        baseline=label,
                        baseline_value=theirs.get("prefill_tokens_per_s"),
                        aim=aims.get(name),
                    )
                )
    return rows


def count_rows(ours: Outcome, points: list[Any], page_size: int) -> list[Row]:
    """What does not depend on the clock: bytes and pages, and the fit of time against bytes."""
    rows = []
    label = ours.engine.label
    for context, batch in points:
        point = ours.point(context, batch)
        if point is None:
            continue
        claim = f"{context} tokens, batch {batch}, {label}"
        held = batch * -(-(context + point["steps_taken"]) // page_size)
        rows.append(
            Row(
                claim=f"cache, {claim}",
                metric="pages held",
                unit="pages",
                ours=point["pages_used"],
                baseline="pages that the tokens fill",
                baseline_value=held,
                aim="<= 1",
            )
        )
        rows.append(
            Row(
                claim=f"cache, {claim}",
                metric="keys and values read in a step",
                unit="bytes",
                ours=point["kv_bytes_read"],
            )
        )
        line = sweep_fit(point)
        if line is not None:
            rows += fit_rows(point, line, claim)
        if "generate_step_ms" in point:
            rows.append(
                Row(
                    claim=f"the measured loop is generate's, {claim}",
                    metric="step of kvjax.decode.generate",
                    unit="ms",
                    ours=point["generate_step_ms"],
                    baseline="step measured here",
                    baseline_value=point["step_ms"],
                )
            )
    return rows


def fit_rows(point: dict[str, Any], line: Fit, claim: str) -> list[Row]:
    """How a step's time grows with what it must read."""
    shortest = point["sweep"][0]
    expected = line.intercept_ms + line.slope_ms_per_mb * shortest["kv_bytes"] / 1e6
    return [
        Row(
            claim=f"step time grows with KV bytes only, up to {claim}",
            metric="R² of the line",
            unit="",
            ours=line.r_squared,
            aim=">= 0.98",
        ),
        Row(
            claim=f"step time at no context, {claim}",
            metric="intercept of the line",
            unit="ms",
            ours=line.intercept_ms,
        ),
        Row(
            claim=f"KV bandwidth, up to {claim}",
            metric="1 / slope of the line",
            unit="GB/s",
            ours=line.gb_per_s,
        ),
        Row(
            claim=f"a short sequence in a table for {claim}",
            metric="step of the shortest length",
            unit="ms",
            ours=shortest["step_ms"],
            baseline="the line there",
            baseline_value=expected,
        ),
    ]


def agreement(exact: Outcome, peer: Outcome, context: int) -> str:
    """Whether a peer's greedy tokens are those of kvjax in float32, or nearly as likely."""
    mine, theirs = exact.point(context, 1), peer.point(context, 1)
    if mine is None or theirs is None:
        return "not compared"
    ours, other = mine["greedy"], theirs["greedy"]
    for index, (a, b) in enumerate(zip(ours, other, strict=False)):
        if a != b:
            tokens, logprobs = mine["likeliest"][index]
            if b not in tokens:
                return f"DIFFERS at token {index}: not among the {len(tokens)} likeliest"
            margin = logprobs[0] - logprobs[tokens.index(b)]
            verdict = "near tie" if margin <= NEAR_TIE else "DIFFERS"
            return f"{verdict} at token {index} ({margin:.2f} nats)"
    return f"equal, {min(len(ours), len(other))} tokens"


Section = tuple[str, list[str], list[list[str]]]
"""A table: title, headings, lines."""


def measurements(outcomes: Sequence[Outcome], points: list[Any]) -> list[Section]:
    """Everything measured: a line a point, a column an engine, a table a question."""
    labels = [outcome.engine.label for outcome in outcomes]

    def cells(context: int, batch: int, metric: str) -> list[str]:
        found = [outcome.point(context, batch) or {} for outcome in outcomes]
        return [shown(point.get(metric)) for point in found]

    places = [[f"{context:,}", str(batch)] for context, batch in points]
    singles = [context for context, batch in points if batch == 1]
    exact = next((o for o in outcomes if o.engine.label == "kvjax float32"), outcomes[0])
    tables = [
        (
            "Milliseconds a decode step",
            ["context", "batch", *labels],
            [place + cells(*point, "step_ms") for place, point in zip(places, points, strict=True)],
        ),
        (
            "Prefill, tokens a second",
            ["context", *labels],
            [[f"{c:,}", *cells(c, 1, "prefill_tokens_per_s")] for c in singles],
        ),
        (
            f"Greedy tokens against {exact.engine.label}",
            ["context", *labels],
            [[f"{c:,}", *(agreement(exact, other, c) for other in outcomes)] for c in singles],
        ),
    ]
    missing = [
        [outcome.engine.label, f"{context:,}", str(batch), outcome.why_not(context, batch)]
        for outcome in outcomes
        for context, batch in points
        if outcome.point(context, batch) is None
    ]
    if missing:
        tables.append(("Not measured", ["engine", "context", "batch", "why"], missing))
    return tables


def engines_markdown(outcomes: Sequence[Outcome]) -> str:
    """What each engine was: versions, the form of its weights and cache, its starting time."""
    lines = []
    for outcome in outcomes:
        answer = outcome.answer
        if answer is None:
            lines.append([outcome.engine.label, "did not run", outcome.why or "", "", ""])
            continue
        versions = ", ".join(f"{name} {version}" for name, version in answer["versions"].items())
        start = f"{answer['start_s']:.0f} s"
        lines.append([outcome.engine.label, versions, answer["weights"], answer["kv"], start])
    return markdown_table(["engine", "versions", "weights", "keys and values", "start"], lines)
