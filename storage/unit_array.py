"""A segment's keys and values as one zarr3 array: a shard a file, an inner chunk a unit.

The array's axes are [layer group, head group, page, kind, element of the unit]. Any zarr3 reader
that knows the sharding codec can open it; the attributes say what a unit's elements are. The last
ones of each are its tag (`kvjax.storage.unit_tags`). Codecs that TensorStore has stand between a
unit and its checksum; of a codec of ours (`kvjax.storage.unit_codec`) the elements are bytes.
"""

import collections
import contextlib
import itertools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorstore as ts

from kvjax.storage.blobs import STATUS_ERRORS, Blobs
from kvjax.storage.errors import fault, late
from kvjax.storage.layout import Grid, numpy_dtype
from kvjax.storage.unit_codec import UnitCodec
from kvjax.storage.unit_tags import split_tags, tags_of

_SHARDS_IN_FLIGHT = 2


def description(grid: Grid, codec: UnitCodec, key: str, beside: Mapping[str, str]) -> bytes:
    """The array's zarr.json, which names the segment it belongs to.

    Args:
      grid: the array's extents.
      codec: of its units.
      key: the segment's.
      beside: SHA-256 of files that belong to the array, by name.
    """
    layer_groups, head_groups, kinds, pages = grid.units
    elements = codec.elements(grid)
    first: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}
    last: dict[str, Any] = {"name": "crc32c"}
    sharding = {
        "chunk_shape": [1, 1, 1, 1, elements],
        "codecs": [first, *codec.chain(grid), last],
        "index_codecs": [first, last],
        "index_location": "end",
    }
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [layer_groups, head_groups, pages, kinds, elements],
        "data_type": codec.data_type(grid),
        "fill_value": 0,
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
            "page": "at the place that the array sketches/page-places says, if there is one",
            "tag": "the last 16 bytes: a number of the folder, and the unit's place in the array",
            **codec.attributes(),
            **({"sha256": dict(beside)} if beside else {}),
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
        opening = ts.open(spec, kvstore=blobs.kvstore / prefix, open=True)
        return opening.result(timeout=blobs.timeout_s)
    except STATUS_ERRORS as error:
        raise fault(error, f"opening the array in {blobs.url}{prefix}") from error


def write_shards(
    array: Any,
    grid: Grid,
    codec: UnitCodec,
    number: int,
    keys: np.ndarray,
    values: np.ndarray,
    timeout_s: float | None = None,
    page_places: np.ndarray | None = None,
) -> None:
    """Writes keys and values [L, N, H, P, D] of the folder with a number, a few shards at a time.

    Args:
      array: as `open_array` gives it.
      grid: the segment's extents.
      codec: of its units.
      number: of the folder, see `unit_tags`.
      keys: of all layers.
      values: of all layers.
      timeout_s: the longest wait for one shard; None waits for ever.
      page_places: int32 [layer groups, head groups, N], the place of each page in its shard; None
        keeps their own order.

    Raises:
      StoreError: a shard cannot be written, or not in time.
    """
    layer_groups, head_groups, kinds, pages = grid.units
    in_flight: collections.deque[tuple[Any, np.ndarray]] = collections.deque()
    dtype = numpy_dtype(codec.data_type(grid))
    size = codec.elements(grid) * dtype.itemsize
    plain = np.empty((pages, kinds, *grid.unit_shape), _bits(grid)) if codec.ours else None
    try:
        for layer_group, head_group in itertools.product(range(layer_groups), range(head_groups)):
            if len(in_flight) == _SHARDS_IN_FLIGHT:
                future, shard = in_flight.popleft()
                future.result(timeout=timeout_s)
                # Its memory serves again: fresh pages would cost a third more.
            else:
                shard = np.empty((pages, kinds, size), np.uint8)
            stored, tags = split_tags(shard)
            units = plain
            if units is None:
                units = stored.view(_bits(grid)).reshape(pages, kinds, *grid.unit_shape)
            at = None if page_places is None else page_places[layer_group, head_group]
            order = slice(None) if at is None else np.argsort(at)
            _fill(units, grid, keys, values, layer_group, head_group, order)
            if codec.ours:
                stored[:] = codec.encode(grid, units)
            first = (layer_group * head_groups + head_group) * pages * kinds
            tags[:] = tags_of(number, first + np.arange(pages * kinds).reshape(pages, kinds))
            writing = start_write(array, layer_group, head_group, shard.view(dtype))
            in_flight.append((writing, shard))
        while in_flight:
            in_flight.popleft()[0].result(timeout=timeout_s)
    except TimeoutError as error:
        raise late("writing units", timeout_s or 0.0) from error
    except STATUS_ERRORS as error:
        raise fault(error, "writing units") from error
    finally:
        for future, _ in in_flight:
            with contextlib.suppress(TimeoutError):
                # Its outcome does not matter any more, its end does.
                future.commit.exception(timeout=timeout_s)


def start_write(array: Any, layer_group: int, head_group: int, shard: np.ndarray) -> Any:
    """Starts to write one shard, which must not change until the future returned is done."""
    return array[layer_group, head_group].write(shard)


def places(grid: Grid, units: np.ndarray) -> np.ndarray:
    """Where units [n, 4] stand among all units in the order of the files: int64 [n]."""
    layer_group, head_group, kind, page = units.T.astype(np.int64)
    _, head_groups, kinds, pages = grid.units
    place: np.ndarray = ((layer_group * head_groups + head_group) * pages + page) * kinds + kind
    return place


def units_at(grid: Grid, where: np.ndarray) -> np.ndarray:
    """The units [n, 4] that stand at places [n]; undoes `places`."""
    layer_groups, head_groups, kinds, pages = grid.units
    split = np.unravel_index(where, (layer_groups, head_groups, pages, kinds))
    layer_group, head_group, page, kind = split
    return np.stack([layer_group, head_group, kind, page], axis=1)


def read_places(array: Any, grid: Grid, where: np.ndarray) -> Any:
    """Starts to read the units at places [n]; returns a future of an array [n, element].

    One read of many units costs a third of as many reads of one, and each file's index is read
    once for all of its units. TensorStore reads neighbours in a file with one call.
    """
    layer_groups, head_groups, kinds, pages = grid.units
    index = np.unravel_index(where, (layer_groups, head_groups, pages, kinds))
    return array.vindex[index].read()


def _fill(
    units: np.ndarray,
    grid: Grid,
    keys: np.ndarray,
    values: np.ndarray,
    layer_group: int,
    head_group: int,
    pages: slice | np.ndarray,
) -> None:
    """Gathers one shard's units [page, kind, layer, head, keys and values, token, channel]."""
    layers, heads = grid.layout.layers, grid.layout.heads
    block = (
        slice(layer_group * layers, (layer_group + 1) * layers),
        pages,
        slice(head_group * heads, (head_group + 1) * heads),
    )
    for which, source in enumerate((keys, values)):
        kind, place = (which, 0) if grid.layout.split_kv else (0, which)
        units[:, kind, :, :, place] = source[block].view(_bits(grid)).transpose(1, 0, 2, 3, 4)


def _bits(grid: Grid) -> np.dtype[Any]:
    """The stored dtype as plain bits: NumPy copies bfloat16 number by number."""
    return np.dtype(f"u{grid.numpy_dtype.itemsize}")
