"""From samples of one layer's keys and values to what its formats need to know of them."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from kvjax.formats.calibration import BITS, LayerCalibration
from kvjax.formats.constant import Constant
from kvjax.formats.kvquant import OUTLIERS, token_ranges
from kvjax.formats.levels import best_levels
from kvjax.formats.mixed import LayerLosses
from kvjax.spec import DEFAULT_PAGE_SIZE

BINS = 512
"""Of a level's range: points of a bin count as their mean, so only where levels part is coarser."""


def layer_calibration(
    keys: Float32[np.ndarray, "K Hkv D"],
    key_weights: Float32[np.ndarray, "K Hkv D"],
    values: Float32[np.ndarray, "T Hkv Dv"],
    value_weights: Float32[np.ndarray, "T Hkv Dv"],
    sinks: Float32[np.ndarray, "S Hkv D"],
    frequencies: Float32[np.ndarray, " half"],
    sharpen: float,
    losses: LayerLosses | None,
) -> LayerCalibration:
    """What one layer's keys and values are like.

    Levels are best for squared errors, each multiplied by its weight, of samples within their
    ranges; a range leaves out half of the share of outliers on either side.

    Args:
      keys: without their rotation, of K tokens that are not the first of a text.
      key_weights: what a squared error of each element costs.
      values: of T tokens, at least a page.
      value_weights: see `key_weights`.
      sinks: keys of S tokens that are the first of a text.
      frequencies: of the rotary embedding.
      sharpen: what that multiplies keys by.
      losses: of the layer; see `LayerCalibration`.
    """
    low, high = np.quantile(keys, [OUTLIERS / 2, 1 - OUTLIERS / 2], axis=0)
    middle, reach = (low + high) / 2, (high - low) / 2
    sink_middle = (sinks.max(axis=0) + sinks.min(axis=0)) / 2
    sink_reach = np.abs(sinks - sink_middle).max(axis=0)
    size = DEFAULT_PAGE_SIZE
    pages = values[: len(values) // size * size].reshape(-1, size, *values.shape[1:])
    pages = pages.transpose(0, 2, 1, 3)
    weights = value_weights[: len(values) // size * size].reshape(-1, size, *values.shape[1:])
    ranges = jax.jit(token_ranges, static_argnums=1)(jnp.asarray(pages), OUTLIERS)
    least, most = map(np.asarray, ranges[2:])
    return LayerCalibration(
        frequencies=Constant(frequencies),
        sharpen=sharpen,
        key_middle=Constant(middle),
        key_reach=Constant(reach),
        sink_middle=Constant(sink_middle),
        sink_reach=Constant(sink_reach),
        key_levels=_levels(keys - middle, reach, key_weights),
        value_levels=_levels(
            pages - (least + most) / 2, (most - least) / 2, weights.transpose(0, 2, 1, 3)
        ),
        key_most=Constant(
            np.maximum(np.abs(keys - middle).max(axis=(0, 2)), sink_reach.max(axis=1))
        ),
        value_most=Constant(np.abs(values).max(axis=(0, 2))),
        losses=losses,
    )


def _levels(x: np.ndarray, reach: np.ndarray, weights: np.ndarray) -> tuple[Constant, ...]:
    """Levels for each of `BITS`, of elements in reaches, by the error that they lead to."""
    reach = np.broadcast_to(reach, x.shape)
    within = (np.abs(x) <= reach) & (reach > 0)
    if not within.any():
        return tuple(Constant(np.linspace(-1, 1, 2**bits)) for bits in BITS)
    unit = reach[within].astype(np.float64)
    place, weight = x[within] / unit, weights[within] * unit * unit
    if not weight.any():
        weight = unit * unit
    at = np.clip(((place + 1) * (BINS / 2)).astype(int), 0, BINS - 1)
    total = np.bincount(at, weight, BINS)
    mean = np.bincount(at, weight * place, BINS) / np.where(total > 0, total, 1)
    return tuple(Constant(best_levels(mean, total, 2**bits)) for bits in BITS)
