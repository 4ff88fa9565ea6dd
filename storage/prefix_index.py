"""Which segments hold a prompt's first pages, kept in memory and rebuilt from manifests."""

import dataclasses

import numpy as np

from kvjax.storage.errors import Reason
from kvjax.storage.keys import Identity, page_keys
from kvjax.storage.layout import Layout
from kvjax.storage.manifest import Manifest
from kvjax.storage.page_order import PAGE_PLACES


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """A published segment as this process knows it."""

    manifest: Manifest
    generation: bytes  # of the manifest, to notice that it was removed or replaced
    manifest_bytes: int
    page_keys: tuple[bytes, ...]  # of each of its pages, in no layout's namespace

    @property
    def bytes(self) -> int:
        """All that the segment occupies."""
        return self.manifest.data_bytes + self.manifest_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """A segment that holds the first pages of a prompt."""

    key: str
    pages: int
    manifest: Manifest  # as it was last read


class PrefixIndex:
    """From the key of a page to the segments that hold it.

    A key is only a filter: identity and tokens are compared before a segment is a candidate.
    """

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self._holders: dict[bytes, set[str]] = {}

    def add(self, manifest: Manifest, generation: bytes, manifest_bytes: int) -> None:
        """Adds a segment, in place of the one of the same key."""
        self.remove(manifest.key)
        size = manifest.grid.layout.page_size
        names = page_keys(manifest.identity, "", manifest.tokens, size)
        entry = Entry(
            manifest, generation, manifest_bytes, tuple(bytes.fromhex(name) for name in names)
        )
        self.entries[manifest.key] = entry
        for name in entry.page_keys:
            self._holders.setdefault(name, set()).add(manifest.key)

    def remove(self, key: str) -> None:
        """Forgets a segment; does nothing if it is not known."""
        entry = self.entries.pop(key, None)
        for name in entry.page_keys if entry else ():
            holders = self._holders.get(name, set())
            holders.discard(key)
            if not holders:
                self._holders.pop(name, None)

    def candidates(
        self,
        identity: Identity,
        tokens: np.ndarray,
        page_size: int,
        layout: Layout | None,
        whole: bool = False,
    ) -> tuple[list[Candidate], set[Reason]]:
        """Segments that hold a run of a prompt's first full pages.

        Args:
          identity: as in `page_keys`.
          tokens: int32 [T].
          page_size: tokens in a page.
          layout: only segments of this layout; None takes all.
          whole: only segments all of whose pages are the prompt's.

        Returns:
          Candidates with the most pages first (of equals the one that shares the most tokens, then
          the longest, which serves the most prompts, then the newest), and the reasons why a
          segment with a fitting key was none.
        """
        found: dict[str, Candidate] = {}
        rejected: set[Reason] = set()
        names = page_keys(identity, "", tokens, page_size)
        for page in range(len(names), 0, -1):
            for key in self._holders.get(bytes.fromhex(names[page - 1]), ()):
                manifest = self.entries[key].manifest
                if key in found or layout not in (None, manifest.grid.layout):
                    continue
                if whole and page < manifest.grid.pages:
                    continue
                if manifest.identity != identity or manifest.grid.layout.page_size != page_size:
                    rejected.add("foreign")
                elif not np.array_equal(
                    manifest.tokens[: page * page_size], tokens[: page * page_size]
                ):
                    rejected.add("tokens differ")
                else:
                    found[key] = Candidate(key, page, manifest)

        def rank(candidate: Candidate) -> tuple[int, int, int, float, str]:
            manifest = candidate.manifest
            shared = _common(manifest.tokens, tokens)
            pages = manifest.grid.pages
            return -candidate.pages, -shared, -pages, -manifest.created, candidate.key

        return sorted(found.values(), key=rank), rejected

    def covering(self, key: str) -> list[Entry]:
        """Longer segments of the same layout and dtype that hold all that is in this one.

        That is all its tokens and pages, and sketches of the same names; where pages lie in files
        is nobody's loss.
        """
        entry = self.entries[key]
        own = entry.manifest
        others = (
            self.entries[other] for other in self._holders[entry.page_keys[-1]] if other != key
        )
        return [
            other
            for other in others
            if other.manifest.grid.layout == own.grid.layout
            and other.manifest.grid.dtype == own.grid.dtype
            and other.manifest.sketch_names >= own.sketch_names - {PAGE_PLACES}
            and len(other.manifest.tokens) > len(own.tokens)
            and np.array_equal(other.manifest.tokens[: len(own.tokens)], own.tokens)
        ]

    def covered(self, key: str) -> list[Entry]:
        """Shorter segments of which this one is one of the `covering`."""
        entry = self.entries[key]
        sharing = {other for page in entry.page_keys for other in self._holders[page]}
        return [self.entries[other] for other in sharing if entry in self.covering(other)]


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many first tokens two sequences share."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length
