"""Prefixes on disk or in any store with a URL: written once, found by tokens, read in units.

    store.json               says that this is a page store, and of which version
    data/KEY.TIME.NONCE/     a segment's units (zarr3, sharded), their description, its sketches;
                             longer segments may share them
    segments/KEY.json        its manifest, written last and in one step: from then on it exists
    use/KEY.json             how often it was found, and when

Data that no manifest names is left by a writer that was stopped; `gc` removes it. Any number of
processes may read and write one store at the same time.
"""

import collections
import contextlib
import dataclasses
import os
import re
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Shaped

from kvjax.storage.blobs import Blobs
from kvjax.storage.catalog import Catalog, manifest_name
from kvjax.storage.errors import (
    DAMAGED,
    REASONS,
    ReadOnlyStoreError,
    Reason,
    SegmentError,
    SegmentTooLargeError,
    StoreError,
)
from kvjax.storage.eviction import victims
from kvjax.storage.keys import Identity, token_array
from kvjax.storage.layout import Layout
from kvjax.storage.marker import check_marker
from kvjax.storage.page_order import PAGE_PLACES
from kvjax.storage.prefix_index import Entry
from kvjax.storage.segment import Segment, SegmentInfo, info_of
from kvjax.storage.segment_writer import Beginning, draft, write_segment
from kvjax.storage.store_stats import StoreStats
from kvjax.storage.upkeep import Finding, Freed, collect_garbage, verify
from kvjax.storage.usage import UsageLog

_KEY = re.compile(r"[0-9a-f]{64}")
GC_AGE_S = 3600.0
"""Unpublished data younger than this may still be written by somebody."""


@dataclasses.dataclass(frozen=True, eq=False)
class Match(Beginning):
    """What a prompt has in the store: an open segment, and how many of the first pages it holds."""

    @property
    def key(self) -> str:
        """The segment's key."""
        return self.segment.info.key


class PageStore:
    """Stored prefixes of language models' keys and values.

        store = PageStore.open("pages")
        store.put(identity, tokens, k, v, layout=Layout(layers=4, heads=3))
        if match := store.find(identity, prompt):
            with match.segment as segment:
                units = np.array([[0, 0, 0, page] for page in range(match.pages)], np.int32)
                first = segment.read(units)[0].result()

    Threads may share one; none waits for what another one asks of the store, but writers for each
    other while they make room.

    Attributes:
      url: where it is.
      max_bytes: the most that all segments may occupy; None if there is no limit.
      read_only: whether it is never written.
      timeout_s: the longest wait for one answer of the store, in seconds.
    """

    def __init__(self, blobs: Blobs, max_bytes: int | None, read_only: bool) -> None:
        """Use `PageStore.open`."""
        self.url = blobs.url
        self.max_bytes = max_bytes
        self.read_only = read_only
        self.timeout_s = blobs.timeout_s
        self._blobs = blobs
        self._usage = UsageLog(blobs, read_only)
        self._catalog = Catalog(blobs, self._usage)
        self._misses: collections.Counter[Reason] = collections.Counter()
        self._evicted = 0
        self._reserved = 0  # bytes of segments that are being written
        self._replaced: dict[str, int] = {}  # bytes of folders whose segment was written anew here
        self._open: weakref.WeakSet[Segment] = weakref.WeakSet()
        self._lock = threading.RLock()  # never held while the store is asked
        self._eviction = threading.Lock()

    @classmethod
    def open(
        cls,
        url: str | os.PathLike[str],
        *,
        max_bytes: int | None = None,
        read_only: bool = False,
        timeout_s: float = 30.0,
    ) -> "PageStore":
        """Opens a store, or makes one where there is nothing.

        Args:
          url: a folder, or a URL that TensorStore has a key-value store for.
          max_bytes: the most that all segments may occupy; None sets no limit. A store that holds
            more evicts segments now, and removes what stopped writers left.
          read_only: never write, not even hit counts.
          timeout_s: the longest wait for one answer of the store, in seconds. What takes longer is
            a `StoreError` with errno ETIMEDOUT, a miss of reason "io" where it is one segment's.

        Raises:
          NotAStoreError: the URL holds something else or another version, or, with
            read_only=True, nothing.
          StoreError: it cannot be read or made.
          ValueError: max_bytes is below 1, or timeout_s not above 0.
        """
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes is {max_bytes}; give a number of bytes, or None")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}; give seconds above 0")
        blobs = Blobs(url, timeout_s)
        check_marker(blobs, read_only)
        store = cls(blobs, max_bytes, read_only)
        store.refresh()
        if max_bytes is not None and not read_only:
            store.gc()
            with store._room(0, ""):
                pass
        return store

    def put(
        self,
        identity: Identity,
        tokens: Sequence[int] | np.ndarray,
        k: Shaped[np.ndarray, "L N H P D"],
        v: Shaped[np.ndarray, "L N H P D"],
        *,
        layout: Layout = Layout(),  # noqa: B008  frozen
        sketches: Mapping[str, np.ndarray] | None = None,
        label: str = "",
        after: Beginning | None = None,
        codec: str = "none",
    ) -> SegmentInfo:
        """Stores the full pages of a prompt; returns when they are on the device.

        A segment that is stored already, with sketches of all these names, is not written again:
        pages never change, nor do sketches. One that lacks some is replaced in one step by one that
        has all of both. So is one that was reported damaged, and the sketches given here count. Who
        has the former open reads on: its data is left to gc.

        Args:
          identity: what keys and values depend on besides the tokens.
          tokens: the N * P token ids of the pages, and those after them, fewer than P: they are
            part of what the segment's key stands for.
          k: keys of all layers, bfloat16, float16 or float32.
          v: values, of the same shape and dtype.
          layout: what one read will bring.
          sketches: small arrays to keep with the pages, by name.
          label: for people: a model or a file.
          after: an open segment, as `find` gives it, whose first pages are these tokens': they are
            not written again, k and v are the pages that follow, and sketches are of all pages.
          codec: how units are encoded, see `unit_codec`; what is stored already stays as it is.

        Returns:
          What is stored now.

        Raises:
          ValueError: an argument is wrong, or the store is read-only.
          SegmentTooLargeError: the segment alone is larger than max_bytes.
          StoreFullError: what would have to be evicted is open.
          StoreError: it cannot be written; `errno` says why, as ENOSPC. Nothing was published.
        """
        self._check_writable("put")
        arrays = dict(sketches or {})
        while True:
            new = draft(identity, tokens, k, v, layout, arrays, label, after, codec)
            key = new.manifest.key
            stored = self._stored(key, arrays, after)
            if isinstance(stored, SegmentInfo):
                return stored
            if stored is not arrays:
                arrays = stored
                new = draft(identity, tokens, k, v, layout, arrays, label, after, codec)
            self._check_size(new.bytes, key, label)
            with self._room(new.bytes, key):
                former = self._catalog.index.entries.get(key)
                published = write_segment(self._blobs, new, self._catalog.generation(key))
                if published and former is not None:
                    with self._lock:
                        self._replaced.update(former.manifest.folders)
            if published:
                return self._info(self._catalog.get(key))

    def find(
        self,
        identity: Identity,
        tokens: Sequence[int] | np.ndarray,
        page_size: int = 16,
        *,
        layout: Layout | None = None,
        sketch: str | None = None,
        exact: bool = False,
        whole: bool = False,
    ) -> Match | None:
        """The segment that holds the most of a prompt's first full pages.

        The segment's identity and tokens are compared with what is asked for, whatever the keys
        say. One that turns out damaged is counted as a miss, and the next best is taken.

        Args:
          identity: what keys and values depend on besides the tokens.
          tokens: the prompt's token ids.
          page_size: tokens in a page.
          layout: only segments of this layout, whose page size counts then; None takes any.
          sketch: only segments with arrays of this name, stored as NAME.PART; None takes any.
          exact: only a segment of these very tokens, those after its last page too.
          whole: only segments all of whose pages are the prompt's.

        Returns:
          The segment, open, and how many pages it shares with the prompt; None if that is none.

        Raises:
          ValueError: tokens or page size are out of range.
          StoreError: manifests cannot be listed.
        """
        ids = token_array(tokens)
        size = page_size if layout is None else layout.page_size
        found, rejected = self._catalog.candidates(identity, ids, size, layout, whole)
        fitting = (one.pages for one in found if sketch is None or one.manifest.has_sketch(sketch))
        if next(fitting, 0) < len(ids) // size:
            self.refresh()
            found, rejected = self._catalog.candidates(identity, ids, size, layout, whole)
        misses: list[Reason] = list(rejected)
        match = None
        for candidate in found:
            if exact and not np.array_equal(candidate.manifest.tokens, ids):
                continue
            try:
                entry = self._catalog.get(candidate.key)
                lacking = sketch is not None and not entry.manifest.has_sketch(sketch)
                if lacking or self._catalog.condemned(entry):
                    continue
                match = Match(self._opened(entry), candidate.pages)
            except SegmentError as miss:
                misses.append(miss.reason)
                continue
            self._usage.bump(candidate.key, time.time())
            break
        if match is None and not misses:
            misses.append("absent")
        with self._lock:
            self._misses.update(misses)
        return match

    def report(
        self,
        key: str,
        reason: Reason,
        created: float,
        *,
        page: int | None = None,
        remove: bool = False,
    ) -> None:
        """Takes note of a fault that a reader of an open segment met; counted as a miss.

        What does not pass by itself (see `errors.DAMAGED`) condemns the segment and those that
        share the damaged folder: this process does not find them any more, and `put` of the same
        pages writes them anew. Other processes find out by themselves.

        Args:
          key: the segment's, as in its `SegmentInfo`.
          reason: of the `UnitError` or `SegmentError`, or "timeout".
          created: the segment's, as in its `SegmentInfo`: one written since is not meant.
          page: the segment's that could not be read; None counts all its folders as damaged.
          remove: whether what is condemned is removed, where it can be.
        """
        with self._lock:
            self._misses[reason] += 1
        damaged = self._catalog.condemn(key, created, page) if reason in DAMAGED else ()
        for other in damaged:
            with contextlib.suppress(SegmentError, StoreError):  # it may be gone already
                if remove:
                    self.remove(other)

    def open_segment(self, key: str) -> Segment:
        """Opens a segment by its key.

        Raises:
          ValueError: the key is not one.
          SegmentError: there is none, or it cannot be used; counted.
        """
        _check_key(key)
        try:
            return self._opened(self._catalog.get(key))
        except SegmentError as miss:
            with self._lock:
                self._misses[miss.reason] += 1
            raise

    def full_key(self, digits: str) -> str:
        """The key that starts with these digits, of a segment that may be damaged.

        Args:
          digits: the key, or enough of it to tell it from the others.

        Raises:
          UnknownKeyError: no key starts so, or several do.
          StoreError: manifests cannot be listed.
        """
        return self._catalog.full_key(digits)

    def segments(self) -> list[SegmentInfo]:
        """What is stored, most recently used first.

        Raises:
          StoreError: manifests cannot be listed.
        """
        self.refresh()
        infos = [self._info(entry) for entry in self._catalog.entries()]
        return sorted(infos, key=lambda info: (-info.last_used, info.key))

    def refresh(self) -> None:
        """Takes in what other processes stored and removed.

        Raises:
          StoreError: manifests cannot be listed.
        """
        news = self._catalog.refresh()
        with self._lock:
            self._misses.update(news)

    def remove(self, key: str) -> int:
        """Removes a segment, also a damaged one.

        Who has it open gets what it asks for, or `UnitError` with reason "absent".

        Returns:
          The bytes that this freed: not those of pages that other segments share, and 0 if its
          manifest is damaged (gc frees its data).

        Raises:
          ValueError: the key is not one, or the store is read-only.
          SegmentError: there is none.
          StoreError: it cannot be removed.
        """
        self._check_writable("remove")
        _check_key(key)
        try:
            entry = self._catalog.get(key)
        except SegmentError as miss:
            if miss.reason == "absent":
                raise
            entry = None
        self.refresh()  # others may have stored what shares its pages
        before = self._catalog.bytes_in_use()
        self._blobs.delete(manifest_name(key))
        self._catalog.forget(key)
        self._delete_data(key, entry)
        return max(before - self._catalog.bytes_in_use(), 0) if entry else 0

    def remove_shorter(self, key: str) -> list[SegmentInfo]:
        """Removes the segments that a segment is longer than and holds all of.

        These are of its identity, layout and dtype, it begins with their tokens, those after their
        last page included, and it has sketches of the same names. `find` gives it in their place.
        Their keys are gone.

        Args:
          key: of the segment that stays.

        Returns:
          What was removed: nothing if the segment is not there, or was reported damaged.

        Raises:
          ValueError: the key is not one, or the store is read-only.
          StoreError: the store cannot be listed, or something cannot be removed.
        """
        self._check_writable("remove_shorter")
        _check_key(key)
        self.refresh()
        removed = []
        for entry in self._catalog.covered(key):
            info = self._info(entry)
            try:
                self.remove(info.key)
            except SegmentError:
                continue  # another process was faster
            removed.append(info)
        return removed

    def verify(self, key: str | None = None) -> list[Finding]:
        """Reads everything of one segment, or of all, and compares checksums.

        Returns:
          What is damaged: nothing, if all is well.

        Raises:
          ValueError: the key is not one.
          StoreError: manifests cannot be listed.
        """
        if key is not None:
            _check_key(key)
        keys = [key] if key is not None else self._catalog.names()

        def opened(name: str) -> Segment:
            return self._opened(self._catalog.get(name))

        return [finding for name in keys for finding in verify(name, opened, self.timeout_s)]

    def gc(self, *, min_age_s: float = GC_AGE_S) -> Freed:
        """Removes data that no manifest names, and manifests that cannot be read any more.

        Manifests of another version, and what they name, are left alone; since that may be any
        data, none is removed while there is such a manifest, or one that cannot be read just now.

        Args:
          min_age_s: seconds since writing began before data counts as left behind. A writer that
            takes longer would lose what it wrote.

        Raises:
          ValueError: the store is read-only.
          StoreError: the store cannot be listed, or something cannot be removed.
        """
        self._check_writable("gc")
        with self._lock:
            in_use = self._folders_in_use()
        folders = self._blobs.folders("data/")
        self.refresh()
        known = set(self._catalog.damaged)
        freed = collect_garbage(self._blobs, self._catalog, folders, min_age_s, in_use)
        found = list(self._catalog.damaged.items())
        with self._lock:
            self._misses.update(now.miss.reason for key, now in found if key not in known)
        return freed

    def stats(self) -> StoreStats:
        """Sizes, ages and counts.

        Raises:
          StoreError: manifests cannot be listed.
        """
        infos = self.segments()
        now = time.time()
        with self._lock:
            return StoreStats(
                segments=len(infos),
                bytes=self._catalog.bytes_in_use(),
                sketch_bytes=sum(info.sketch_bytes for info in infos),
                max_bytes=self.max_bytes,
                hits=sum(info.hits for info in infos),
                oldest=max((now - info.created for info in infos), default=None),
                idle=max((now - info.last_used for info in infos), default=None),
                misses={reason: self._misses[reason] for reason in REASONS},
                evicted=self._evicted,
                lost_uses=self._usage.lost,
            )

    def flush(self) -> None:
        """Waits until hit counts are written, or known to be lost."""
        self._usage.flush()

    def _opened(self, entry: Entry) -> Segment:
        segment = Segment(self._blobs, entry.manifest, self._info(entry))
        with self._lock:
            if not self._catalog.knows(entry):
                raise SegmentError(entry.manifest.key, "absent", "it was removed just now")
            self._open.add(segment)
        return segment

    def _stored(
        self, key: str, arrays: dict[str, np.ndarray], after: Beginning | None
    ) -> SegmentInfo | dict[str, np.ndarray]:
        """A sound segment that has sketches of these names, or what one must have in its place.

        Raises:
          SegmentError: it is of another version.
          StoreError: the store fails, so that it is not known what is there.
        """
        kept: dict[str, np.ndarray] = {}
        try:
            entry = self._catalog.get(key)
            with self._opened(entry) as segment:
                condemned = self._catalog.condemned(entry)
                if arrays.keys() <= segment.sketch_names and not condemned:
                    return segment.info
                names = set(segment.sketch_names - (arrays.keys() if condemned else set()))
                if after is not None or len(segment.arrays) > 1:
                    names.discard(PAGE_PLACES)  # they are of other folders than those to come
                for name in names:
                    try:
                        kept[name] = segment.sketch(name)
                    except SegmentError as miss:
                        if not condemned:  # else it is to be written anew, whatever it had
                            self._count_damage(miss)
        except SegmentError as miss:
            self._count_damage(miss)
        return arrays | kept if kept else arrays

    def _count_damage(self, miss: SegmentError) -> None:
        """Counts what is damaged, which is written anew; raises what is not."""
        if miss.reason == "version":
            raise miss
        if miss.reason == "io":
            raise miss.__cause__ if isinstance(miss.__cause__, StoreError) else miss
        if miss.reason != "absent":
            with self._lock:
                self._misses[miss.reason] += 1

    def _info(self, entry: Entry) -> SegmentInfo:
        return info_of(entry, self._usage.get(entry.manifest.key))

    @contextlib.contextmanager
    def _room(self, wanted: int, key: str) -> Iterator[None]:
        """Evicts segments until `wanted` more bytes fit; they are reserved inside the `with`.

        Args:
          wanted: bytes.
          key: of the segment that is to be written; what is there of it is evicted last.
        """
        if self.max_bytes is not None:
            with self._eviction:
                self._evict(self.max_bytes, wanted, key)
        else:
            with self._lock:
                self._reserved += wanted
        try:
            yield
        finally:
            with self._lock:
                self._reserved -= wanted

    def _evict(self, max_bytes: int, wanted: int, key: str) -> None:
        self.refresh()
        if self._used() + wanted > max_bytes:
            self._drop_replaced(max_bytes - wanted)
        if self._used() + wanted > max_bytes:
            self._usage.load([entry.manifest.key for entry in self._catalog.entries()])
        with self._lock:
            pinned = {segment.info.key for segment in self._open if not segment.closed}
            entries = {entry.manifest.key: entry for entry in self._catalog.entries()}
            infos = [self._info(entry) for entry in entries.values()]
            room = max_bytes - self._reserved - self._left_bytes() - wanted
            used = self._catalog.bytes_in_use
            chosen = victims(infos, room, pinned, self._catalog.dispensable, key, used=used)
            for victim in chosen:  # at once, so that nobody opens one of them any more
                self._catalog.forget(victim)
            self._reserved += wanted
        try:
            for victim in chosen:
                if self._blobs.delete_if(manifest_name(victim), entries[victim].generation):
                    self._delete_data(victim, entries[victim])
                    self._evicted += 1
        except BaseException:
            with self._lock:
                self._reserved -= wanted
            raise

    def _used(self) -> int:
        """Bytes of what is stored, is being written, and is left of what was replaced."""
        with self._lock:
            return self._catalog.bytes_in_use() + self._reserved + self._left_bytes()

    def _left_bytes(self) -> int:
        """Bytes of what is left of replaced segments; locked."""
        left = self._replaced.items()
        return sum(size for folder, size in left if not self._catalog.needs(folder))

    def _folders_in_use(self) -> set[str]:
        """Folders that this process reads; locked."""
        return {x for segment in self._open if not segment.closed for x in segment.folders}

    def _drop_replaced(self, limit: int) -> None:
        """Removes what is left of replaced segments that are not open, while more is used."""
        with self._lock:
            in_use = self._folders_in_use()
            idle = [folder for folder in self._replaced if folder not in in_use]
        for folder in idle:
            if self._used() > limit and not self._catalog.needs(folder):
                self._blobs.delete_folder(f"data/{folder}/")
                with self._lock:
                    self._replaced.pop(folder, None)

    def _delete_data(self, key: str, entry: Entry | None) -> None:
        """Removes what belongs to a segment whose manifest is gone."""
        for folder in entry.manifest.folders if entry is not None else ():
            if not self._catalog.needs(folder):
                self._blobs.delete_folder(f"data/{folder}/")
        self._usage.forget(key)
        self._blobs.delete(f"use/{key}.json")

    def _check_size(self, size: int, key: str, label: str) -> None:
        if self.max_bytes is not None and size > self.max_bytes:
            raise SegmentTooLargeError(
                f"segment {key[:12]} {label!r} needs {size} bytes, max_bytes is {self.max_bytes}; "
                "store fewer pages, or open the store with a larger max_bytes"
            )

    def _check_writable(self, what: str) -> None:
        if self.read_only:
            raise ReadOnlyStoreError(
                f"{what} writes, and {self.url} was opened with read_only=True; open it without"
            )


def _check_key(key: str) -> None:
    if not _KEY.fullmatch(key):
        raise ValueError(f"key is {key!r}; a segment's key has 64 hexadecimal digits")
