"""What the bytes of packed pages stand for, worked out in NumPy alone."""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kvjax.decode.page_bytes import packed_bytes
from kvjax.formats import Format, KVQuantKeys, KVQuantValues
from kvjax.formats.constant import Constant


def kvquant():
    """Two KV heads of 8 elements, whose first tokens have ranges of their own."""
    rng = np.random.default_rng(0)
    middle, sink_middle = (Constant(rng.normal(size=(2, 8)) / 4) for _ in range(2))
    reach, sink_reach = (Constant(rng.uniform(1, 3, (2, 8))) for _ in range(2))
    levels = Constant(np.sort(rng.uniform(-1, 1, 8)))
    frequencies = Constant(10_000 ** -(np.arange(4) / 4))
    keys = KVQuantKeys(3, middle, reach, sink_middle, sink_reach, levels, frequencies)
    return Format(keys, KVQuantValues(3, levels))


class Bytes:
    """Arrays of some pages' heads that lie after one another in their bytes [n, w]."""

    def __init__(self, raw):
        self.raw, self.begin = raw, 0

    def take(self, dtype, *shape):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        part = np.ascontiguousarray(self.raw[:, self.begin : self.begin + size])
        self.begin += size
        return part.view(dtype).reshape(len(part), *shape)

    def number(self, dtype, *shape):
        return self.take(dtype, *shape).astype(np.float64)


def both(chosen, raw, size, dim, head):
    """Keys and values float64 [n, P, D] of one KV head's pages, whose bytes follow one another.

    Args:
      chosen: the layer's format.
      raw: uint8 [n, w], keys and then values.
      size: P.
      dim: D, of keys and of values.
      head: whose; what calibrations measured differs by head.
    """
    rest = Bytes(raw)
    return tuple(_decoded(part, rest, size, dim, head) for part in (chosen.keys, chosen.values))


def of_tokens(chosen, keys, values, size, first):
    """What the codes of a sequence's tokens stand for; its last page is filled up with zeros.

    Args:
      chosen: the layer's format, which encodes them.
      keys: [T, Hkv, D].
      values: [T, Hkv, D].
      size: P.
      first: the first token's position.

    Returns:
      Keys and values, float64 [T, Hkv, D].
    """
    tokens, heads, dim = keys.shape
    raw = []
    for packing, rows in ((chosen.keys, keys), (chosen.values, values)):
        pages = np.pad(rows, ((0, -tokens % size), (0, 0), (0, 0))).astype(np.float32)
        pages = pages.reshape(-1, size, heads, dim).swapaxes(1, 2)
        at = first + size * jnp.arange(len(pages), dtype=jnp.int32)
        raw.append(np.asarray(_encoded(packing, pages, at)))
    raw = np.concatenate(raw, axis=2)
    found = [both(chosen, raw[:, head], size, dim, head) for head in range(heads)]
    return [np.stack(x, axis=2).reshape(-1, heads, dim)[:tokens] for x in zip(*found, strict=True)]


@functools.partial(
    jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0}
)
def _encoded(packing, pages, at):
    return packed_bytes(packing.encode(pages, at))


def _decoded(packing, rest, size, dim, head):
    if isinstance(packing, KVQuantKeys):
        return _kvquant_keys(packing, rest, size, dim, head)
    if isinstance(packing, KVQuantValues):
        return _kvquant_values(packing, rest, size, dim)
    groups = size // (packing.tokens or size), dim // min(packing.channels or dim, dim)
    if packing.bits == 8:
        level, middle = rest.number(np.int8, size, dim), np.zeros(1)
        scale = _spread(rest.number(ml_dtypes.bfloat16, *groups), size, dim)
    else:
        float8 = ml_dtypes.float8_e4m3fn
        middle = _spread(rest.number(float8, *groups), size, dim)
        level = _codes(rest, packing.bits, size, dim) - (2**packing.bits - 1) / 2
        scale = _spread(rest.number(float8, *groups), size, dim)
        units = rest.number(ml_dtypes.bfloat16, 1, 2)
        scale, middle = scale * units[:, :, :1], middle * units[:, :, 1:]
    return level * scale + middle


def _kvquant_keys(packing, rest, size, dim, head):
    """Levels of ranges by channel, the first token's apart; then outliers; then the rotation."""
    at, value = _outliers(packing, rest, size, dim)
    codes = _codes(rest, packing.bits, size, dim).astype(int)
    first = rest.take(np.int32, 1)
    level = np.asarray(packing.levels.values, np.float64)[codes]
    keys = level * packing.reach.values[head] + packing.middle.values[head]
    sink = level * packing.sink_reach.values[head] + packing.sink_middle.values[head]
    position = first + np.arange(size)  # [n, P]
    keys = _with_outliers(np.where(position[:, :, None] == 0, sink, keys), at, value)
    angle = position[:, :, None] * np.asarray(packing.frequencies.values, np.float64)
    turned = (keys[..., : dim // 2] + 1j * keys[..., dim // 2 :]) * np.exp(1j * angle)
    return packing.sharpen * np.concatenate([turned.real, turned.imag], axis=-1)


def _kvquant_values(packing, rest, size, dim):
    assert packing.scale_dtype == "float16"
    middle = rest.number(np.float16, size, 1)
    at, value = _outliers(packing, rest, size, dim)
    codes = _codes(rest, packing.bits, size, dim).astype(int)
    level = np.asarray(packing.levels.values, np.float64)[codes]
    return _with_outliers(level * rest.number(np.float16, size, 1) + middle, at, value)


def _codes(rest, bits, size, dim):
    """Planes of 2 or 4 bits and of 1; a byte of row r has tokens r, r + rows and so on."""
    codes = np.zeros((len(rest.raw), size, dim))
    for width, below in ((4, 0),) if bits == 4 else ((2, 0), (1, 2))[: bits - 1]:
        rows = size * width // 8
        plane = rest.take(np.uint8, rows, dim)
        for token in range(size):
            field = plane[:, token % rows] >> (token // rows * width)
            codes[:, token] += (field & (2**width - 1)) * 2**below
    return codes


def _outliers(packing, rest, size, dim):
    count = math.ceil(packing.outliers * size * dim)
    return rest.take(np.uint16, count), rest.number(np.float16, count)


def _with_outliers(numbers, at, value):
    flat = numbers.reshape(len(numbers), -1)
    for page in range(len(flat)):
        there = at[page] < flat.shape[1]
        flat[page, at[page][there]] = value[page][there]
    return flat.reshape(numbers.shape)


def _spread(groups, size, dim):
    """What groups of tokens and channels share, for each element."""
    by_token = np.repeat(groups, size // groups.shape[1], axis=1)
    return np.repeat(by_token, dim // groups.shape[2], axis=2)
