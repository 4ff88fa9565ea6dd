"""Which segments a full store gives up."""

from collections.abc import Callable, Collection, Sequence

from kvjax.storage.errors import StoreFullError
from kvjax.storage.segment import SegmentInfo


def victims(
    segments: Sequence[SegmentInfo],
    room: int,
    pinned: Collection[str],
    dispensable: Callable[[str], bool],
    last: str = "",
    *,
    used: Callable[[Collection[str]], int] | None = None,
) -> list[str]:
    """Keys of the segments to remove, so that the others fit.

    A segment that is dispensable goes first, as one whose pages and sketches a longer one holds
    as well. Then the least recently used go.

    Args:
      segments: all there are.
      room: bytes that those which stay may occupy.
      pinned: keys of segments that must stay.
      dispensable: whether nothing is lost without the segment of this key.
      last: the key of a segment that goes after all others: it is about to be replaced.
      used: the bytes that are in use without the segments of some keys; None if no segments share
        pages.

    Raises:
      StoreFullError: those that must stay need more.
    """
    if used is None:
        sizes = {info.key: info.bytes for info in segments}

        def used(gone: Collection[str]) -> int:
            return sum(size for key, size in sizes.items() if key not in gone)

    loose = [info for info in segments if info.key not in pinned]
    chosen: list[str] = []

    def rank(info: SegmentInfo) -> tuple[bool, bool, float, str]:
        needed = not dispensable(info.key)
        return needed and info.key == last, needed, info.last_used, info.key

    for info in sorted(loose, key=rank):
        if used(chosen) <= room:
            break
        chosen.append(info.key)
    missing = used(chosen) - room
    if missing > 0:
        held = sum(info.bytes for info in segments if info.key in pinned)
        raise StoreFullError(missing, held)
    return chosen
