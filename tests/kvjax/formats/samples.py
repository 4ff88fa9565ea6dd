"""Keys and values of one made-up layer, and what they are calibrated to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.formats.calibration import FormatCalibration
from kvjax.formats.mixed import LayerLosses
from kvjax.formats.statistics import layer_calibration
from kvjax.models import LayerConfig
from kvjax.models.rope import frequencies, rotate, rotations

HEADS, DIM, SIZE = 2, 16, 16
POSITIONS = jnp.array([0, 16, 4096, 48], jnp.int32)
"""Of four pages that do not follow one another."""
LAYER = LayerConfig(num_heads=4, num_kv_heads=HEADS, head_dim=DIM)


def plain_keys(pages, seed=0):
    """Keys before their rotation, [N, Hkv, P, D]: channels of unequal means and widths.

    The first page begins a sequence.
    """
    rng = np.random.default_rng(seed)
    channels = np.random.default_rng(99)
    middle = 10 * channels.standard_normal((HEADS, 1, DIM))
    width = np.exp(channels.standard_normal((HEADS, 1, DIM)))
    keys = middle + width * rng.standard_normal((pages, HEADS, SIZE, DIM))
    keys[0, :, 0] = some_sinks(1)[0]
    return keys.astype(np.float32)


def some_sinks(count=32):
    """Keys of first tokens, [T, Hkv, D]: unlike others, and alike."""
    rng = np.random.default_rng(5)
    middle = -4 * np.random.default_rng(98).standard_normal((HEADS, DIM))
    return (middle + 0.05 * rng.standard_normal((count, HEADS, DIM))).astype(np.float32)


def some_values(pages, seed=0):
    """Values, [N, Hkv, P, D]: tokens of unequal sizes."""
    rng = np.random.default_rng(seed + 1000)
    size = np.exp(rng.standard_normal((pages, HEADS, SIZE, 1)))
    return (size * rng.standard_normal((pages, HEADS, SIZE, DIM))).astype(np.float32)


@functools.partial(jax.jit, static_argnums=2)
def rotated(pages, positions, layer=LAYER):
    """Keys as a model hands them over, by its own rotation."""
    count, heads, size, dim = pages.shape
    flat = (positions[:, None] + jnp.arange(size, dtype=jnp.int32)[None]).reshape(-1)
    turned = rotate(jnp.asarray(tokens_of(pages)), *rotations(layer, flat))
    return turned.reshape(count, size, heads, dim).transpose(0, 2, 1, 3)


@functools.partial(jax.jit, static_argnums=0)
def encoded(packing, pages, positions=None):
    """Packed pages, compiled: op by op takes seconds."""
    positions = POSITIONS[: len(pages)] if positions is None else positions
    return packing.encode(jnp.asarray(pages), positions)


@jax.jit
def values_of(packed):
    """What packed pages stand for."""
    return packed.values()


def relative(found, wanted):
    """The error of all elements, as a share of what they are."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def tokens_of(pages):
    """[N, Hkv, P, D] as samples [T, Hkv, D]."""
    count, heads, size, dim = pages.shape
    return pages.transpose(0, 2, 1, 3).reshape(count * size, heads, dim)


def calibration(keys, values, layer=LAYER):
    """One layer, every error weighed the same."""
    keys, values = tokens_of(keys)[1:], tokens_of(values)
    ones = np.ones_like(values)
    losses = LayerLosses((0.3, 0.05, 0.01, 0.0), (0.1, 0.02, 0.004, 0.0))
    turns = frequencies(layer)
    found = layer_calibration(keys, ones[1:], values, ones, some_sinks(), *turns, losses)
    return FormatCalibration("0" * 64, len(values), (found,))


@functools.cache
def made(name):
    """The packings of keys and of values of a format, calibrated on 64 pages."""
    found = calibration(plain_keys(64, 7), some_values(64, 7)).format(name)
    return dict(found.layers)[0]
