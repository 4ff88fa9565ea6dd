"""The published segments, as their manifests say, kept up with what other processes do."""

import dataclasses
import threading
from collections.abc import Collection

import numpy as np

from kvjax.storage.blobs import Blobs
from kvjax.storage.errors import Reason, SegmentError, StoreError, UnknownKeyError
from kvjax.storage.keys import Identity
from kvjax.storage.layout import Layout
from kvjax.storage.manifest import decode
from kvjax.storage.prefix_index import Candidate, Entry, PrefixIndex
from kvjax.storage.usage import UsageLog

_FOLDER = "segments/"
_SUFFIX = ".json"


def manifest_name(key: str) -> str:
    """Where a segment's manifest is."""
    return f"{_FOLDER}{key}{_SUFFIX}"


@dataclasses.dataclass(frozen=True)
class Damage:
    """A manifest that cannot be used."""

    miss: SegmentError  # why
    generation: bytes  # of the manifest that was looked at


class Catalog:
    """An index of manifests that is brought up to date by listing them.

    Threads may share it: nothing is locked while the store is asked.

    Attributes:
      index: the segments whose manifests are whole.
      damaged: by key, what is wrong with a manifest that was last looked at.
    """

    def __init__(self, blobs: Blobs, usage: UsageLog) -> None:
        self.index = PrefixIndex()
        self.damaged: dict[str, Damage] = {}
        self._condemned: dict[str, float] = {}  # when a segment was created whose data is damaged
        self._blobs = blobs
        self._usage = usage
        self._lock = threading.RLock()

    def names(self) -> list[str]:
        """Keys of all manifests there are, whole or not.

        Raises:
          StoreError: they cannot be listed.
        """
        names = self._blobs.names(_FOLDER)
        return [name[len(_FOLDER) : -len(_SUFFIX)] for name in names if name.endswith(_SUFFIX)]

    def full_key(self, digits: str) -> str:
        """The key that starts with these digits.

        Raises:
          UnknownKeyError: no key starts so, or several do.
          StoreError: manifests cannot be listed.
        """
        keys = [key for key in self.names() if digits and key.startswith(digits)]
        if not keys:
            raise UnknownKeyError(
                f"no stored prefix has a key that starts with {digits!r}: `kvjax store ls` lists "
                "them"
            )
        if len(keys) > 1:
            some = ", ".join(key[: len(digits) + 6] for key in keys[:3])
            raise UnknownKeyError(
                f"{len(keys)} stored prefixes have a key that starts with {digits!r}, such as "
                f"{some}: give more digits"
            )
        return keys[0]

    def entries(self) -> list[Entry]:
        """The segments whose manifests are whole, as they are known here."""
        with self._lock:
            return list(self.index.entries.values())

    def candidates(
        self,
        identity: Identity,
        tokens: np.ndarray,
        page_size: int,
        layout: Layout | None,
        whole: bool = False,
    ) -> tuple[list[Candidate], set[Reason]]:
        """As `PrefixIndex.candidates`."""
        with self._lock:
            return self.index.candidates(identity, tokens, page_size, layout, whole)

    def refresh(self) -> list[Reason]:
        """Takes in manifests that are new, drops those that are gone.

        Returns:
          The reason of each manifest that is found to be damaged for the first time.

        Raises:
          StoreError: manifests cannot be listed.
        """
        with self._lock:
            before = self.index.entries.keys() | self.damaged.keys()
        present = set(self.names())
        with self._lock:
            for key in before - present:
                self.forget(key)
            new = sorted(present - self.index.entries.keys())
            known_damage = set(self.damaged)
        news: list[Reason] = []
        for key in new:
            try:
                self.get(key)
            except SegmentError as miss:
                if key not in known_damage and miss.reason != "absent":
                    news.append(miss.reason)
        return news

    def get(self, key: str) -> Entry:
        """A segment's entry, read anew if its manifest changed or was not known.

        Raises:
          SegmentError: there is none, or its manifest cannot be used.
        """
        known = self.index.entries.get(key)
        try:
            blob = self._blobs.read(manifest_name(key), known.generation if known else None)
        except StoreError as error:
            raise SegmentError(key, error.reason, str(error)) from error
        if known is not None and not blob.changed:
            return known
        if blob.value is None:
            self.forget(key)
            raise SegmentError(key, "absent", f"no manifest {manifest_name(key)}")
        try:
            manifest = decode(key, blob.value)
        except SegmentError as miss:
            with self._lock:
                self.forget(key)
                self.damaged[key] = Damage(miss, blob.generation)
            raise
        self._usage.load([key])
        with self._lock:
            self.damaged.pop(key, None)
            self.index.add(manifest, blob.generation, len(blob.value))
            return self.index.entries[key]

    def bytes_in_use(self, without: Collection[str] = ()) -> int:
        """What the segments occupy; pages that several share count once.

        Args:
          without: keys of segments that are to count as removed.
        """
        with self._lock:
            left = [entry for key, entry in self.index.entries.items() if key not in without]
            folders = {name: size for x in left for name, size in x.manifest.folders.items()}
            return sum(entry.manifest_bytes for entry in left) + sum(folders.values())

    def needs(self, folder: str) -> bool:
        """Whether a segment has pages in a folder under data/."""
        return any(folder in entry.manifest.folders for entry in self.entries())

    def generation(self, key: str) -> bytes | None:
        """Of the manifest, whole or not, as it was last looked at; None if there was none."""
        with self._lock:
            if key in self.index.entries:
                return self.index.entries[key].generation
            return self.damaged[key].generation if key in self.damaged else None

    def knows(self, entry: Entry) -> bool:
        """Whether the segment is still the one of its key."""
        with self._lock:
            now = self.index.entries.get(entry.manifest.key)
            return now is not None and now.generation == entry.generation

    def condemn(self, key: str, created: float, page: int | None) -> list[str]:
        """Data of the segment that was created then is damaged, though its manifest is whole.

        Args:
          key: the segment's.
          created: seconds since 1970.
          page: one of its pages that is damaged; None if it is not known which are.

        Returns:
          Keys of the segments that this is said of: those that share pages with it too.
        """
        with self._lock:
            self._condemned[key] = created
            entries = self.index.entries
            if key not in entries or entries[key].manifest.created != created:
                return []
            manifest = entries[key].manifest
            folders = set(manifest.folders) if page is None else {manifest.folder_of(page)}
            keys = [x for x, entry in entries.items() if folders & entry.manifest.folders.keys()]
            self._condemned.update((x, entries[x].manifest.created) for x in keys)
            return keys

    def condemned(self, entry: Entry) -> bool:
        """Whether data of a segment was found damaged."""
        return self._condemned.get(entry.manifest.key) == entry.manifest.created

    def dispensable(self, key: str) -> bool:
        """Whether nothing is lost with a segment: it is damaged, or a sound one covers it."""
        with self._lock:
            if self.condemned(self.index.entries[key]):
                return True
            return any(not self.condemned(other) for other in self.index.covering(key))

    def covered(self, key: str) -> list[Entry]:
        """Shorter segments of which nothing is lost while the segment of this key is there."""
        with self._lock:
            known = key in self.index.entries and not self.condemned(self.index.entries[key])
            return self.index.covered(key) if known else []

    def forget(self, key: str) -> None:
        """The segment was removed."""
        with self._lock:
            self.index.remove(key)
            self.damaged.pop(key, None)
