"""Keys in 2 to 4 bits: how far off they may be, how they are packed, and hard cases."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.policies import ExactKeys, LowBitKeys, MeanKeys, QuestBounds
from tests.kvjax.policies import plain

BITS = pytest.mark.parametrize("bits", [2, 3, 4])


@functools.partial(jax.jit, static_argnums=0)
def build(sketch, keys):
    """The sketch, built in one program."""
    return sketch.build(keys)


@functools.partial(jax.jit, static_argnums=0)
def restored_keys(sketch, arrays):
    """What the sketch stands for, float32."""
    return sketch.keys(arrays)


@functools.partial(jax.jit, static_argnums=(0, 5))
def page_mass(sketch, arrays, queries, valid, pages, scale):
    """The mass, in one program."""
    return sketch.page_mass(arrays, queries, valid, pages, scale)


def steps(arrays):
    """The step of each page, head and channel, float64 [N, Hkv, D]."""
    step = np.asarray(arrays["step"]).astype(np.float64)
    return (step * np.asarray(arrays["unit"]).astype(np.float64)[..., :1]).transpose(1, 0, 2)


def hard_keys():
    """One hard case a page, [10, 2, 16, 8]."""
    rng = np.random.default_rng(1)
    keys = rng.normal(size=(10, 2, 16, 8))
    keys[1] = 0  # nothing there
    keys[2] = 3.7  # nothing changes
    keys[3] = 1e-40  # below the least normal number
    keys[4, :, :, 3] *= 1e30  # one channel dwarfs the others
    keys[5] *= 1e-25
    keys[6] += 300  # a bias that dwarfs the range
    keys[7] = np.where(keys[7] > 0, 3e38, -3e38)  # the range overflows float32
    keys[8, :, 1:] = keys[8, :, :1]
    keys[8, :, 0] += 1  # one token differs from all others
    keys[9] = np.ldexp(1.0, np.arange(16) - 8)[None, :, None]
    return keys.astype(np.float32)


@BITS
def test_no_key_is_off_by_more_than_half_a_step(bits):
    keys = hard_keys()
    sketch = LowBitKeys(bits)
    arrays = build(sketch, jnp.asarray(keys))
    restored = np.asarray(restored_keys(sketch, arrays), np.float64)
    error = np.abs(restored - keys).max(axis=2)
    rounding = 1e-6 * np.abs(keys).max(axis=2) + 1e-30
    assert np.isfinite(restored).all()
    assert (error <= steps(arrays) / 2 + rounding).all()


@BITS
def test_a_step_is_not_much_wider_than_the_range_asks(bits):
    rng = np.random.default_rng(2)
    keys = rng.normal(size=(20, 2, 16, 32)).astype(np.float32)
    arrays = build(LowBitKeys(bits), jnp.asarray(keys))
    ideal = (keys.max(axis=2) - keys.min(axis=2)) / (2**bits - 1)
    # An eighth for the step rounded up in 8 bits, and a sixteenth of the middle on either side.
    assert (steps(arrays) <= ideal * 1.125 + np.abs(keys).max(axis=2) / 8 / (2**bits - 1)).all()
    assert (steps(arrays) >= ideal * 0.999).all()


@BITS
def test_more_of_a_range_is_clipped_the_smaller_the_step(bits):
    keys = plain.keys_with_outliers(np.random.default_rng(3), 6, 2, 16, 8)
    full, half = (build(LowBitKeys(bits, clip), jnp.asarray(keys)) for clip in (1.0, 0.5))
    ratio = steps(half) / steps(full)
    assert (np.abs(ratio - 0.5) < 0.07).all()
    restored = np.asarray(restored_keys(LowBitKeys(bits, 0.5), half))
    assert np.ptp(restored, axis=2).max() <= np.ptp(keys, axis=2).max() * 0.6


@BITS
def test_codes_are_packed_and_come_back(bits):
    """A page whose keys are the codes themselves, in every order of tokens."""
    levels = np.arange(2**bits, dtype=np.float32)
    rng = np.random.default_rng(4)
    tokens = np.stack([rng.permutation(np.resize(levels, 16)) for _ in range(24)])
    keys = tokens.reshape(3, 2, 4, 16).transpose(0, 1, 3, 2)
    sketch = LowBitKeys(bits)
    arrays = build(sketch, jnp.asarray(keys))
    packed = [arrays[name] for name in ("codes", "top") if name in arrays]
    assert sum(array.size for array in packed) * 8 == keys.size * bits
    offset = np.asarray(restored_keys(sketch, arrays)) - keys
    assert (np.abs(offset) <= steps(arrays)[:, :, None, :] / 2).all()
    if bits < 4:  # steps of 1 and middles of 1.5 and 3.5 are exact in 8 bits
        assert (offset == 0).all()


@pytest.mark.parametrize(
    "sketch", [MeanKeys(), QuestBounds(), ExactKeys(), *map(LowBitKeys, (2, 3, 4))], ids=repr
)
@pytest.mark.parametrize("size", [8, 16, 32])
def test_bytes_per_page_are_the_arrays_bytes(sketch, size):
    keys = jnp.ones((5, 3, size, 64), jnp.bfloat16)
    arrays = build(sketch, keys)
    assert all(array.shape[:2] == (3, 5) for array in arrays.values())
    assert sum(array.nbytes for array in arrays.values()) == 5 * sketch.bytes_per_page(3, 64, size)


def test_three_bits_are_a_quarter_of_bfloat16_keys():
    share = LowBitKeys(3).bytes_per_page(3, 64, 16) / ExactKeys().bytes_per_page(3, 64, 16)
    assert 0.25 < share < 0.253


@BITS
def test_mass_is_close_to_the_keys_own(bits):
    rng = np.random.default_rng(5)
    keys = plain.keys_with_outliers(rng, 40, 2, 16, 64)
    queries = rng.normal(size=(6, 8, 64)).astype(np.float32)
    valid, pages = jnp.ones(6, bool), jnp.int32(40)
    sketch = LowBitKeys(bits)
    arrays = build(sketch, jnp.asarray(keys))
    mass = page_mass(sketch, arrays, jnp.asarray(queries), valid, pages, 0.06)
    exact = plain.exact_mass(keys, queries, valid, 40, 0.06)
    assert np.abs(mass - exact).sum() / exact.sum() < {2: 0.4, 3: 0.2, 4: 0.1}[bits]


@BITS
def test_bfloat16_queries_change_little_even_where_a_bias_dwarfs_the_range(bits):
    rng = np.random.default_rng(6)
    keys = rng.normal(size=(24, 1, 16, 64))
    keys[..., ::8] += 200
    keys = jnp.asarray(keys, jnp.float32)
    queries = jnp.asarray(rng.normal(size=(4, 2, 64)), jnp.bfloat16)
    sketch = LowBitKeys(bits)
    arrays = build(sketch, keys)
    mass, precise = (
        page_mass(sketch, arrays, queries.astype(dtype), jnp.ones(4, bool), jnp.int32(24), 0.125)
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    assert np.abs(mass - precise).sum() / precise.sum() < 0.02


@pytest.mark.parametrize("bits", [1, 5, 8, 0, True, 2.5, "3"])
def test_other_bits_are_refused(bits):
    with pytest.raises(KvjaxError, match=r"bits is .* must be 2, 3 or 4"):
        LowBitKeys(bits)


@pytest.mark.parametrize("clip", [0, -0.5, 1.01, float("nan")])
def test_other_clips_are_refused(clip):
    with pytest.raises(KvjaxError, match=r"clip is .* above 0 and at most 1"):
        LowBitKeys(3, clip)


@pytest.mark.parametrize(("bits", "size"), [(2, 6), (3, 12), (4, 5)])
def test_pages_whose_tokens_do_not_fill_bytes_are_refused(bits, size):
    with pytest.raises(KvjaxError, match=f"pages hold {size} tokens"):
        LowBitKeys(bits).build(jnp.ones((2, 1, size, 8)))
    with pytest.raises(KvjaxError, match=f"pages hold {size} tokens"):
        LowBitKeys(bits).bytes_per_page(1, 8, size)


@BITS
def test_building_one_operation_at_a_time_gives_the_same(bits):
    """But for keys that lie between two codes, which a last bit decides."""
    keys = jnp.asarray(plain.keys_with_outliers(np.random.default_rng(7), 4, 2, 16, 8))
    sketch = LowBitKeys(bits, 0.9)
    plainly, jitted = sketch.build(keys), build(sketch, keys)
    for name in ("step", "middle", "unit"):
        np.testing.assert_array_equal(plainly[name], jitted[name])
    away = np.abs(restored_keys(sketch, plainly) - restored_keys(sketch, jitted)) > 1e-5
    assert away.mean() < 0.01
