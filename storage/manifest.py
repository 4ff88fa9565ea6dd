"""The one small file that makes a segment exist, and says all about it.

A segment's data is written first, under a name that nobody looks for. Then its manifest is written
in one atomic step, and the segment is there. The manifest repeats everything that the segment's
key was made from, with a checksum over itself, so that a manifest that was damaged, renamed or
written by something else is noticed when it is read.
"""

import base64
import dataclasses
import hashlib
import itertools
import json
import math
import re
from typing import Any

import numpy as np

from kvjax.storage.errors import SegmentError
from kvjax.storage.keys import Identity, prompt_key, token_array
from kvjax.storage.layout import Grid, Layout, numpy_dtype
from kvjax.storage.stored_array import StoredArray
from kvjax.storage.unit_codec import CODECS

MAGIC = "kvjax prefix segment"
VERSION = 5
READABLE = (2, 3, 4, 5)
"""Versions that are read. In 2 no tokens followed the last full page, until 4 all pages were
in their own order (`page_order`) and in one folder, until 5 no units were encoded (`unit_codec`).
"""

FOLDER = re.compile(r"(?P<key>[0-9a-f]{64})\.(?P<begun>[0-9]{1,15})\.[0-9a-f]{8}")
"""A folder of data: the segment's key, when writing began in ms since 1970, and a random number."""

SKETCH_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class SketchEntry:
    """One small array that stands in for the keys when pages are chosen, kept as plain bytes."""

    name: str
    dtype: str  # TensorStore's name, such as "uint8" or "float8_e4m3fn"
    shape: tuple[int, ...]
    bytes: int
    sha256: str  # of the bytes: little endian, C order


@dataclasses.dataclass(frozen=True, eq=False)
class Manifest:
    """Everything about a stored segment but its keys and values."""

    key: str  # of the tokens, in the namespace of layout and dtype
    identity: Identity
    grid: Grid
    tokens: np.ndarray  # int32, those of the pages, then fewer than a page more; read-only
    label: str  # for people: a model or a file
    folder: str  # where the data is, under data/, but for the pages that it shares
    created: float  # seconds since 1970
    data_bytes: int  # of the units, their index and description, and the sketches
    array_sha256: str  # of zarr.json
    sketches: tuple[SketchEntry, ...]
    shared: tuple[StoredArray, ...] = ()  # the first pages, where they lie in other folders
    codec: str = "none"  # of the units in its own folder

    @property
    def arrays(self) -> tuple[StoredArray, ...]:
        """Where its pages lie, the first first; the last folder is its own."""
        own = self.grid.pages - sum(array.pages for array in self.shared)
        mine = StoredArray(self.folder, own, own, self.data_bytes, self.array_sha256)
        return (*self.shared, mine)

    @property
    def folders(self) -> dict[str, int]:
        """Bytes of every folder that it needs, by name."""
        return {array.folder: array.data_bytes for array in self.arrays}

    def folder_of(self, page: int) -> str:
        """Where one of its pages lies.

        Args:
          page: 0 to N - 1.
        """
        ends = itertools.accumulate(array.pages for array in self.arrays)
        return next(x.folder for x, end in zip(self.arrays, ends, strict=True) if page < end)

    @property
    def sketch_names(self) -> frozenset[str]:
        """Names of the arrays that are kept with the pages."""
        return frozenset(entry.name for entry in self.sketches)

    def has_sketch(self, group: str) -> bool:
        """Whether there are arrays named GROUP.PART, where PART has no dot."""
        return any(name.rpartition(".")[:2] == (group, ".") for name in self.sketch_names)

    def encode(self) -> bytes:
        """The manifest as JSON."""
        grid = dataclasses.asdict(self.grid)
        body = {
            "key": self.key,
            "identity": dataclasses.asdict(self.identity),
            "layout": grid.pop("layout"),
            "grid": grid,
            "tokens": base64.b64encode(self.tokens.astype("<i4").tobytes()).decode("ascii"),
            "label": self.label,
            "folder": self.folder,
            "created": self.created,
            "codec": self.codec,
            "data_bytes": self.data_bytes,
            "array_sha256": self.array_sha256,
            "sketches": [dataclasses.asdict(entry) for entry in self.sketches],
            "shared": [dataclasses.asdict(array) for array in self.shared],
        }
        head = {"magic": MAGIC, "version": VERSION, "sha256": _digest(body)}
        return json.dumps(head | {"body": body}, indent=1).encode("utf-8")


def segment_key(identity: Identity, grid: Grid, tokens: np.ndarray) -> str:
    """The key under which a segment of these tokens, stored in this form, is found."""
    return prompt_key(identity, grid.layout.namespace(grid), tokens, grid.layout.page_size)


def decode(key: str, data: bytes) -> Manifest:
    """Reads a manifest back.

    Args:
      key: the segment's key, from the file's name.
      data: what the file holds.

    Raises:
      SegmentError: "torn", "foreign", "version" or "checksum".
    """
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SegmentError(key, "torn", f"its manifest is no JSON ({error})") from error
    if not isinstance(parsed, dict) or parsed.get("magic") != MAGIC:
        raise SegmentError(key, "foreign", f"its manifest does not start with {MAGIC!r}")
    if parsed.get("version") not in READABLE:
        known = " and ".join(map(str, READABLE))
        detail = f"its manifest has version {parsed.get('version')!r}; this program reads {known}"
        raise SegmentError(key, "version", detail)
    body = parsed.get("body")
    if not isinstance(body, dict) or parsed.get("sha256") != _digest(body):
        raise SegmentError(key, "checksum", "its manifest is not what was written")
    try:
        manifest = _from_body(body)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        detail = f"its manifest lacks or mistakes a field: {error}"
        raise SegmentError(key, "foreign", detail) from error
    made_from = segment_key(manifest.identity, manifest.grid, manifest.tokens)
    if not key == manifest.key == made_from:
        detail = f"its manifest is that of {manifest.key[:12]}, made from {made_from[:12]}"
        raise SegmentError(key, "foreign", detail)
    return manifest


def _from_body(body: dict[str, Any]) -> Manifest:
    for name, value in (*body["layout"].items(), *body["grid"].items()):
        kind = {"split_kv": bool, "dtype": str}.get(name, int)
        _check(name, value, type(value) is kind)
    grid = Grid(layout=Layout(**body["layout"]), **body["grid"])
    tokens = token_array(np.frombuffer(base64.b64decode(body["tokens"], validate=True), "<i4"))
    if len(tokens) // grid.layout.page_size != grid.pages:
        raise ValueError(f"{len(tokens)} tokens for {grid.pages} pages")
    sketches = tuple(_sketch(entry) for entry in body["sketches"])
    same = {name: body[name] for name in ("key", "label", "folder", "created", "data_bytes")}
    folder = FOLDER.fullmatch(body["folder"])  # it is joined to paths, and removed with the segment
    _check("folder", body["folder"], folder is not None and folder["key"] == body["key"])
    _check("label", body["label"], isinstance(body["label"], str))
    created = body["created"]
    _check("created", created, type(created) in (int, float) and 0 <= created < 1e11)
    _check("data_bytes", body["data_bytes"], type(body["data_bytes"]) is int)
    _check("data_bytes", body["data_bytes"], 0 <= body["data_bytes"] < 1 << 63)
    _check("array_sha256", body["array_sha256"], bool(_DIGEST.fullmatch(body["array_sha256"])))
    shared = tuple(_shared(fields) for fields in body.get("shared", ()))
    codec = body.get("codec", "none")
    _check("codec", codec, codec in CODECS)
    _check("shared", body.get("shared"), sum(array.pages for array in shared) < grid.pages)
    return Manifest(
        identity=Identity(**body["identity"]),
        grid=grid,
        tokens=tokens,
        array_sha256=body["array_sha256"],
        sketches=sketches,
        shared=shared,
        codec=codec,
        **same,
    )


def _sketch(fields: dict[str, Any]) -> SketchEntry:
    entry = SketchEntry(**(fields | {"shape": tuple(fields["shape"])}))
    _check("sketch name", entry.name, bool(SKETCH_NAME.fullmatch(entry.name)))
    _check("sketch shape", entry.shape, all(type(n) is int and n >= 0 for n in entry.shape))
    size = math.prod(entry.shape) * numpy_dtype(entry.dtype).itemsize
    _check("sketch bytes", entry.bytes, type(entry.bytes) is int and entry.bytes == size)
    _check("sketch sha256", entry.sha256, bool(_DIGEST.fullmatch(entry.sha256)))
    return entry


def _shared(fields: dict[str, Any]) -> StoredArray:
    array = StoredArray(**fields)
    _check("shared folder", array.folder, bool(FOLDER.fullmatch(array.folder)))
    for name in ("pages", "of", "data_bytes"):
        _check(f"shared {name}", getattr(array, name), type(getattr(array, name)) is int)
    _check("shared pages", array.pages, 1 <= array.pages <= array.of < 1 << 31)
    _check("shared data_bytes", array.data_bytes, 0 <= array.data_bytes < 1 << 63)
    _check("shared sha256", array.array_sha256, bool(_DIGEST.fullmatch(array.array_sha256)))
    return array


def _check(name: str, value: object, good: bool) -> None:
    if not good:
        raise ValueError(f"{name} is {value!r}")


def _digest(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
