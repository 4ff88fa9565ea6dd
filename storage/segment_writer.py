"""Writes a segment so that it is there whole or not at all."""

import dataclasses
import errno
import hashlib
import math
import secrets
import time
from collections.abc import Mapping, Sequence

import numpy as np

from kvjax.storage.blobs import Blobs
from kvjax.storage.catalog import manifest_name
from kvjax.storage.errors import StoreError
from kvjax.storage.keys import Identity, token_array
from kvjax.storage.layout import Grid, Layout
from kvjax.storage.manifest import FOLDER, Manifest, segment_key
from kvjax.storage.page_order import PAGE_PLACES, are_places
from kvjax.storage.segment import Segment
from kvjax.storage.sketch_files import encode_sketches
from kvjax.storage.stored_array import StoredArray
from kvjax.storage.unit_array import description, open_array, write_shards
from kvjax.storage.unit_codec import UnitCodec, fitted
from kvjax.storage.unit_sizes import UNIT_SIZES, UnitSizes, written_sizes
from kvjax.storage.unit_tags import folder_number


@dataclasses.dataclass(frozen=True, eq=False)
class Beginning:
    """The first pages of an open segment, which another one that begins with them shares."""

    segment: Segment
    pages: int

    @property
    def arrays(self) -> tuple[StoredArray, ...]:
        """Where these pages lie."""
        found: list[StoredArray] = []
        left = self.pages
        for array in self.segment.arrays:
            if left:
                found.append(dataclasses.replace(array, pages=min(array.pages, left)))
                left -= found[-1].pages
        return tuple(found)


@dataclasses.dataclass(frozen=True, eq=False)
class Draft:
    """A segment that is ready to be written: all checked, its size known."""

    manifest: Manifest
    codec: UnitCodec
    zarr_json: bytes
    sketches: Mapping[str, bytes]
    grid: Grid  # of the pages that are written
    keys: np.ndarray  # [L, n, H, P, D]
    values: np.ndarray
    places: np.ndarray | None  # of the pages in the files, see `page_order`

    @property
    def bytes(self) -> int:
        """All that it will occupy; the most where units differ in size."""
        return self.manifest.data_bytes + len(self.manifest.encode())


def draft(
    identity: Identity,
    tokens: Sequence[int] | np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    layout: Layout,
    sketches: Mapping[str, np.ndarray],
    label: str,
    after: Beginning | None = None,
    codec: str = "none",
) -> Draft:
    """Checks all arguments of `PageStore.put`, before anything is written.

    Raises:
      ValueError: names the argument, what it was, and what to give.
    """
    keys, values = np.asarray(keys), np.asarray(values)
    if keys.ndim != 5:
        raise ValueError(f"k has shape {keys.shape}; give [layers, pages, KV heads, tokens, dim]")
    if values.shape != keys.shape or values.dtype != keys.dtype:
        raise ValueError(
            f"v is {values.dtype} {values.shape}, k is {keys.dtype} {keys.shape}; they must agree"
        )
    layers, own_pages, heads, page_size, head_dim = keys.shape
    pages = own_pages + (0 if after is None else after.pages)
    if page_size != layout.page_size:
        raise ValueError(
            f"k has pages of {page_size} tokens, Layout.page_size is {layout.page_size}; make them "
            "the same"
        )
    ids = token_array(tokens)
    if len(ids) // layout.page_size != pages:
        raise ValueError(
            f"{len(ids)} tokens for {pages} pages of {page_size}; give the {pages * page_size} "
            "tokens of the full pages, and fewer than a page after them"
        )
    grid = Grid(layout, layers, pages, heads, head_dim, str(keys.dtype))
    own = dataclasses.replace(grid, pages=own_pages)
    shared: tuple[StoredArray, ...] = ()
    if after is not None:
        _check_goes_on(after, identity, ids, grid)
        shared = after.arrays
        sketches = _with_places(sketches, after, own)
    places = sketches.get(PAGE_PLACES)
    whole = (*shared, StoredArray("", own_pages, own_pages, 0, ""))
    if places is not None and not are_places(places, grid, whole):
        layer_groups, head_groups, _, _ = grid.units
        raise ValueError(
            f"sketches[{PAGE_PLACES!r}] is {places.dtype} {list(places.shape)}; give int32 "
            f"{[layer_groups, head_groups, pages]} that gives every page of a group another place, "
            "as near_together does"
        )
    entries, sketch_bytes = encode_sketches(sketches)
    key = segment_key(identity, grid, ids)
    unit_codec = fitted(codec, own, keys, values)
    now = time.time()
    manifest = Manifest(
        key=key,
        identity=identity,
        grid=grid,
        tokens=ids,
        label=label,
        folder=f"{key}.{int(now * 1000)}.{secrets.token_hex(4)}",
        created=now,
        data_bytes=0,
        array_sha256="",
        sketches=entries,
        shared=shared,
        codec=unit_codec.name,
    )
    sizes = None
    if unit_codec.varies:  # it is not known yet by how much they are smaller
        most = unit_codec.stored_unit_bytes(own)
        sizes = np.full(math.prod(own.units), most, np.uint32)
    manifest, zarr_json = _described(manifest, own, unit_codec, sizes)
    if places is not None:
        places = places[:, :, pages - own_pages :]
    return Draft(manifest, unit_codec, zarr_json, sketch_bytes, own, keys, values, places)


def _described(
    manifest: Manifest, grid: Grid, codec: UnitCodec, sizes: np.ndarray | None
) -> tuple[Manifest, bytes]:
    """A manifest with what it says of its array, and the array's description.

    Args:
      manifest: without.
      grid: of the pages that are written.
      codec: of their units.
      sizes: uint32, bytes of each where they differ.
    """
    beside = {} if sizes is None else {UNIT_SIZES: _sha256(sizes.tobytes())}
    zarr_json = description(grid, codec, manifest.key, beside)
    size = UnitSizes(grid, codec, sizes).array_bytes + len(zarr_json)
    size += sum(entry.bytes for entry in manifest.sketches)
    size += 0 if sizes is None else sizes.nbytes
    digest = _sha256(zarr_json)
    return dataclasses.replace(manifest, data_bytes=size, array_sha256=digest), zarr_json


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _check_goes_on(after: Beginning, identity: Identity, ids: np.ndarray, grid: Grid) -> None:
    """Refuses pages that do not go on what they are said to.

    Raises:
      ValueError: they do not.
    """
    info, size = after.segment.info, grid.layout.page_size
    same = dataclasses.replace(after.segment.grid, pages=grid.pages)
    if not 1 <= after.pages <= after.segment.grid.pages:
        raise ValueError(f"after has {after.pages} pages of {after.segment.grid.pages}; give 1 up")
    if info.identity != identity or same != grid:
        raise ValueError(
            f"after is segment {info.key[:12]} of another identity, layout, shape or dtype; give "
            "what find gives for these tokens and this layout"
        )
    count = after.pages * size
    if not np.array_equal(after.segment.tokens[:count], ids[:count]):
        raise ValueError(
            f"tokens do not begin with the {count} of segment {info.key[:12]}; give what find "
            "gives for them"
        )


def _with_places(
    sketches: Mapping[str, np.ndarray], after: Beginning, own: Grid
) -> Mapping[str, np.ndarray]:
    """Sketches with the places of all pages, where those given are of the own ones only."""
    mine, theirs = sketches.get(PAGE_PLACES), after.segment.page_places
    if mine is None and theirs is None:
        return sketches
    pages = own.pages
    if theirs is None:
        theirs = _in_order(own, *(array.pages for array in after.arrays))
    if mine is None:
        mine = _in_order(own, pages)
    return {**sketches, PAGE_PLACES: np.concatenate([theirs[:, :, : after.pages], mine], 2)}


def _in_order(grid: Grid, *pages: int) -> np.ndarray:
    """Places of pages that lie in their own order in folders of so many."""
    layer_groups, head_groups, _, _ = grid.units
    there = np.concatenate([np.arange(count, dtype=np.int32) for count in pages])
    return np.broadcast_to(there, (layer_groups, head_groups, len(there)))


def folder_age(folder: str) -> float | None:
    """Seconds since a folder under data/ was begun, by its name; None if it is no such name."""
    found = FOLDER.fullmatch(folder)
    return time.time() - int(found["begun"]) / 1000 if found else None


def write_segment(blobs: Blobs, segment: Draft, replaces: bytes | None) -> bool:
    """Writes a segment's data and then, in one step, its manifest.

    Args:
      blobs: the store.
      segment: what to write.
      replaces: the generation of the manifest to write over; None if there is none.

    Returns:
      True; False if another writer has published the same segment meanwhile. Then nothing is left
      of this one.

    Raises:
      StoreError: it cannot be written. What was written is removed, or left for gc.
    """
    manifest, grid, codec = segment.manifest, segment.grid, segment.codec
    prefix = f"data/{manifest.folder}/"
    publishing = leave = False
    try:
        blobs.write(prefix + "zarr.json", segment.zarr_json)
        write_shards(
            open_array(blobs, prefix, segment.zarr_json),
            grid,
            codec,
            folder_number(manifest.folder),
            segment.keys,
            segment.values,
            blobs.time_for(manifest.data_bytes // grid.shards),
            segment.places,
        )
        if codec.varies:
            sizes = written_sizes(blobs, prefix, grid)
            blobs.write(prefix + UNIT_SIZES, sizes.tobytes())
            manifest, zarr_json = _described(manifest, grid, codec, sizes)
            blobs.write(prefix + "zarr.json", zarr_json)
        for name, data in segment.sketches.items():
            blobs.write(f"{prefix}sketches/{name}", data)
        publishing = True
        leave = blobs.write_if(manifest_name(manifest.key), manifest.encode(), replaces)
        return leave
    except StoreError as error:
        # Late is not never: it may be published still. If it is not, gc takes it.
        leave = publishing and error.errno == errno.ETIMEDOUT
        raise
    finally:
        if not leave:
            _remove_unpublished(blobs, prefix)


def _remove_unpublished(blobs: Blobs, prefix: str) -> None:
    try:
        blobs.delete_folder(prefix)
    except StoreError:
        return  # nobody sees it; gc tries again
