"""The picture of the benchmark of formats: quality against bytes, a mark a format."""

import pathlib
from collections.abc import Sequence

from benchmarks.formats_claims import EXACTLY, OURS, Point

LEAST = 1e-6
"""Nats below which marks stand at the picture's edge."""


def plot(points: Sequence[Point], path: pathlib.Path, title: str) -> None:
    """Draw KL against bytes a token at the longest context, and save the picture.

    Args:
      points: what was measured.
      path: an image file; its folder is made.
      title: of the picture.

    Raises:
      ModuleNotFoundError: matplotlib is not installed (the extra `docs` brings it).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    longest = max(point.context for point in points)
    figure, axes = pyplot.subplots(figsize=(11, 6.5), layout="constrained")
    engines = list(dict.fromkeys(point.engine for point in points))
    for engine, read in dict.fromkeys((point.engine, point.read) for point in points):
        mine = [p for p in points if (p.engine, p.read) == (engine, read)]
        mine = [p for p in mine if p.context == longest and p.kl]
        marker = "os^D"[engines.index(engine) % 4]
        at = [100 * p.share for p in mine], [max(p.kl, LEAST) for p in mine]
        axes.scatter(
            *at,
            marker=marker,
            s=60 if engine == OURS else 45,
            label=f"{engine}, document read {read}",
            zorder=3,
            alpha=0.4 if engine == OURS and read == EXACTLY else 0.9,
        )
        for x, y, point in zip(*at, mine, strict=True):
            axes.annotate(point.name, (x, y), (5, 4), textcoords="offset points", fontsize=7)
    axes.set(
        xlabel="bytes a token, % of bf16",
        ylabel="mean KL to the engine's exact cache, nats",
        yscale="log",
        title=f"{title}, {longest:,} tokens",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
