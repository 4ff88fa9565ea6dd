"""Running a model through the cache: `generate`, `stream` and `score`."""

from kvjax.decode.calibrate import calibrate
from kvjax.decode.calibrate_formats import calibrate_formats
from kvjax.decode.calibration import Calibration, Trial
from kvjax.decode.calls import Progress
from kvjax.decode.distill_indexer import distill_indexer
from kvjax.decode.generate import generate
from kvjax.decode.indexer_recall import Kept, attention_kept, learn_and_hold_out
from kvjax.decode.prefix_config import PrefixConfig
from kvjax.decode.prefixes import PrefixCache
from kvjax.decode.results import (
    FinishReason,
    Generation,
    PrefixStats,
    RowsFailedError,
    Score,
    Stats,
    StreamEvent,
)
from kvjax.decode.sampling import Sampling
from kvjax.decode.score import score
from kvjax.decode.stream import stream
from kvjax.decode.window_profile import plan_windows, profile_windows

__all__ = [
    "Calibration",
    "FinishReason",
    "Generation",
    "Kept",
    "PrefixCache",
    "PrefixConfig",
    "PrefixStats",
    "Progress",
    "RowsFailedError",
    "Sampling",
    "Score",
    "Stats",
    "StreamEvent",
    "Trial",
    "attention_kept",
    "calibrate",
    "calibrate_formats",
    "distill_indexer",
    "generate",
    "learn_and_hold_out",
    "plan_windows",
    "profile_windows",
    "score",
    "stream",
]
