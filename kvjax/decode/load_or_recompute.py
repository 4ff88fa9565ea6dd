"""Whether loading a stored prefix is worth it: t0 + B / beta against the time to prefill it."""

import dataclasses
import time

import numpy as np

from kvjax.errors import KvjaxError
from kvjax.storage.segment import Segment

SAMPLE_UNITS = 64
"""Units of the larger of the two reads that calibrate a store."""


@dataclasses.dataclass(frozen=True)
class CostModel:
    """What reading and prefilling cost here.

    >>> model = CostModel(read_s=0.002, bytes_per_s=500e6, tokens_per_s=300)
    >>> round(model.load_s(50_000_000), 3), round(model.recompute_s(8192), 1)  # seconds
    (0.102, 27.3)
    >>> model.loads(50_000_000, tokens=8192), model.loads(50_000_000, tokens=16)
    (True, False)

    Attributes:
      read_s: t0, seconds of a read of nothing.
      bytes_per_s: beta, bytes a second beyond that.
      tokens_per_s: tokens prefilled a second.

    Raises:
      KvjaxError: a rate is not above 0, or t0 is negative.
    """

    read_s: float
    bytes_per_s: float
    tokens_per_s: float

    def __post_init__(self) -> None:
        for name in ("bytes_per_s", "tokens_per_s"):
            if not getattr(self, name) > 0:
                raise KvjaxError(f"{name} is {getattr(self, name)}: must be above 0")
        if not self.read_s >= 0:
            raise KvjaxError(f"read_s is {self.read_s}: must be 0 or more seconds")

    def load_s(self, size: int) -> float:
        """Seconds to read `size` bytes."""
        return self.read_s + size / self.bytes_per_s

    def recompute_s(self, tokens: int) -> float:
        """Seconds to prefill `tokens` tokens."""
        return tokens / self.tokens_per_s

    def loads(self, size: int, *, tokens: int) -> bool:
        """Whether reading `size` bytes is faster than prefilling `tokens` tokens."""
        return self.load_s(size) < self.recompute_s(tokens)


def measure_reads(segment: Segment, timeout_s: float) -> tuple[float, float]:
    """t0 and beta of a segment's store, from one read of one unit and one of many.

    The units lie apart, so that one read does not warm the other's. What the operating system
    has in memory already is read faster than what it has not.

    Args:
      segment: open for reading; of at least two units.
      timeout_s: the longest that both reads may take, in seconds.

    Returns:
      Seconds, and bytes a second.

    Raises:
      UnitError: a unit cannot be read.
      TimeoutError: a unit is not there in time.
    """
    layers, heads, _, pages = segment.grid.units
    names = np.array(
        [(i % layers, i // layers % heads, 0, i * 7 % pages) for i in range(SAMPLE_UNITS)], np.int32
    )
    names = np.unique(names, axis=0)
    few, many = names[:1], names[1:]
    deadline = time.monotonic() + timeout_s
    first = _seconds(segment, few, deadline)
    rest = _seconds(segment, many, deadline)
    extra = max(len(many) - len(few), 1) * segment.unit_bytes
    rate = extra / max(rest - first, 1e-6)
    return max(first - len(few) * segment.unit_bytes / rate, 0.0), rate


def _seconds(segment: Segment, units: np.ndarray, deadline: float) -> float:
    began = time.perf_counter()
    for read in segment.read(units):
        read.result(max(0.0, deadline - time.monotonic()))
    return time.perf_counter() - began
