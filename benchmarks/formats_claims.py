"""What the benchmark of formats claims, as rows against baselines and aims."""

import dataclasses
from collections.abc import Sequence

from benchmarks.formats_methods import BF16
from benchmarks.report import Row, shown

OURS = "kvjax"
STORED, EXACTLY = "as stored", "exactly"

HEADINGS = (
    "tokens", "engine", "cache", "read", "bytes a token", "of bf16", "newest KB", "KL",
    "top-1 agrees", "right", "KL text", "perplexity", "attention us a page", "of bf16's",
    "encode us a page",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One way to store the keys and values of one document; KL in nats, of its own exact cache."""

    context: int
    engine: str
    name: str
    read: str  # the document: STORED, each chunk seeing codes of those before, or EXACTLY
    bytes_per_token: float  # that are allocated for full pages, scales and all
    share: float  # of the bytes that bf16 takes
    recent: float | None = None  # bytes of the newest tokens of a sequence, which are not encoded
    kl: float  # mean over the questions' tokens
    agrees: float  # share of these with the same likeliest token
    right: int
    exact_right: int  # with the engine's exact cache
    questions: int
    kl_text: float | None = None  # mean over the second half of the document
    perplexity: float | None = None  # of the same
    attention_us: float | None = None  # a page of 16 tokens and a layer
    bf16_attention_us: float | None = None
    encode_us: float | None = None


def lines(points: Sequence[Point]) -> list[list[str]]:
    """The points as lines under `HEADINGS`."""
    return [
        [
            f"{p.context:,}",
            p.engine,
            p.name,
            p.read,
            f"{p.bytes_per_token:,.0f}",
            f"{p.share:.1%}",
            "-" if p.recent is None else f"{p.recent / 1e3:,.0f}",
            f"{p.kl:.5f}",
            f"{p.agrees:.3f}",
            f"{p.right} of {p.questions} ({p.exact_right})",
            "-" if p.kl_text is None else f"{p.kl_text:.5f}",
            "-" if p.perplexity is None else f"{p.perplexity:.3f}",
            "-" if p.attention_us is None else f"{p.attention_us:.2f}",
            _ratio(p.attention_us, p.bf16_attention_us),
            "-" if p.encode_us is None else f"{p.encode_us:.2f}",
        ]
        for p in points
    ]


def _ratio(ours: float | None, other: float | None) -> str:
    return "-" if not ours or not other else f"{ours / other:.2f}"


def claims(points: Sequence[Point]) -> list[Row]:
    """Rows with aims, for every context and way of reading that was measured.

    A peer's cache is compared with ours in documents that were read the same way; with any of ours
    if none was.
    """
    rows: list[Row] = []
    for context in dict.fromkeys(p.context for p in points):
        here = [p for p in points if p.context == context]
        ours = [p for p in here if p.engine == OURS and p.name != BF16]
        for read in dict.fromkeys(p.read for p in ours):
            mine = [p for p in ours if p.read == read]
            rows += _aims(mine, f"{context:,} tokens read {read}")
        for peer in (p for p in here if p.engine != OURS):
            alike = [p for p in ours if p.read == peer.read] or ours
            rows += _against(peer, alike, f"{context:,} tokens")
    return rows


def _aims(ours: Sequence[Point], claim: str) -> list[Row]:
    rows = []
    named = {p.name: p for p in ours}
    aims = (("fp8-calibrated", 0.505, 0.003), ("int4", 0.31, 0.005), ("mixed4", 0.31, 0.005))
    for name, share, kl in aims:
        if name in named:
            rows += [
                _share(named[name], f"{claim}, {name}", share),
                _kl(named[name], f"{claim}, {name}", kl),
            ]
    small = [p for p in ours if p.share <= 0.25]
    if small:
        best = min(small, key=lambda p: p.kl)
        what = f"{claim}, the best of 4 bits or fewer ({best.name})"
        rows += [
            _share(best, what, 0.25),
            _kl(best, what, 0.015),
            Row(
                claim=what,
                metric="needles answered",
                unit="",
                ours=best.right,
                baseline="exact cache",
                baseline_value=best.exact_right,
                aim=">= 1",
            ),
        ]
    return rows


def _share(point: Point, claim: str, most: float) -> Row:
    return Row(
        claim=claim,
        metric="bytes a token",
        unit="bytes",
        ours=point.bytes_per_token,
        baseline=BF16,
        baseline_value=point.bytes_per_token / point.share,
        aim=f"<= {most}",
    )


def _kl(point: Point, claim: str, below: float) -> Row:
    return Row(
        claim=claim, metric="KL over questions", unit="nats", ours=point.kl, aim=f"< {below}"
    )


def _against(peer: Point, ours: Sequence[Point], claim: str) -> list[Row]:
    """Our best of as many bytes or fewer, against a peer's quantized cache."""
    as_small = [p for p in ours if p.bytes_per_token <= peer.bytes_per_token]
    if not as_small or peer.share >= 1 or not peer.kl:
        return []
    best = min(as_small, key=lambda p: p.kl)
    what = f"{claim}, {best.name} in {shown(best.bytes_per_token)} of {shown(peer.bytes_per_token)}"
    return [
        Row(
            claim=f"{what} bytes a token",
            metric="KL over questions",
            unit="nats",
            ours=best.kl,
            baseline=f"{peer.engine} {peer.name}",
            baseline_value=peer.kl,
            aim="< 1",
        )
    ]
