"""Small prefixes to store, and what their units must hold."""

import itertools
import os

import numpy as np
import tensorstore as ts

from kvjax.storage.keys import Identity
from kvjax.storage.layout import Layout

IDENTITY = Identity(weights="ab" * 32, numerics="float32; rope 10000; causal")
L, N, H, P, D = 4, 6, 2, 4, 8  # layers, pages, KV heads, tokens in a page, head_dim
LAYOUT = Layout(page_size=P, layers=2, heads=1)


def token_ids(seed=0, pages=N):
    return np.random.default_rng(seed).integers(0, 50_000, pages * P).astype(np.int32)


def keys_and_values(seed=0, pages=N, dtype="bfloat16", layers=L, heads=H, dim=D, size=P):
    """Two arrays [L, N, H, P, D] of any bits: NaN, infinities and negative zeros among them."""
    kind = ts.dtype(dtype).numpy_dtype
    shape = (2, layers, pages, heads, size, dim, kind.itemsize)
    bits = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    both = bits.view(kind)[..., 0]
    return both[0], both[1]


def put(store, seed=0, pages=N, tokens=None, identity=IDENTITY, layout=LAYOUT, **options):
    """Stores a prefix whose content follows from its seed."""
    keys, values = keys_and_values(seed, pages)
    ids = token_ids(seed, pages) if tokens is None else tokens
    return store.put(identity, ids, keys, values, layout=layout, **options)


def all_units(segment):
    """Every unit of a segment, int32 [n, 4], in a shuffled order."""
    rows = itertools.product(*map(range, segment.grid.units))
    units = np.array(list(rows), np.int32)
    np.random.default_rng(7).shuffle(units)
    return units


def expected(unit, keys, values, layout):
    """The bytes of one unit, cut from the arrays that were stored."""
    layer, head, kind, page = unit
    layers = slice(layer * layout.layers, (layer + 1) * layout.layers)
    heads = slice(head * layout.heads, (head + 1) * layout.heads)
    sources = [(keys, values)[kind]] if layout.split_kv else [keys, values]
    return np.stack([source[layers, page, heads] for source in sources], axis=2).tobytes()


def assert_holds(segment, keys, values, pages=None):
    """All units (of the first pages) are, bit for bit, what was stored."""
    units = all_units(segment)
    units = units[units[:, 3] < (pages or len(units))]
    for unit, read in zip(units, segment.read(units), strict=True):
        got = read.result(timeout=60)
        assert got.shape == segment.unit_shape
        assert got.tobytes() == expected(unit, keys, values, segment.info.layout)


def files_of(folder):
    """All files below a folder, as paths relative to it."""
    found = []
    for where, _, names in os.walk(folder):
        found += [os.path.relpath(os.path.join(where, name), folder) for name in names]
    return sorted(found)


def bytes_below(folder):
    return sum(os.path.getsize(os.path.join(folder, name)) for name in files_of(folder))
