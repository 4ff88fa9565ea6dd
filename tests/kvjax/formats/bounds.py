"""Attention of one query a head in float64, and how far errors of half a step can move it."""

import numpy as np


def rows(pages):
    """[N, Hkv, P, D] as [Hkv, T, D], float64."""
    x = np.asarray(pages, np.float64)
    return x.transpose(1, 0, 2, 3).reshape(x.shape[1], -1, x.shape[3])


def weights_of(q, k):
    scores = np.einsum("hd,htd->ht", q, k) / np.sqrt(q.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def attention_of(q, k, v):
    """[Hkv, D]."""
    return np.einsum("ht,htd->hd", weights_of(q, rows(k)), rows(v))


def attention_bound(q, k, v, k_steps, v_steps):
    """[Hkv, D], the first-order bound, with what exponentials of finite errors add to it.

    Scores are off by at most d = |q| . step / 2 / sqrt(D) (KV Cache survey, section 10.2); by the
    softmax's Jacobian, outputs by sum p_t (d_t + p . d) |v_t|, and by p . step / 2 for the values.
    Weights change by a factor of at most exp(2 max d): that bounds what the first order leaves out.
    """
    weights, half_k, half_v = weights_of(q, rows(k)), rows(k_steps) / 2, rows(v_steps) / 2
    off = np.einsum("hd,htd->ht", np.abs(q), half_k) / np.sqrt(q.shape[1])
    moved = off + np.sum(weights * off, axis=1, keepdims=True)
    bound = np.einsum("ht,htd->hd", weights * moved, np.abs(rows(v)))
    bound += np.einsum("ht,htd->hd", weights, half_v)
    return bound * np.exp(2 * off.max(axis=1))[:, None] + 1e-6
