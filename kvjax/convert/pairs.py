"""Which pairs of keys stay rotated, and what stands for the rotation of the others.

Everything is complex here: a pair of elements that RoPE turns is one number. Keys z of G KV heads
are mixed, frequency by frequency, to y = M z; with N the inverse of M, a query of head h sees, in
place of its own KV head g's key, the sum over j of conj(q) N[g, j] y_j.
"""

import dataclasses

import numpy as np
from jaxtyping import Complex128, Float64, Int64

from kvjax.convert.rotation_needs import RotationNeeds

_FLOOR = 1e-3  # of the mean weight: a KV head that no loss depends on is still given back


@dataclasses.dataclass(frozen=True)
class Pairs:
    """One layer's keys as mixed pairs: `half` frequencies of G pairs each.

    Attributes:
      mix: M, from KV heads to mixed pairs.
      unmix: N, its inverse.
      turn: what the rotation of a pair is replaced by where it is not kept, for each query head.
      whole: what pairs move the loss by.
      lost: what of it is lost where a pair's rotation is replaced.
    """

    mix: Complex128[np.ndarray, "half G G"]
    unmix: Complex128[np.ndarray, "half G G"]
    turn: Complex128[np.ndarray, "H half G"]
    whole: Float64[np.ndarray, "half G"]
    lost: Float64[np.ndarray, "half G"]


def mixed_pairs(needs: RotationNeeds) -> Pairs:
    """Mix the copies that KV heads have of every pair, so that few hold most.

    KV heads are weighed by what the loss depends on them, then turned to their principal axes. A
    pair that is not to be rotated gets the factor in place of its rotation by which it comes
    closest to what it did, the mean rotation, as it were, over the distances that are attended to:
    near 1 for a frequency that hardly turns within those, near 0 for one that turns many times.

    Args:
      needs: sums over texts, as NumPy arrays.
    """
    keys = np.asarray(needs.keys, np.float64)
    covariance = keys[:, 0] + 1j * keys[:, 1]
    weights = np.asarray(needs.slopes, np.float64)
    weights = np.sqrt(np.maximum(weights / np.maximum(weights.mean(), 1e-300), _FLOOR))
    weighed = weights[:, :, None] * covariance * weights[:, None, :]
    axes = np.linalg.eigh(weighed)[1][:, :, ::-1]  # the greatest first
    mix = axes.conj().swapaxes(1, 2) * weights[:, None, :]
    unmix = axes / weights[:, :, None]
    moments = np.asarray(needs.moves, np.float64)
    products = _products(moments, mix, unmix)
    by_still, cross = products[..., 1:, 1:], products[..., 1:, 0]
    whole = products[..., 0, 0]
    ridge = 1e-6 * np.trace(by_still, axis1=-2, axis2=-1) + 1e-300
    solved = np.linalg.solve(by_still + ridge[..., None, None] * np.eye(2), cross[..., None])
    first, second = solved[..., 0, 0], solved[..., 1, 0]
    lost = np.maximum(whole - first * cross[..., 0] - second * cross[..., 1], 0.0)
    return Pairs(mix, unmix, first + 1j * second, whole.sum(axis=0), lost.sum(axis=0))


def _products(
    moments: Float64[np.ndarray, "H half J J"],
    mix: Complex128[np.ndarray, "half G G"],
    unmix: Complex128[np.ndarray, "half G G"],
) -> Float64[np.ndarray, "H half G 3 3"]:
    """Second moments, by mixed pair, of Re A, Re B and -Im B.

    A = N[g, j] sum_i M[j, i] a_i is what the loss moves by through pair j, turned; B likewise with
    the pair as it is. A factor c in place of its rotation leaves Re A - Re(c B).
    """
    heads, _, groups = moments.shape[0], moments.shape[1], mix.shape[1]
    group = np.arange(heads) // (heads // groups)
    factor = np.einsum("fgj,fji->gfji", unmix, mix)[group]  # [H, half, G, G]
    nothing = np.zeros_like(factor.real)
    rows = [
        [factor.real, -factor.imag, nothing, nothing],
        [nothing, nothing, factor.real, -factor.imag],
        [nothing, nothing, -factor.imag, -factor.real],
    ]
    linear = np.stack([np.concatenate(row, axis=-1) for row in rows], axis=-2)
    return np.asarray(np.einsum("hfjai,hfik,hfjbk->hfjab", linear, moments, linear, optimize=True))


def kept(lost: Float64[np.ndarray, "half G"], count: int) -> Int64[np.ndarray, "count 2"]:
    """The pairs that lose most without their rotation, as (frequency, mixed pair), in order.

    Args:
      lost: of `Pairs`.
      count: how many.
    """
    flat = np.argsort(-lost.reshape(-1), kind="stable")[:count]
    return np.stack(np.unravel_index(np.sort(flat), lost.shape), axis=1).astype(np.int64)
