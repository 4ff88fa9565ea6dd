"""Running a model through the cache: `generate`, `stream` and `score`."""

from kvjax.decode.generate import Progress, generate
from kvjax.decode.results import FinishReason, Generation, Score, Stats, StreamEvent
from kvjax.decode.sampling import Sampling
from kvjax.decode.score import score
from kvjax.decode.stream import stream

__all__ = [
    "FinishReason",
    "Generation",
    "Progress",
    "Sampling",
    "Score",
    "Stats",
    "StreamEvent",
    "generate",
    "score",
    "stream",
]
