"""The picture of the benchmark of latents: perplexity against bytes, before and after healing."""

import pathlib
from collections.abc import Sequence
from typing import Any


def draw(points: Sequence[Any], path: pathlib.Path) -> str:
    """Draw the curves, save the picture, and give the Markdown that shows it.

    Args:
      points: of `benchmarks.latents`.
      path: an image file; its folder is made.

    Raises:
      ModuleNotFoundError: matplotlib is not installed (the extra `docs` brings it).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    curves = (
        ("converted", "converted", "o--", "tab:orange"),
        ("healed", "healed", "o-", "tab:blue"),
        ("other_converted", "converted, text of 1790", "s--", "navajowhite"),
        ("other_healed", "healed, text of 1790", "s-", "lightsteelblue"),
    )
    for name, label, style, color in curves:
        mine = [(100 * p.share, getattr(p, name)) for p in points if getattr(p, name) is not None]
        at = [share for share, _ in mine], [100 * (one.ratio - 1) for _, one in mine]
        axes.plot(*at, style, color=color, label=label)
    axes.set(
        xlabel="bytes of a token, % of those of keys and values",
        ylabel="perplexity above the original's, %",
    )
    axes.set_yscale("symlog", linthresh=1.0)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return f"\n\n![perplexity against bytes]({path.parent.name}/{path.name})"
