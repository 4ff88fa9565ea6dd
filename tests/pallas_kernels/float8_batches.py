"""Batches of float8 pages, and what attention in float8 is of them by its words, in float64."""

import math

import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels.packed_pages import PackedPages

FLOAT8 = jnp.float8_e4m3fn.dtype


def rounded(x):
    """The float8_e4m3fn nearest to each number, as float64."""
    return np.asarray(x).astype(FLOAT8).astype(np.float64)


def packed(codes, scale, shared=False):
    """A pool of codes [N, Hkv, P, D] and their scales [N or 1, Hkv or 1, 1, 1]."""
    none = dict.fromkeys(("middle", "unit", "levels", "outlier_at", "outlier_value"))
    return PackedPages(
        planes={"codes": jnp.asarray(codes)},
        scale=jnp.asarray(scale),
        bits=8,
        centre=0.0,
        shared=("scale",) if shared else (),
        **none,
    )


def distance_to_a_tie(x):
    """How far, relatively, positive numbers are from where rounding to float8 changes its mind."""
    x = np.maximum(np.asarray(x, np.float64), 2.0**-14)
    _, exponent = np.frexp(x)
    spacing = np.exp2(np.maximum(exponent - 1, -6) - 3.0)
    return np.abs((x / spacing) % 1 - 0.5) * spacing / x


def attend(q, keys, values, key_scales, value_scales, scale, tile, add):
    """One query head [D] over its sequence's codes, [L, D] and [L, Dv], and scales [L].

    Returns the output, the log-sum-exp, and how near to a tie any rounding was.
    """
    q_scale = 2.0 ** (math.frexp(np.abs(q).max())[1] - 8)
    codes = rounded(q / q_scale)
    scores = q_scale * scale * key_scales * (keys @ codes)
    if not len(scores):
        return np.zeros(values.shape[1]), -np.inf, 1.0
    logits = scores + np.log(value_scales)
    sums, peak, near = None, -np.inf, 1.0
    for start in range(0, len(scores), tile):
        part = slice(start, start + tile)
        higher = max(peak, logits[part].max())
        weights = 256 * np.exp(logits[part] - higher)
        near = min(near, distance_to_a_tie(weights).min())
        sums = add(sums, math.exp(peak - higher), rounded(weights), values[part])
        peak = higher
    top = scores.max()
    mass = np.exp(scores - top).sum()
    out = add(sums, 1.0, None, None) / 256 * math.exp(peak - top) / mass
    return out, top + math.log(mass), near


def add_exactly(sums, fade, weights, values):
    """Products of a tile join a sum that loses nothing; without weights it is what came of it."""
    before = 0.0 if sums is None else sums * fade
    return before if weights is None else before + weights @ values


def add_on_hopper(flush_every):
    """Products join an H100's sum, and that a float64 sum after `flush_every` tiles."""

    def add(sums, fade, weights, values):
        if weights is None:
            return sums[0] + sums[1]
        width = values.shape[1]
        total, run, tiles = (np.zeros(width), np.zeros(width), 0) if sums is None else sums
        total, run = total * fade, run * fade
        for start in range(0, len(weights), 32):
            step = slice(start, start + 32)
            run = np.asarray(
                [instruction(s, weights[step], v) for s, v in zip(run, values[step].T, strict=True)]
            )
        tiles += 1
        if flush_every is not None and tiles % flush_every == 0:
            total, run = total + run, np.zeros(width)
        return total, run, tiles

    return add


def instruction(accumulator, weights, values):
    """One wgmma of float8: a sum of an accumulator and up to 32 products, in whole numbers."""
    parts = [(accumulator, math.frexp(accumulator)[1] - 1)] if accumulator else []
    for weight, value in zip(weights, values, strict=True):
        if weight * value:
            exponents = (max(math.frexp(x)[1] - 1, -6) for x in (weight, value))
            parts.append((weight * value, sum(exponents)))
    if not parts:
        return 0.0
    most = max(exponent for _, exponent in parts)
    whole = sum(math.trunc(math.ldexp(part, 13 - most)) for part, _ in parts)
    cut = max(whole.bit_length() - 14, 0)
    whole = math.copysign(abs(whole) >> cut << cut, whole)
    return math.ldexp(whole, most - 13)
