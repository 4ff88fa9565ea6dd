"""What can go wrong in a page store, by name.

A wrong argument is a ValueError, a fault of files or devices an OSError. A segment that cannot be
used is a `SegmentError` with one of a few reasons: a miss, which is counted and recomputed.
"""

import errno
import re
from typing import Literal, get_args

import numpy as np

Reason = Literal[
    "absent", "torn", "checksum", "foreign", "tokens differ", "version", "io", "timeout"
]
"""Why stored data was not used.

absent: nothing is stored under that name, or not any more.
torn: shorter than it was written, or not readable as what it should be.
checksum: whole, but not the bytes that were written.
foreign: written by something else, for another segment, or for another place in it.
tokens differ: the key was found, what it was made from is not what was asked for.
version: written in another version of the format.
io: the device or the network failed.
timeout: a unit was not there in time.
"""

DAMAGED: frozenset[Reason] = frozenset(("absent", "torn", "checksum", "foreign"))
"""Reasons that do not pass by themselves: what was found so must be written anew."""

REASONS: tuple[Reason, ...] = get_args(Reason)

IN_WORDS: dict[Reason, str] = {
    "absent": "it is not there, or not any more",
    "torn": "it is shorter than it was written, or not whole",
    "checksum": "its bytes are not those that were written",
}
"""What to say of a unit that TensorStore could not read."""

_SOURCE = re.compile(r"\s*\[(?:source locations|os_error_code)='[^']*'\]")
_OS_ERROR_CODE = re.compile(r"\[os_error_code='(\d+)'\]")


class NotAStoreError(ValueError):
    """The URL holds no page store, and none can be made there."""


class ReadOnlyStoreError(ValueError):
    """The store was opened with read_only=True, and something was to be written."""


class SegmentTooLargeError(ValueError):
    """One segment needs more bytes than the whole store may have."""


class UnknownKeyError(ValueError):
    """The first digits of a key belong to no stored segment, or to several."""


class StoreFullError(OSError):
    """Everything that could be evicted is open, so there is no room for another segment.

    Closing open segments, the least recently used first, makes room; then `put` may be tried again.

    Attributes:
      missing: bytes that have to be freed still.
      open_bytes: bytes that segments occupy which this process has open.
    """

    def __init__(self, missing: int, open_bytes: int) -> None:
        super().__init__(
            f"{missing} bytes are missing, and open segments hold {open_bytes}; close some of "
            "them, or open the store with a larger max_bytes"
        )
        self.missing = missing
        self.open_bytes = open_bytes


class StoreError(OSError):
    """The device, file system or network under the store failed; `errno` says how, if known.

    Attributes:
      reason: "torn" or "checksum" where that is what a read found, else "absent" or "io".
    """

    reason: Reason = "io"


class SegmentError(OSError):
    """A stored segment cannot be used.

    Attributes:
      key: the segment's key.
      reason: why.
    """

    def __init__(self, key: str, reason: Reason, detail: str) -> None:
        super().__init__(f"segment {key[:12]} is a miss ({reason}): {detail}")
        self.key = key
        self.reason: Reason = reason


class ParcelError(OSError):
    """Bytes that should hold packed numbers do not (`parcel`).

    Attributes:
      reason: "torn", "foreign", "version" or "checksum".
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"a parcel cannot be unpacked ({reason}): {detail}")
        self.reason: Reason = reason


class UnitError(OSError):
    """One unit of a segment cannot be read.

    Attributes:
      key: the segment's key.
      unit: (layer group, head group, kind, page).
      reason: why.
    """

    def __init__(
        self, key: str, unit: tuple[int, int, int, int], reason: Reason, detail: str
    ) -> None:
        layer, head, kind, page = unit
        super().__init__(
            f"unit (layer group {layer}, head group {head}, kind {kind}, page {page}) of segment "
            f"{key[:12]} cannot be read ({reason}): {detail}"
        )
        self.key = key
        self.unit = unit
        self.reason: Reason = reason


class ReadFailedError(OSError):
    """Units that are needed could not be read.

    Attributes:
      reason: "timeout" if a read did not return in time, "error" if it raised, "closed".
      units: int32 [m, 4], the units that are missing.
    """

    def __init__(self, reason: str, units: np.ndarray, detail: str) -> None:
        self.reason = reason
        self.units = units
        first = units[0].tolist() if len(units) else None
        super().__init__(
            f"{len(units)} units could not be read ({reason}), the first "
            f"[layer group, head group, kind, page] = {first}: {detail}"
        )


def late(doing: str, waited_s: float) -> StoreError:
    """What a wait without an answer is: an OSError with ETIMEDOUT, of reason "io".

    Args:
      doing: what was being done, as in "writing segments/x.json".
      waited_s: seconds.
    """
    return StoreError(errno.ETIMEDOUT, f"{doing}: no answer in {waited_s:g} s")


def fault(error: BaseException, doing: str) -> StoreError:
    """What TensorStore raised, as an OSError with its errno and reason.

    Args:
      error: the exception of a TensorStore call. Its text starts with the name of a status.
      doing: what was being done, as in "writing segments/x.json".
    """
    text = str(error)
    number = _OS_ERROR_CODE.search(text)
    code = int(number[1]) if number else getattr(error, "errno", None) or errno.EIO
    # Where in TensorStore's source it happened is of no use, and many lines.
    short = " ".join(_SOURCE.sub("", text).split())
    result = StoreError(code, f"{doing}: {short}")
    if text.startswith("NOT_FOUND"):
        result.reason = "absent"
    elif "Digest mismatch" in text:
        result.reason = "checksum"
    elif text.startswith(("DATA_LOSS", "FAILED_PRECONDITION", "OUT_OF_RANGE")) and not number:
        result.reason = "torn"
    return result
