"""What a decoder-decoder keeps and reads is what its caches have."""

import numpy as np

from benchmarks import cached_once


def test_one_layer_grows_and_all_read_it():
    """13 layers of 24 states [128, 128] in float32, and 8 KV heads of 128 in bfloat16."""
    states, token = 13 * 24 * 128 * 128 * 4, 2 * 8 * 128 * 2
    rows = {(row.claim, row.metric): row for row in cached_once.counted_rows(32_768)}
    kept = rows["32,768 tokens, gated retention", "allocated a sequence"]
    assert kept.ours == states + 32_768 * token
    assert kept.baseline_value == 26 * 32_768 * token
    read = rows["32,768 tokens, gated retention", "read a step"]
    assert read.ours == states + 13 * 32_768 * token
    # A ring has the pages that a window and a chunk of 512 tokens can be in.
    ring = rows["32,768 tokens, windows of 1024", "allocated a sequence"]
    pages = (1024 + 512 - 2) // 16 + 2
    assert ring.ours == 13 * pages * 16 * 2 * 24 * 128 * 2 + 32_768 * token


def test_what_is_timed_is_attention_and_retention():
    for calls in cached_once.layer_calls().values():
        shapes = {call().shape for call in calls.values()}
        assert len(shapes) == 1
        assert all(np.isfinite(call()).all() for call in calls.values())
