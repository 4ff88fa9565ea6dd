"""What policies must answer, in plain NumPy and float64, one query, head and page at a time."""

import numpy as np


def keys_with_outliers(rng, pages, kv_heads, page_size, dim):
    """Random keys whose channels differ in size and bias, as real keys' do; float32."""
    keys = rng.normal(size=(pages, kv_heads, page_size, dim))
    keys *= np.exp(rng.normal(size=(1, kv_heads, 1, dim)))
    keys[..., :: max(dim // 4, 1)] += rng.normal(size=(1, kv_heads, 1, 1)) * 8
    return keys.astype(np.float32)


def softmax(scores):
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def capped(scores, soft_cap):
    return scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)


def mass_by(score, queries, valid, num_pages, pages, kv_heads, scale, soft_cap=None):
    """[Hq, N], where score(query, KV head, page) gives a page's one or more scores."""
    heads = queries.shape[1]
    mass = np.zeros((heads, num_pages))
    for s in np.flatnonzero(valid):
        for h in range(heads):
            kv_head = h // (heads // kv_heads)
            query = queries[s, h].astype(np.float64)
            scores = [np.atleast_1d(score(query, kv_head, page)) for page in range(pages)]
            if pages:
                shares = softmax(capped(np.stack(scores) * scale, soft_cap))
                mass[h, :pages] += shares.sum(axis=1)
    return mass


def exact_mass(keys, queries, valid, pages, scale, soft_cap=None):
    """[Hq, N] for keys [N, Hkv, P, D], token by token."""
    keys = np.asarray(keys, np.float64)
    return mass_by(
        lambda query, head, page: keys[page, head] @ query,
        queries, valid, keys.shape[0], pages, keys.shape[1], scale, soft_cap,
    )  # fmt: skip
