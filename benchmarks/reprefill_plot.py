"""The picture of the re-prefill benchmark: quality against bytes read, a method a line."""

import pathlib
from collections.abc import Sequence
from typing import Any


def plot(points: Sequence[Any], path: pathlib.Path) -> None:
    """Draw KL and TTFT against the bytes read at the longest context, and save the picture.

    Args:
      points: what was measured, as `benchmarks.reprefill_point.Point`.
      path: an image file; its folder is made.

    Raises:
      ModuleNotFoundError: matplotlib is not installed (the extra `docs` brings it).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    longest = max(point.context for point in points)
    here = [p for p in points if p.context == longest and p.bytes_read]
    figure, (quality, speed) = pyplot.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    for index, method in enumerate(dict.fromkeys(point.method for point in here)):
        mine = sorted((p for p in here if p.method == method), key=lambda p: p.budget)
        read = [p.bytes_read / 1e6 for p in mine]
        style = {
            "marker": "os^vDPX*<>"[index % 10],
            "linewidth": 2.5 if index == 0 else 1.2,
            "label": method,
        }
        quality.plot(read, [max(p.kl_steps, 1e-6) for p in mine], **style)
        speed.plot(read, [p.ttft_s for p in mine], **style)
    base = next(p for p in points if p.context == longest and p.method == "recompute")
    speed.axhline(base.ttft_s, color="black", linestyle=":", label="recompute")
    for panel, label in ((quality, "mean KL to all keys and values, nats"), (speed, "TTFT, s")):
        panel.set(xlabel="MB read from disk", ylabel=label, xscale="log", yscale="log")
        panel.grid(alpha=0.3)
    speed.legend(fontsize=7)
    figure.suptitle(f"{longest:,} tokens stored; budgets grow along each line")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
