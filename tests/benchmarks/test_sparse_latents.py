"""What sparse attention reads is counted as its caches store and its kernels list."""

import numpy as np

from benchmarks import sparse_latents


def test_index_keys_and_chosen_latents_are_counted():
    rows = {row.claim: row for row in sparse_latents.least_rows(32_768)}
    float4 = rows["32768 tokens, float4 index keys"]
    assert float4.ours == 32_768 * (128 // 2 + 4) + 2048 * (512 + 64) * 2
    assert float4.baseline_value == 32_768 * (512 + 64) * 2
    assert float4.met
    assert not rows["32768 tokens, float8 index keys"].met


def test_coarser_reads_read_more():
    chosen = np.asarray([0, 7, 8, 640])
    read = [
        sparse_latents.tokens_read(chosen, 1024, grain.tokens) for grain in sparse_latents.GRAINS
    ]
    assert read == [4, 24, 32, 128]
