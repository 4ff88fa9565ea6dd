"""Prefixes on disk or in any store with a URL: written once, found by tokens, read in units.

    store.json               says that this is a page store, and of which version
    data/KEY.TIME.NONCE/     a segment's units (zarr3, sharded), their description, its sketches
    segments/KEY.json        its manifest, written last and in one step: from then on it exists
    use/KEY.json             how often it was found, and when

Data that no manifest names is left by a writer that was stopped; `gc` removes it. Any number of
processes may read and write one store at the same time.
"""

import collections
import dataclasses
import os
import re
import threading
import time
import weakref
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Shaped

from kvjax.storage.blobs import Blobs
from kvjax.storage.catalog import Catalog, manifest_name
from kvjax.storage.errors import (
    REASONS,
    ReadOnlyStoreError,
    Reason,
    SegmentError,
    SegmentTooLargeError,
    UnknownKeyError,
)
from kvjax.storage.eviction import victims
from kvjax.storage.keys import Identity, token_array
from kvjax.storage.layout import Layout
from kvjax.storage.marker import check_marker
from kvjax.storage.prefix_index import Entry
from kvjax.storage.segment import Segment, SegmentInfo
from kvjax.storage.segment_writer import draft, write_segment
from kvjax.storage.store_stats import StoreStats
from kvjax.storage.upkeep import Finding, Freed, collect_garbage, verify
from kvjax.storage.usage import UsageLog

_KEY = re.compile(r"[0-9a-f]{64}")
GC_AGE_S = 3600.0
"""Unpublished data younger than this may still be written by somebody."""


@dataclasses.dataclass(frozen=True)
class Match:
    """What a prompt has in the store."""

    segment: Segment
    pages: int  # how many of the prompt's first pages the segment holds

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

    Threads may share one.
    """

    def __init__(self, blobs: Blobs, max_bytes: int | None, read_only: bool) -> None:
        """Use `PageStore.open`."""
        self.url = blobs.url
        self.max_bytes = max_bytes
        self.read_only = read_only
        self._blobs = blobs
        self._usage = UsageLog(blobs, read_only)
        self._catalog = Catalog(blobs, self._usage)
        self._misses: collections.Counter[Reason] = collections.Counter()
        self._evicted = 0
        self._reserved = 0  # bytes of segments that are being written
        self._open: weakref.WeakSet[Segment] = weakref.WeakSet()
        self._lock = threading.RLock()

    @classmethod
    def open(
        cls,
        url: str | os.PathLike[str],
        *,
        max_bytes: int | None = None,
        read_only: bool = False,
    ) -> "PageStore":
        """Opens a store, or makes one where there is nothing.

        Args:
          url: a folder, or a URL that TensorStore has a key-value store for.
          max_bytes: the most that all segments may occupy; None sets no limit. A store that holds
            more evicts segments now, and removes what stopped writers left.
          read_only: never write, not even hit counts.

        Raises:
          NotAStoreError: the URL holds something else or another version, or, with
            read_only=True, nothing.
          StoreError: it cannot be read or made.
          ValueError: max_bytes is below 1.
        """
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes is {max_bytes}; give a number of bytes, or None")
        blobs = Blobs(url)
        check_marker(blobs, read_only)
        store = cls(blobs, max_bytes, read_only)
        store.refresh()
        if max_bytes is not None and not read_only:
            store.gc()
            with store._lock:
                store._make_room(0, "")
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
    ) -> SegmentInfo:
        """Stores the full pages of a prompt; returns when they are on the device.

        A segment that is stored already is not written again: pages never change.

        Args:
          identity: what keys and values depend on besides the tokens.
          tokens: the N * P token ids of the pages.
          k: keys of all layers, bfloat16, float16 or float32.
          v: values, of the same shape and dtype.
          layout: what one read will bring.
          sketches: small arrays to keep with the pages, by name.
          label: for people: a model or a file.

        Returns:
          What is stored now.

        Raises:
          ValueError: an argument is wrong, or the store is read-only.
          SegmentTooLargeError: the segment alone is larger than max_bytes.
          StoreFullError: what would have to be evicted is open.
          StoreError: it cannot be written; `errno` says why, as ENOSPC. Nothing was published.
        """
        self._check_writable("put")
        new = draft(identity, tokens, k, v, layout, sketches or {}, label)
        key = new.manifest.key
        with self._lock:
            replaces = None
            try:
                return self._open_segment(key).info
            except SegmentError as miss:
                if miss.reason == "version":
                    raise
                if miss.reason != "absent":
                    self._misses[miss.reason] += 1
                    replaces = self._blobs.read(manifest_name(key)).generation
            self._check_size(new.bytes, key, label)
            self._make_room(new.bytes, key)
            self._reserved += new.bytes
        try:
            write_segment(self._blobs, new, replaces)
        finally:
            with self._lock:
                self._reserved -= new.bytes
        with self._lock:
            return self._info(self._catalog.get(key))

    def find(
        self,
        identity: Identity,
        tokens: Sequence[int] | np.ndarray,
        page_size: int = 16,
        *,
        layout: Layout | None = None,
    ) -> Match | None:
        """The segment that holds the most of a prompt's first full pages.

        The segment's identity and tokens are compared with what is asked for, whatever the keys
        say. One that turns out damaged is counted as a miss, and the next best is taken.

        Args:
          identity: what keys and values depend on besides the tokens.
          tokens: the prompt's token ids.
          page_size: tokens in a page.
          layout: only segments of this layout, whose page size counts then; None takes any.

        Returns:
          The segment, open, and how many pages it shares with the prompt; None if that is none.

        Raises:
          ValueError: tokens or page size are out of range.
          StoreError: manifests cannot be listed.
        """
        ids = token_array(tokens)
        size = page_size if layout is None else layout.page_size
        with self._lock:
            found, rejected = self._catalog.index.candidates(identity, ids, size, layout)
            if not found or found[0].pages < len(ids) // size:
                self.refresh()
                found, rejected = self._catalog.index.candidates(identity, ids, size, layout)
            self._misses.update(rejected)
            for candidate in found:
                try:
                    segment = self._open_segment(candidate.key)
                except SegmentError as miss:
                    self._misses[miss.reason] += 1
                    continue
                self._usage.bump(candidate.key, time.time())
                return Match(segment, candidate.pages)
            if not found and not rejected:
                self._misses["absent"] += 1
            return None

    def open_segment(self, key: str) -> Segment:
        """Opens a segment by its key.

        Raises:
          ValueError: the key is not one.
          SegmentError: there is none, or it cannot be used; counted.
        """
        _check_key(key)
        with self._lock:
            try:
                return self._open_segment(key)
            except SegmentError as miss:
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
        keys = [key for key in self._catalog.names() if digits and key.startswith(digits)]
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

    def segments(self) -> list[SegmentInfo]:
        """What is stored, most recently used first.

        Raises:
          StoreError: manifests cannot be listed.
        """
        with self._lock:
            self.refresh()
            infos = [self._info(entry) for entry in self._catalog.index.entries.values()]
        return sorted(infos, key=lambda info: (-info.last_used, info.key))

    def refresh(self) -> None:
        """Takes in what other processes stored and removed.

        Raises:
          StoreError: manifests cannot be listed.
        """
        with self._lock:
            self._misses.update(self._catalog.refresh())

    def remove(self, key: str) -> int:
        """Removes a segment, also a damaged one.

        Who has it open gets what it asks for, or `UnitError` with reason "absent".

        Returns:
          The bytes that it occupied, 0 if its manifest is damaged (gc frees its data).

        Raises:
          ValueError: the key is not one, or the store is read-only.
          SegmentError: there is none.
          StoreError: it cannot be removed.
        """
        self._check_writable("remove")
        _check_key(key)
        with self._lock:
            try:
                entry = self._catalog.get(key)
            except SegmentError as miss:
                if miss.reason == "absent":
                    raise
                entry = None
            self._remove(key, entry)
            return entry.bytes if entry else 0

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
        return [finding for name in keys for finding in verify(name, self._open_locked)]

    def gc(self, *, min_age_s: float = GC_AGE_S) -> Freed:
        """Removes data that no manifest names, and manifests that cannot be read any more.

        Manifests of another version, and what they name, are left alone.

        Args:
          min_age_s: seconds since writing began before data counts as left behind. A writer that
            takes longer would lose what it wrote.

        Raises:
          ValueError: the store is read-only.
          StoreError: the store cannot be listed, or something cannot be removed.
        """
        self._check_writable("gc")
        with self._lock:
            self.refresh()
            return collect_garbage(self._blobs, self._catalog, min_age_s)

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
                bytes=sum(info.bytes for info in infos),
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
        with self._lock:
            self._usage.flush()

    def _open_locked(self, key: str) -> Segment:
        with self._lock:
            return self._open_segment(key)

    def _open_segment(self, key: str) -> Segment:
        entry = self._catalog.get(key)
        segment = Segment(self._blobs, entry.manifest, self._info(entry))
        self._open.add(segment)
        return segment

    def _info(self, entry: Entry) -> SegmentInfo:
        manifest, grid = entry.manifest, entry.manifest.grid
        use = self._usage.get(manifest.key)
        return SegmentInfo(
            key=manifest.key,
            identity=manifest.identity,
            label=manifest.label,
            layout=grid.layout,
            dtype=grid.dtype,
            shape=(grid.layers, grid.pages, grid.heads, grid.layout.page_size, grid.head_dim),
            tokens=len(manifest.tokens),
            bytes=entry.bytes,
            sketch_bytes=sum(sketch.bytes for sketch in manifest.sketches),
            created=manifest.created,
            last_used=max(manifest.created, use.last_used),
            hits=use.hits,
        )

    def _make_room(self, wanted: int, key: str) -> None:
        """Evicts segments until `wanted` more bytes fit for the segment `key`."""
        if self.max_bytes is None:
            return
        self.refresh()
        pinned = {segment.info.key for segment in self._open if not segment.closed} | {key}
        infos = [self._info(entry) for entry in self._catalog.index.entries.values()]
        room = self.max_bytes - self._reserved - wanted
        for victim in victims(infos, room, pinned, self._catalog.index.covered):
            self._remove(victim, self._catalog.index.entries[victim])
            self._evicted += 1

    def _remove(self, key: str, entry: Entry | None) -> None:
        self._blobs.delete(manifest_name(key))
        self._catalog.forget(key)
        if entry is not None:
            self._blobs.delete_folder(f"data/{entry.manifest.folder}/")
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
