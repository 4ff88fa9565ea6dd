"""What packing costs: half a step of each group, whatever stands in the others."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.formats import NAMED, Format, LayerFormat, Packing, float8, int4, kivi
from tests.kvjax.formats.bounds import attention_bound, attention_of
from tests.kvjax.formats.samples import encoded, values_of

HEADS, SIZE, DIM = 2, 32, 32
PACKINGS = {
    "channel, 4 bits": Packing(channels=1),
    "channel, 3 bits, float8 scales": Packing(bits=3, channels=1, scale_dtype="float8_e4m3fn"),
    "channel, 2 bits, groups of 16 tokens": Packing(bits=2, channels=1, tokens=16),
    "token, 4 bits, groups of 8": Packing(tokens=1, channels=8, scale_dtype="float16"),
    "token, 4 bits, around 0": Packing(tokens=1, symmetric=True),
    "token, 8 bits": Packing(bits=8, tokens=1, symmetric=True),
    "page, 8 bits, float32 scales": Packing(bits=8, symmetric=True, scale_dtype="float32"),
}
FLOATS = {
    "fp8": (float8().keys, 4, 2.0**-10),
    "fp8-e5m2": (float8("float8_e5m2").keys, 3, 2.0**-17),
}


def pages(kind, seed=0):
    """float32 [3, Hkv, P, D], of a kind that is hard on codes."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((3, HEADS, SIZE, DIM)).astype(np.float32)
    match kind:
        case "a huge channel":
            x[..., 5] = 1000 + 50 * x[..., 5]
        case "a huge token":
            x[:, :, 7] *= 1e4
        case "constants":
            x[:] = 3.14159
        case "zeros":
            x[:] = 0
        case "denormals":
            x *= 1e-41
        case "large":
            x *= 1e30
        case "one sign":
            x = np.abs(x) + 5
    return x


KINDS = (
    "plain", "a huge channel", "a huge token", "constants", "zeros", "denormals", "large",
    "one sign",
)  # fmt: skip


def stretched(packed, shape):
    """Each element's step, [N, Hkv, P, D]."""
    scale = np.asarray(packed._scale())
    scale = np.broadcast_to(scale, (*shape[:2], *scale.shape[2:]))
    tokens, channels = shape[2] // scale.shape[2], shape[3] // scale.shape[3]
    return np.repeat(np.repeat(scale, tokens, axis=2), channels, axis=3)


@pytest.mark.parametrize("name", PACKINGS)
def test_no_element_is_off_by_more_than_half_a_step(name):
    packing = PACKINGS[name]
    for kind in KINDS:
        if kind == "large" and packing.scale_dtype == "float16":
            continue  # beyond 65,504 a float16 scale ends
        x = pages(kind)
        packed = encoded(packing, x, jnp.zeros(3, jnp.int32))
        error = np.abs(np.asarray(values_of(packed)) - x)
        # Half a step, and the rounding of float32 sums around a middle.
        slack = 1e-6 * np.abs(x).max() + 1e-30
        assert (error <= 0.5001 * stretched(packed, x.shape) + slack).all(), kind
        if kind in ("zeros", "denormals"):
            assert error.max() < 1e-30


@pytest.mark.parametrize("name", FLOATS)
def test_floats_are_off_by_half_of_their_last_bit(name):
    packing, mantissa, least = FLOATS[name]
    for kind in KINDS:
        x = pages(kind)
        packed = encoded(packing, x, jnp.zeros(3, jnp.int32))
        got = np.asarray(values_of(packed))
        smallest = least * stretched(packed, x.shape)
        off = np.abs(got - x)
        assert (off <= np.abs(x) * 1.01 * 2.0**-mantissa + smallest + 1e-30).all(), kind


def test_what_is_too_large_saturates_and_nan_stays_in_its_group():
    x = pages("plain")
    fixed = dataclasses.replace(float8(scale=1.0).keys)
    big = values_of(encoded(fixed, 1000 * np.sign(x), jnp.zeros(3, jnp.int32)))
    np.testing.assert_array_equal(big, 448 * np.sign(x))
    for name, packing in PACKINGS.items():
        clean = np.asarray(values_of(encoded(packing, x, jnp.zeros(3, jnp.int32))))
        spoiled = x.copy()
        spoiled[1, 1, 3, 4], spoiled[1, 1, 3, 5], spoiled[1, 1, 3, 6] = np.nan, np.inf, -np.inf
        got = np.asarray(values_of(encoded(packing, spoiled, jnp.zeros(3, jnp.int32))))
        assert np.isfinite(got).all(), name
        others = np.ones(x.shape, bool)
        tokens, channels = packing.tokens or SIZE, packing.channels or DIM
        rows = slice(3 // tokens * tokens, (3 // tokens + 1) * tokens)
        first = 4 // channels * channels
        others[1, 1, rows, first : max(first + channels, 7)] = False
        if packing.scale_dtype != "float8_e4m3fn":  # these share a unit in a page's head
            np.testing.assert_array_equal(got[others], clean[others], err_msg=name)
        np.testing.assert_array_equal(got[0], clean[0])
        np.testing.assert_array_equal(got[1, 0], clean[1, 0])


@pytest.mark.parametrize("name", ["int8", "int4", "kivi4", "kivi2", "int3"])
def test_attention_is_off_by_no_more_than_its_first_order_bound(name):
    format = NAMED[name]
    for kind in ("plain", "a huge channel", "one sign"):
        k, v = pages(kind, 1), pages("plain", 2)
        if kind == "a huge channel":
            k[..., 5] /= 100
        zero = jnp.zeros(3, jnp.int32)
        packed = encoded(format.keys, k, zero), encoded(format.values, v, zero)
        q = np.random.default_rng(3).standard_normal((HEADS, DIM))
        got, want = attention_of(q, *map(values_of, packed)), attention_of(q, k, v)
        bound = attention_bound(q, k, v, *(stretched(x, k.shape) for x in packed))
        assert (np.abs(got - want) <= bound).all(), kind
        assert np.abs(got - want).max() > 0


def test_the_axis_of_a_channel_with_outliers_decides():
    x = pages("a huge channel")
    zero = jnp.zeros(3, jnp.int32)
    others = np.arange(DIM) != 5

    def worst(packing):
        return np.abs(np.asarray(values_of(encoded(packing, x, zero))) - x)[..., others].max()

    by_channel = worst(Packing(channels=1))
    assert by_channel < 0.3
    assert worst(Packing(tokens=1)) > 20 * by_channel


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Packing(bits=5), "bits is 5: must be 2, 3, 4 or 8"),
        (lambda: Packing(bits=8), "symmetric is False"),
        (lambda: Packing("float8_e4m3fn", 4, symmetric=True), "bits is 4"),
        (lambda: Packing("float4"), "kind is 'float4'"),
        (lambda: Packing(tokens=0), "tokens is 0"),
        (lambda: Packing(scale_dtype="int8"), "scale_dtype is 'int8'"),
        (lambda: Packing("float8_e5m2", 8, symmetric=True, scale=0.0), r"scale is 0\.0"),
        (lambda: float8("int"), "kind is 'int'"),
        (lambda: float8(per="layer"), "per is 'layer'"),
        (lambda: int4(value_bits=0), "value_bits is 0"),
        (lambda: kivi(3), "bits is 3: must be 2 or 4"),
        (lambda: Format(Packing(), None), "values is None"),
        (lambda: Format(Packing(), Packing(), products="int8"), "products is 'int8'"),
        (lambda: Packing(tokens=1, channels=1).check("keys", 16, 8), "its own scale"),
    ],
)
def test_what_is_no_packing_is_refused(make, message):
    with pytest.raises(KvjaxError, match=message):
        make()


def test_formats_are_static():
    """Equal ones share a program; a calibrated layer is one of its own."""
    assert len({float8(), float8(), int4()}) == 2
    own = dataclasses.replace(int4(), layers=((0, LayerFormat(Packing(), Packing())),))
    assert hash(own) != hash(int4())
    jax.jit(lambda x, format: x, static_argnums=1)(1.0, own)
