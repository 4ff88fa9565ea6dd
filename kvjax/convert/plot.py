"""A picture of how a model healed; it needs matplotlib, of the extra `docs`."""

import importlib.util
import os
from collections.abc import Sequence

from kvjax.convert.heal import smoothed
from kvjax.storage.files import publish

_SMOOTHED_STEPS = 20


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_losses(path: str | os.PathLike[str], losses: Sequence[float]) -> None:
    """Draw every step's loss, and the mean of the last twenty, as a PNG file.

    Args:
      path: the file.
      losses: in nats a token.

    Raises:
      ImportError: matplotlib is not installed: see `can_plot`.
      OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, ".", color="tab:blue", alpha=0.4, label="a step")
    mean = smoothed(losses, _SMOOTHED_STEPS)
    axes.plot(steps, mean, color="tab:blue", label=f"mean of {_SMOOTHED_STEPS} steps")
    axes.set(xlabel="step", ylabel="KL from the original, nats a token", yscale="log")
    axes.legend()
    with publish(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=120)
