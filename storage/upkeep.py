"""Finding damage in a store, and removing what nothing leads to."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvjax.storage.blobs import Blobs
from kvjax.storage.catalog import Catalog, manifest_name
from kvjax.storage.errors import Reason, SegmentError, UnitError
from kvjax.storage.segment import Segment
from kvjax.storage.segment_writer import folder_age
from kvjax.storage.unit_read import UnitRead


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that is damaged."""

    key: str  # of the segment
    part: str  # manifest, sketches, or a group of units
    reason: Reason
    detail: str


@dataclasses.dataclass(frozen=True)
class Freed:
    """What was removed."""

    segments: int = 0  # unpublished data, or damaged manifests
    bytes: int = 0  # on file systems; other stores do not say


def verify(key: str, open_segment: Callable[[str], Segment], timeout_s: float) -> list[Finding]:
    """Reads all of a segment; returns what is damaged, at most one finding for each shard.

    Args:
      key: the segment's.
      open_segment: opens it, or raises SegmentError.
      timeout_s: the longest wait for one shard, in seconds.
    """
    try:
        segment = open_segment(key)
    except SegmentError as miss:
        return [Finding(key, "manifest", miss.reason, str(miss))]
    findings = []
    try:
        segment.sketches()
    except SegmentError as miss:
        findings.append(Finding(key, "sketches", miss.reason, str(miss)))
    layer_groups, head_groups, kinds, pages = segment.grid.units
    for layer_group, head_group in itertools.product(range(layer_groups), range(head_groups)):
        rows = itertools.product([layer_group], [head_group], range(kinds), range(pages))
        errors = _unit_errors(segment.read(np.array(list(rows), np.int32)), timeout_s)
        if errors:
            part = f"units of layer group {layer_group}, head group {head_group}"
            detail = f"{len(errors)} of {kinds * pages} units; the first: {errors[0]}"
            findings.append(Finding(key, part, errors[0].reason, detail))
    return findings


def _unit_errors(reads: Iterable[UnitRead], timeout_s: float) -> list[UnitError]:
    errors = []
    deadline = time.monotonic() + timeout_s
    for read in reads:
        try:
            read.result(timeout=max(0.0, deadline - time.monotonic()))
        except UnitError as error:
            errors.append(error)
        except TimeoutError:
            errors.append(read.late(timeout_s))
    return errors


def collect_garbage(
    blobs: Blobs,
    catalog: Catalog,
    folders: Sequence[str],
    min_age_s: float,
    in_use: set[str],
) -> Freed:
    """Removes unpublished data of some age, damaged manifests, and counts of what is gone.

    Data of a segment that was replaced counts as left behind since writing its successor began.

    Args:
      blobs: the store.
      catalog: its manifests, refreshed since the folders were listed.
      folders: those under data/. What is published later is not among them.
      min_age_s: seconds since writing began before data counts as left behind.
      in_use: folders that this process reads.

    Raises:
      StoreError: the store cannot be listed, or something cannot be removed.
    """
    segments = freed = 0
    for key, damage in list(catalog.damaged.items()):
        if damage.miss.reason not in ("torn", "checksum"):
            continue
        if blobs.delete_if(manifest_name(key), damage.generation):  # or it was repaired meanwhile
            catalog.forget(key)
            segments += 1
    named = _named_now(catalog)
    kept = set(folders) if named is None else in_use | named
    for folder in folders:
        if folder not in kept and _left_behind(folder, catalog, min_age_s):
            freed += blobs.size(f"data/{folder}/") or 0
            blobs.delete_folder(f"data/{folder}/")
            segments += 1
    freed += sum(blobs.remove_stale_locks(place, min_age_s) for place in ("", "segments/", "use/"))
    known = set(catalog.names())
    for name in blobs.names("use/"):
        if name.removeprefix("use/").removesuffix(".json") not in known:
            blobs.delete(name)
    return Freed(segments, freed)


def _named_now(catalog: Catalog) -> set[str] | None:
    """Folders that manifests lead to, read anew: what is known of them may be old.

    None if that cannot be told of one, which may share the pages of any: a device that fails, or
    another version.
    """
    found: set[str] = set()
    for key in catalog.names():
        try:
            found.update(catalog.get(key).manifest.folders)
        except SegmentError as miss:
            if miss.reason in ("io", "version"):
                return None
    return found


def _left_behind(folder: str, catalog: Catalog, min_age_s: float) -> bool:
    """Whether no manifest leads to a folder under data/, and nobody can be writing it."""
    age = folder_age(folder)
    if age is None or age < min_age_s:
        return False
    try:
        current = catalog.get(folder.partition(".")[0]).manifest.folder
    except SegmentError as miss:
        return miss.reason == "absent"  # else what its manifest leads to cannot be told
    return folder != current and (folder_age(current) or 0.0) >= min_age_s
