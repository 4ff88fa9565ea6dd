"""Attention to the keys and values made of latents, against the definition in float64."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import expanded_latent_attention
from kvjax.pallas_kernels.latent_attention import expanded
from tests.pallas_kernels.latent_conformance import Case, batch_and_answer, quick

CASES = (Case("ragged", long=True), Case("ragged", page_size=17, heads=4, dtype="bfloat16"))


def made_of(w_uk, w_uv, latents, ropes):
    """Keys [S, H, D] and values [S, H, Dv] in float32."""
    latents, ropes = latents.astype(jnp.float32), ropes.astype(jnp.float32)
    keys = jnp.einsum("sc,hnc->shn", latents, w_uk, precision="highest")
    shared = jnp.broadcast_to(ropes[:, None], (*keys.shape[:2], ropes.shape[1]))
    values = jnp.einsum("sc,hvc->shv", latents, w_uv, precision="highest")
    return jnp.concatenate([keys, shared], axis=2), values


def operands(case):
    arrays, (q_nope, w_uk, w_uv), *_, wanted = batch_and_answer(case)
    arrays = dict(arrays)
    del arrays["q_latent"]
    q_rope = arrays.pop("q_rope").astype(jnp.float32)
    arrays["q"] = jnp.concatenate([jnp.asarray(q_nope, jnp.float32), q_rope], axis=2)
    weights = (jnp.asarray(x, jnp.float32) for x in (w_uk, w_uv))
    return arrays, functools.partial(made_of, *weights), wanted


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_equals_the_definition(monkeypatch, implementation, case):
    """Of more queries than expand a token together; what none sees is NaN or infinite."""
    monkeypatch.setattr(expanded, "EXPANDED_QUERIES", 16)
    arrays, expand, (out, lse, *_) = operands(case)
    options = {"expand": expand, "scale": case.scale, "implementation": implementation}
    got = quick(expanded_latent_attention, **options)(**arrays)
    assert got.out.shape == out.shape
    np.testing.assert_allclose(got.out, out, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(got.lse, lse, atol=1e-5, rtol=1e-5)


def test_bad_arguments_are_refused_by_name():
    arrays, expand, _ = operands(CASES[0])
    for changed, message in (
        ({"implementation": "tpu"}, "implementation='tpu' must be None, 'reference' or 'xla'"),
        ({"scale": 0.0}, "scale"),
        ({"ropes": arrays["ropes"][:-1]}, "latents and position keys of the same pages"),
        ({"kv_lengths": arrays["kv_lengths"][:-1]}, r"kv_lengths has shape .* must be \(6,\)"),
        ({"q": arrays["q"].astype(jnp.int32)}, "q is int32"),
    ):
        given = {"expand": expand, "scale": 1.0, **arrays, **changed}
        with pytest.raises(ValueError, match=message):
            expanded_latent_attention(**given)
