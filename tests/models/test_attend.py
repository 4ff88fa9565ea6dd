"""Dense attention against a loop over queries, and the contiguous cache's writes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models import contiguous_attend, contiguous_cache, dense_attention
from kvjax.models.config import LayerConfig, ModelConfig

LAYER = LayerConfig(num_heads=4, num_kv_heads=2, head_dim=8)
CONFIG = ModelConfig("llama", 16, 32, 32, (LAYER, LAYER), max_context=64)


def oracle(q, k, v, segments, positions, scale, window, cap):
    """One query after another, in float64."""
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    for t in range(q.shape[0]):
        seen = (segments == segments[t]) & (positions <= positions[t])
        if window is not None:
            seen &= positions > positions[t] - window
        for head in range(q.shape[1]):
            group = head // (q.shape[1] // k.shape[1])
            scores = k[seen, group].astype(np.float64) @ q[t, head] * scale
            if cap is not None:
                scores = cap * np.tanh(scores / cap)
            weights = np.exp(scores - scores.max())
            out[t, head] = weights / weights.sum() @ v[seen, group]
    return out


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("block", [1, 7, 64])
def test_dense_attention_is_what_a_loop_gives(window, cap, block):
    generator = np.random.default_rng(0)
    q, k, v = (generator.standard_normal((20, h, 8), np.float32) for h in (4, 2, 2))
    segments = np.repeat([0, 3], [12, 8]).astype(np.int32)
    positions = np.concatenate([np.arange(12), np.arange(8)]).astype(np.int32)
    order = generator.permutation(20)  # a stream need not be in order
    q, k, v, segments, positions = (x[order] for x in (q, k, v, segments, positions))
    places = {
        "query_segments": segments,
        "query_positions": positions,
        "key_segments": segments,
        "key_positions": positions,
    }
    out = jax.jit(
        lambda q, k, v, places: dense_attention(
            q, k, v, **places, scale=0.3, window=window, cap=cap, block=block
        )
    )(q, k, v, places)
    expected = oracle(q, k, v, segments, positions, 0.3, window, cap)
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_contiguous_attend_writes_where_positions_say():
    cache = contiguous_cache(CONFIG, batch=2, capacity=4, dtype=jnp.bfloat16)
    segments = jnp.asarray([1, 0, 2, -1], jnp.int32)  # 2 and -1 are padding
    positions = jnp.asarray([3, 1, 0, 0], jnp.int32)
    values = jnp.arange(4 * 2 * 8, dtype=jnp.float32).reshape(4, 2, 8)
    attend = contiguous_attend(CONFIG, segments, positions)
    out, new = attend(1, jnp.zeros((4, 4, 8)), values + 1, values + 2, cache)
    assert out.shape == (4, 4, 8)
    assert not np.isnan(out).any()
    np.testing.assert_array_equal(new.keys[0], cache.keys[0])
    expected = np.zeros((2, 4, 2, 8), np.float32)
    expected[1, 3], expected[0, 1] = values[0] + 1, values[1] + 1
    np.testing.assert_array_equal(new.keys[1].astype(jnp.float32), expected)
    expected[1, 3], expected[0, 1] = values[0] + 2, values[1] + 2
    np.testing.assert_array_equal(new.values[1].astype(jnp.float32), expected)


@pytest.mark.parametrize(("batch", "capacity"), [(0, 4), (1, 0)])
def test_a_cache_of_nothing_is_refused(batch, capacity):
    with pytest.raises(ValueError, match="must both be at least 1"):
        contiguous_cache(CONFIG, batch, capacity)
