"""The published segments, as their manifests say, kept up with what other processes do."""

from kvjax.storage.blobs import Blobs
from kvjax.storage.errors import Reason, SegmentError, StoreError
from kvjax.storage.manifest import decode
from kvjax.storage.prefix_index import Entry, PrefixIndex
from kvjax.storage.usage import UsageLog

_FOLDER = "segments/"
_SUFFIX = ".json"


def manifest_name(key: str) -> str:
    """Where a segment's manifest is."""
    return f"{_FOLDER}{key}{_SUFFIX}"


class Catalog:
    """An index of manifests that is brought up to date by listing them.

    Attributes:
      index: the segments whose manifests are whole.
      damaged: by key, why a manifest could not be used when it was last looked at.
    """

    def __init__(self, blobs: Blobs, usage: UsageLog) -> None:
        self.index = PrefixIndex()
        self.damaged: dict[str, SegmentError] = {}
        self._blobs = blobs
        self._usage = usage

    def names(self) -> list[str]:
        """Keys of all manifests there are, whole or not.

        Raises:
          StoreError: they cannot be listed.
        """
        names = self._blobs.names(_FOLDER)
        return [name[len(_FOLDER) : -len(_SUFFIX)] for name in names if name.endswith(_SUFFIX)]

    def refresh(self) -> list[Reason]:
        """Takes in manifests that are new, drops those that are gone.

        Returns:
          The reason of each manifest that is found to be damaged for the first time.

        Raises:
          StoreError: manifests cannot be listed.
        """
        present = set(self.names())
        for key in self.index.entries.keys() - present:
            self._drop(key)
        for key in self.damaged.keys() - present:
            del self.damaged[key]
        news = []
        for key in sorted(present - self.index.entries.keys()):
            known_damage = key in self.damaged
            try:
                self.get(key)
            except SegmentError as miss:
                if not known_damage:
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
        self._drop(key)
        if blob.value is None:
            self.damaged.pop(key, None)
            raise SegmentError(key, "absent", f"no manifest {manifest_name(key)}")
        try:
            manifest = decode(key, blob.value)
        except SegmentError as miss:
            self.damaged[key] = miss
            raise
        self.damaged.pop(key, None)
        self.index.add(manifest, blob.generation, len(blob.value))
        self._usage.load(key)
        return self.index.entries[key]

    def forget(self, key: str) -> None:
        """The segment was removed."""
        self._drop(key)
        self.damaged.pop(key, None)
        self._usage.forget(key)

    def _drop(self, key: str) -> None:
        self.index.remove(key)
