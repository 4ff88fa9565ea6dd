"""The picture of the decode benchmark: a step's time against context, an engine a line."""

import pathlib
from collections.abc import Sequence

from benchmarks.engines import Outcome


def plot(outcomes: Sequence[Outcome], path: pathlib.Path, title: str) -> None:
    """Draw one panel a batch size and save it.

    Args:
      outcomes: what the engines measured.
      path: an image file; its folder is made.
      title: above the panels.

    Raises:
      ModuleNotFoundError: matplotlib is not installed (the extra `docs` brings it).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ran = [outcome for outcome in outcomes if outcome.answer]
    points = [point for outcome in ran for point in (outcome.answer or {})["points"]]
    batches = sorted({point["batch"] for point in points})
    figure, panels = pyplot.subplots(
        1, len(batches), figsize=(5.2 * len(batches), 4.2), squeeze=False, layout="constrained"
    )
    for panel, batch in zip(panels[0], batches, strict=True):
        for outcome in ran:
            mine = [p for p in (outcome.answer or {})["points"] if p["batch"] == batch]
            ours = outcome.engine.name == "kvjax"
            panel.plot(
                [point["context"] for point in mine],
                [point["step_ms"] for point in mine],
                marker="o",
                linewidth=2.5 if ours else 1.2,
                linestyle="-" if ours else "--",
                label=outcome.engine.label,
            )
        panel.set(xlabel="tokens of context", title=f"batch {batch}", xscale="log", yscale="log")
        ticks = sorted({point["context"] for point in points})
        panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("milliseconds a decode step")
    panels[0][-1].legend(fontsize=8)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
