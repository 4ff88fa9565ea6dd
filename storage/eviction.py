"""Which segments a full store gives up."""

from collections.abc import Callable, Collection, Sequence

from kvjax.storage.errors import StoreFullError
from kvjax.storage.segment import SegmentInfo


def victims(
    segments: Sequence[SegmentInfo],
    room: int,
    pinned: Collection[str],
    covered: Callable[[str], bool],
) -> list[str]:
    """Keys of the segments to remove, so that the others fit.

    A segment whose pages a longer one holds as well goes first: without it nothing is lost. Then
    the least recently used go.

    Args:
      segments: all there are.
      room: bytes that those which stay may occupy.
      pinned: keys of segments that must stay.
      covered: whether another segment holds all pages of the one of this key.

    Raises:
      StoreFullError: those that must stay need more.
    """
    used = sum(info.bytes for info in segments)
    loose = [info for info in segments if info.key not in pinned]
    chosen = []
    for info in sorted(loose, key=lambda info: (not covered(info.key), info.last_used, info.key)):
        if used <= room:
            break
        chosen.append(info.key)
        used -= info.bytes
    if used > room:
        raise StoreFullError(
            f"{used} bytes are in use by open segments, {max(room, 0)} is what the others leave of "
            "max_bytes; close segments, or open the store with a larger max_bytes"
        )
    return chosen
