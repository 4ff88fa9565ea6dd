"""Sketches as plain bytes: small arrays that are kept beside the units and read whole."""

import hashlib
from collections.abc import Mapping

import numpy as np
import tensorstore as ts

from kvjax.storage.layout import numpy_dtype
from kvjax.storage.manifest import SKETCH_NAME, SketchEntry


def encode_sketches(
    sketches: Mapping[str, np.ndarray],
) -> tuple[tuple[SketchEntry, ...], dict[str, bytes]]:
    """Sketches as entries of a manifest and as the bytes to write, by name.

    Raises:
      ValueError: a name is no file name, or a dtype cannot be stored.
    """
    entries, data = [], {}
    for name, sketch in sorted(sketches.items()):
        if not SKETCH_NAME.fullmatch(name):
            raise ValueError(
                f"sketch name {name!r} is no file name; use up to 100 letters, digits and _ . -"
            )
        array = np.ascontiguousarray(sketch)
        try:
            dtype = ts.dtype(array.dtype).name
            native = numpy_dtype(dtype).newbyteorder("<") if array.dtype.itemsize > 1 else None
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"sketch {name!r} has dtype {array.dtype}, which TensorStore cannot store; "
                "give floating or whole numbers"
            ) from error
        if array.dtype.hasobject or array.dtype.kind in "OSU":
            raise ValueError(f"sketch {name!r} has dtype {array.dtype}; give numbers")
        raw = (array if native is None else array.astype(native, copy=False)).tobytes()
        digest = hashlib.sha256(raw).hexdigest()
        entries.append(SketchEntry(name, dtype, sketch.shape, len(raw), digest))
        data[name] = raw
    return tuple(entries), data
