"""Keys and values of real models through formats: errors, and what they do to attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.formats import NAMED, Packing
from kvjax.model import from_checkpoint
from kvjax.models import causal_attend, read_gguf
from tests.kvjax.formats.bounds import attention_bound, attention_of
from tests.kvjax.formats.samples import encoded, relative, values_of
from tests.kvjax.formats.test_packing import stretched

pytestmark = pytest.mark.slow
TAGS = {"smollm2-135m": "smollm2_135m", "qwen2.5-coder-0.5b": "qwen2.5_coder_0.5b"}
PAGE, PAGES = 32, 8


@functools.lru_cache(maxsize=1)
def layers_of(name, path, ids):
    """(queries of the last token, keys, values) of each layer; pages [N, Hkv, P, D]."""
    model = from_checkpoint(read_gguf(path), name=name)
    tokens = jnp.asarray(ids, jnp.int32)
    positions = jnp.arange(len(ids), dtype=jnp.int32)

    @jax.jit
    def run(params):
        decoder = nnx.merge(model.graphdef, params)
        plain = causal_attend(model.config, jnp.zeros_like(tokens), positions)

        def attend(layer, q, k, v, seen):
            out, _ = plain(layer, q, k, v, None)
            return out, (*seen, (q[-1, :: q.shape[1] // k.shape[1]], k, v))

        return decoder(tokens, positions, attend, ())[1]

    def pages(x):
        return np.asarray(x).reshape(PAGES, PAGE, *x.shape[1:]).transpose(0, 2, 1, 3)

    return [(np.asarray(q), pages(k), pages(v)) for q, k, v in run(model.params)]


@pytest.fixture
def layers(shared, gguf_file):
    def get(name):
        reference = np.load(shared / "reference" / f"{TAGS[name]}.hf_fp32.npz")
        ids = next(reference[x] for x in reference.files if x.endswith("/ids"))
        assert len(ids) >= PAGE * PAGES or "needle4k/ids" in reference.files
        if len(ids) < PAGE * PAGES:
            ids = reference["needle4k/ids"]
        return layers_of(name, gguf_file(name), tuple(ids[: PAGE * PAGES].tolist()))

    return get


@pytest.mark.parametrize("name", TAGS)
def test_attention_is_off_by_no_more_than_its_bound(name, layers):
    zero = jnp.zeros(PAGES, jnp.int32)
    for layer in layers(name)[::7]:
        q, k, v = layer
        for format in (NAMED["int8"], NAMED["int4"], NAMED["kivi4"], NAMED["int2"]):
            packed = encoded(format.keys, k, zero), encoded(format.values, v, zero)
            steps = [stretched(x, k.shape) for x in packed]
            for x, whole, step in zip(packed, (k, v), steps, strict=True):
                error = np.abs(np.asarray(values_of(x)) - whole)
                assert (error <= 0.5001 * step + 1e-6 * np.abs(whole).max()).all()
            got = attention_of(q, *map(values_of, packed))
            assert (np.abs(got - attention_of(q, k, v)) <= attention_bound(q, k, v, *steps)).all()


def test_keys_with_biases_want_a_scale_a_channel(layers):
    """Qwen adds a bias to its keys, which makes channels of outliers: tokens drown in them."""
    zero = jnp.zeros(PAGES, jnp.int32)
    errors = {}
    for name in TAGS:
        k = layers(name)[0][1]
        spread = k - k.mean(axis=(0, 2), keepdims=True)
        for axis, packing in (("channel", Packing(channels=1)), ("token", Packing(tokens=1))):
            off = np.asarray(values_of(encoded(packing, k, zero))) - k
            errors[name, axis] = relative(spread + off, spread)
    assert errors["qwen2.5-coder-0.5b", "token"] > 4 * errors["qwen2.5-coder-0.5b", "channel"]
    assert errors["smollm2-135m", "token"] < 4 * errors["smollm2-135m", "channel"]
