"""Attention in float64 numpy with plain loops: what every implementation is held against.

Nothing here is shared with the code under test: one query, one head and one slot at a time, by the
words of the public functions' contracts.
"""

import math

import numpy as np


def attend(q, keys, values, slots, scale, soft_cap, sink_logit, page_size, width):
    """One query head [D] against the chosen slots of [L, D] keys and [L, Dv] values."""
    scores = {}
    for slot in slots:
        score = scale * float(np.dot(q, keys[slot]))
        scores[slot] = score if soft_cap is None else soft_cap * math.tanh(score / soft_cap)

    page_max = np.full(width, -np.inf)
    page_sum = np.zeros(width)
    for page in range(width):
        inside = [score for slot, score in scores.items() if slot // page_size == page]
        if inside:
            page_max[page] = max(inside)
            page_sum[page] = sum(math.exp(score - max(inside)) for score in inside)

    logits = list(scores.values()) + ([] if sink_logit is None else [sink_logit])
    if not logits:
        return np.zeros(values.shape[1]), -np.inf, page_max, page_sum
    top = max(logits)
    lse = top + math.log(sum(math.exp(logit - top) for logit in logits))
    out = np.zeros(values.shape[1])
    for slot, score in scores.items():
        out += math.exp(score - lse) * values[slot]
    return out, lse, page_max, page_sum


def visible_slots(length, position, window, sink_tokens):
    return [
        slot
        for slot in range(min(length, position + 1))
        if window is None or slot > position - window or slot < sink_tokens
    ]


def encoded(length, position, residual, page_size):
    """Of `length` slots, those that the query at a position sees as pages were encoded then."""
    if residual is None:
        return length
    end = 0
    while position - end > residual:
        end += page_size
    return min(length, end)


def paged(
    q,
    k_pages,
    v_pages,
    block_tables,
    lengths,
    query_positions,
    *,
    scale=None,
    window=None,
    sink_tokens=0,
    sink_logits=None,
    soft_cap=None,
):
    """Decode: (out [B, Hq, Dv], lse [B, Hq], page_max [B, Hq, M], page_sum [B, Hq, M])."""
    q, k_pages, v_pages = (np.asarray(x, np.float64) for x in (q, k_pages, v_pages))
    kv_heads, page_size = k_pages.shape[1:3]
    group = q.shape[1] // kv_heads
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    width = block_tables.shape[1]
    rows = []
    for row, (length, position) in enumerate(zip(lengths, query_positions, strict=True)):
        used = block_tables[row, : -(-length // page_size)]
        slots = visible_slots(length, position, window, sink_tokens)
        heads = []
        for head in range(q.shape[1]):
            # [pages, P, D] -> [tokens, D]: the sequence as if it had always been contiguous.
            keys = k_pages[used, head // group].reshape(-1, k_pages.shape[3])
            values = v_pages[used, head // group].reshape(-1, v_pages.shape[3])
            sink = None if sink_logits is None else float(sink_logits[head])
            heads.append(
                attend(q[row, head], keys, values, slots, scale, soft_cap, sink, page_size, width)
            )
        rows.append([np.stack(part) for part in zip(*heads, strict=True)])
    return tuple(np.stack(part) for part in zip(*rows, strict=True))


def ragged(q, k_pages, v_pages, block_tables, kv_lengths, cu_q_lengths, residual=None, **options):
    """Ragged: each query decoded alone, at its own position; padding rows left as nothing."""
    q, k_pages, v_pages = (np.asarray(x, np.float64) for x in (q, k_pages, v_pages))
    rows, query_heads, width = q.shape[0], q.shape[1], block_tables.shape[1]
    out = np.zeros((rows, query_heads, v_pages.shape[3]))
    lse = np.full((rows, query_heads), -np.inf)
    page_max = np.full((rows, query_heads, width), -np.inf)
    page_sum = np.zeros((rows, query_heads, width))
    for sequence, length in enumerate(kv_lengths):
        first, last = cu_q_lengths[sequence], cu_q_lengths[sequence + 1]
        for row in range(first, last):
            position = length - (last - first) + (row - first)
            one = paged(
                q[row : row + 1],
                k_pages,
                v_pages,
                block_tables[sequence : sequence + 1],
                [encoded(length, position, residual, k_pages.shape[2])],
                [position],
                **options,
            )
            for whole, part in zip((out, lse, page_max, page_sum), one, strict=True):
                whole[row] = part[0]
    return out, lse, page_max, page_sum
