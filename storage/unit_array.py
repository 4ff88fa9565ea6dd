"""A segment's keys and values as one zarr3 array: a shard a file, an inner chunk a unit.

The array's axes are [layer group, head group, page, kind, element of the unit]. Any zarr3 reader
that knows the sharding codec can open it; the attributes say what a unit's elements are.
"""

import collections
import json
from typing import Any

import numpy as np
import tensorstore as ts

from kvjax.storage.blobs import STATUS_ERRORS, Blobs
from kvjax.storage.errors import fault
from kvjax.storage.layout import Grid

_SHARDS_IN_FLIGHT = 8
# TensorStore reads over gaps in a file up to this long rather than reading twice.
_BRIDGED_GAP = 4095


def description(grid: Grid, key: str) -> bytes:
    """The array's zarr.json, which names the segment it belongs to."""
    layer_groups, head_groups, kinds, pages = grid.units
    elements = grid.unit_bytes // grid.numpy_dtype.itemsize
    codecs = [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {"name": "crc32c"},
    ]
    sharding = {
        "chunk_shape": [1, 1, 1, 1, elements],
        "codecs": codecs,
        "index_codecs": codecs,
        "index_location": "end",
    }
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [layer_groups, head_groups, pages, kinds, elements],
        "data_type": grid.dtype,
        "fill_value": 0.0,
        "dimension_names": ["layer group", "head group", "page", "kind", "element"],
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [1, 1, pages, kinds, elements]},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": {
            "segment": key,
            "unit_axes": ["layer", "head", "keys and values", "token", "channel"],
            "unit_shape": list(grid.unit_shape),
        },
    }
    return json.dumps(metadata, indent=1).encode("ascii")


def open_array(blobs: Blobs, prefix: str, zarr_json: bytes) -> Any:
    """TensorStore's handle on the array under `prefix`, described by `zarr_json`; reads nothing.

    A unit that is not there is an error, never zeros.

    Raises:
      StoreError: TensorStore does not accept the description.
    """
    spec = {
        "driver": "zarr3",
        "metadata": json.loads(zarr_json),
        "assume_metadata": True,
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
        "recheck_cached_data": False,
    }
    try:
        return ts.open(spec, kvstore=blobs.kvstore / prefix, open=True).result()
    except STATUS_ERRORS as error:
        raise fault(error, f"opening the array in {blobs.url}{prefix}") from error


def write_shards(array: Any, grid: Grid, keys: np.ndarray, values: np.ndarray) -> None:
    """Writes keys and values [L, N, H, P, D], a few shards at a time.

    Raises:
      StoreError: a shard cannot be written.
    """
    layer_groups, head_groups, _, _ = grid.units
    in_flight: collections.deque[Any] = collections.deque()
    try:
        for layer_group in range(layer_groups):
            for head_group in range(head_groups):
                shard = _shard(grid, keys, values, layer_group, head_group)
                if len(in_flight) == _SHARDS_IN_FLIGHT:
                    in_flight.popleft().result()
                in_flight.append(start_write(array, layer_group, head_group, shard))
        while in_flight:
            in_flight.popleft().result()
    except STATUS_ERRORS as error:
        raise fault(error, "writing units") from error
    finally:
        for future in in_flight:
            settle(future)


def start_write(array: Any, layer_group: int, head_group: int, shard: np.ndarray) -> Any:
    """Starts to write one shard; `shard` must not change any more."""
    part = array[layer_group, head_group]
    return part.write(shard, can_reference_source_data_indefinitely=True)


def settle(future: Any) -> None:
    """Waits for a write whose outcome does not matter any more."""
    future.commit.exception()


def read_units(array: Any, grid: Grid, units: np.ndarray) -> Any:
    """Starts to read units [n, 4] (layer group, head group, kind, page).

    Returns:
      A future of an array [n, element of the unit].
    """
    layer_group, head_group, kind, page = units.T.astype(np.int64)
    return array.vindex[layer_group, head_group, page, kind].read()


def bytes_of_read(grid: Grid, units: np.ndarray, bridged: bool) -> tuple[int, int]:
    """What TensorStore reads from files for one read of distinct units: (payload, index) bytes.

    The index of each shard that is touched is read once, whole. Units are read with their
    checksums.

    Args:
      grid: the segment's extents.
      units: [n, 4], no two equal.
      bridged: whether short gaps between units are read too, as in files of this machine.
    """
    _, head_groups, kinds, _ = grid.units
    layer_group, head_group, kind, page = units.T.astype(np.int64)
    shard = layer_group * head_groups + head_group
    place = page * kinds + kind
    order = np.lexsort((place, shard))
    shard, place = shard[order], place[order]
    payload = len(units) * grid.stored_unit_bytes
    if bridged:
        gaps = (np.diff(place) - 1) * grid.stored_unit_bytes
        payload += int(gaps[(np.diff(shard) == 0) & (gaps <= _BRIDGED_GAP)].sum())
    return payload, len(np.unique(shard)) * grid.index_bytes


def _shard(
    grid: Grid, keys: np.ndarray, values: np.ndarray, layer_group: int, head_group: int
) -> np.ndarray:
    """The units of one shard [page, kind, element]."""
    layers, heads = grid.layout.layers, grid.layout.heads
    block = (
        slice(layer_group * layers, (layer_group + 1) * layers),
        slice(None),
        slice(head_group * heads, (head_group + 1) * heads),
    )
    kinds = grid.units[2]
    shard = np.empty((grid.pages, kinds, *grid.unit_shape), grid.numpy_dtype)
    for which, source in enumerate((keys, values)):
        kind, place = (which, 0) if kinds == 2 else (0, which)
        shard[:, kind, :, :, place] = source[block].transpose(1, 0, 2, 3, 4)
    return shard.reshape(grid.pages, kinds, -1)
