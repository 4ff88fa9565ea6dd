"""Finding damage in a store, and removing what nothing leads to."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable

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


def verify(key: str, open_segment: Callable[[str], Segment]) -> list[Finding]:
    """Reads all of a segment; returns what is damaged, at most one finding for each shard.

    Args:
      key: the segment's.
      open_segment: opens it, or raises SegmentError.
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
        errors = _unit_errors(segment.read(np.array(list(rows), np.int32)))
        if errors:
            part = f"units of layer group {layer_group}, head group {head_group}"
            detail = f"{len(errors)} of {kinds * pages} units; the first: {errors[0]}"
            findings.append(Finding(key, part, errors[0].reason, detail))
    return findings


def _unit_errors(reads: Iterable[UnitRead]) -> list[UnitError]:
    errors = []
    for read in reads:
        try:
            read.result()
        except UnitError as error:
            errors.append(error)
    return errors


def collect_garbage(blobs: Blobs, catalog: Catalog, min_age_s: float) -> Freed:
    """Removes unpublished data of some age, damaged manifests, and counts of what is gone.

    Args:
      blobs: the store.
      catalog: its manifests, just refreshed.
      min_age_s: seconds since writing began before data counts as left behind.

    Raises:
      StoreError: the store cannot be listed, or something cannot be removed.
    """
    segments = freed = 0
    for key, miss in list(catalog.damaged.items()):
        if miss.reason in ("torn", "checksum"):
            blobs.delete(manifest_name(key))
            catalog.forget(key)
            segments += 1
    named = {entry.manifest.folder for entry in catalog.index.entries.values()}
    for folder in blobs.folders("data/"):
        age = folder_age(folder)
        unknown = folder.partition(".")[0] in catalog.damaged  # named by what cannot be read here
        if folder in named or unknown or age is None or age < min_age_s:
            continue
        freed += blobs.size(f"data/{folder}/") or 0
        blobs.delete_folder(f"data/{folder}/")
        segments += 1
    freed += sum(blobs.remove_stale_locks(place, min_age_s) for place in ("", "segments/", "use/"))
    known = catalog.index.entries.keys() | catalog.damaged.keys()
    for name in blobs.names("use/"):
        if name.removeprefix("use/").removesuffix(".json") not in known:
            blobs.delete(name)
    return Freed(segments, freed)
