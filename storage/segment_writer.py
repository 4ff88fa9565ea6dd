"""Writes a segment so that it is there whole or not at all."""

import dataclasses
import errno
import hashlib
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
from kvjax.storage.sketch_files import encode_sketches
from kvjax.storage.unit_array import description, open_array, write_shards
from kvjax.storage.unit_tags import folder_number


@dataclasses.dataclass(frozen=True, eq=False)
class Draft:
    """A segment that is ready to be written: all checked, its size known."""

    manifest: Manifest
    encoded: bytes  # the manifest's file
    zarr_json: bytes
    sketches: Mapping[str, bytes]
    keys: np.ndarray  # [L, N, H, P, D]
    values: np.ndarray

    @property
    def bytes(self) -> int:
        """All that it will occupy."""
        return self.manifest.data_bytes + len(self.encoded)


def draft(
    identity: Identity,
    tokens: Sequence[int] | np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    layout: Layout,
    sketches: Mapping[str, np.ndarray],
    label: str,
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
    layers, pages, heads, page_size, head_dim = keys.shape
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
    entries, sketch_bytes = encode_sketches(sketches)
    key = segment_key(identity, grid, ids)
    zarr_json = description(grid, key)
    now = time.time()
    manifest = Manifest(
        key=key,
        identity=identity,
        grid=grid,
        tokens=ids,
        label=label,
        folder=f"{key}.{int(now * 1000)}.{secrets.token_hex(4)}",
        created=now,
        data_bytes=grid.array_bytes + len(zarr_json) + sum(map(len, sketch_bytes.values())),
        array_sha256=hashlib.sha256(zarr_json).hexdigest(),
        sketches=entries,
    )
    return Draft(manifest, manifest.encode(), zarr_json, sketch_bytes, keys, values)


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
    manifest = segment.manifest
    prefix = f"data/{manifest.folder}/"
    publishing = leave = False
    try:
        blobs.write(prefix + "zarr.json", segment.zarr_json)
        array = open_array(blobs, prefix, segment.zarr_json)
        number = folder_number(manifest.folder)
        wait_s = blobs.time_for(manifest.grid.array_bytes // manifest.grid.shards)
        write_shards(array, manifest.grid, number, segment.keys, segment.values, wait_s)
        for name, data in segment.sketches.items():
            blobs.write(f"{prefix}sketches/{name}", data)
        publishing = True
        leave = blobs.write_if(manifest_name(manifest.key), segment.encoded, replaces)
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
