"""While tests run, annotations are checked: what the library lets pass is what it says it takes."""

import fractions

import jax.numpy as jnp
import jaxtyping
import pytest

from kvjax.pallas_kernels import AttentionOutput, paged_attention
from kvjax.spec import KVSpec, LayerSpec


def test_a_wrong_type_that_would_pass_is_found():
    spec = KVSpec((LayerSpec.gqa(1, 64),))
    with pytest.raises(jaxtyping.TypeCheckError, match="bytes_per_second"):
        spec.step_read_seconds(1, fractions.Fraction(1))


def test_the_librarys_own_error_comes_first():
    with pytest.raises(ValueError, match="latent_dim is '512'"):
        LayerSpec.mla("512", 64)


def test_pillars_are_checked_too():
    names = {function.__module__ for function in (paged_attention, KVSpec.shard)}
    assert names == {"kvjax.pallas_kernels.paged_attention.api", "kvjax.spec"}
    assert all(hasattr(function, "__wrapped__") for function in (paged_attention, KVSpec.shard))
    assert AttentionOutput(jnp.zeros((1, 1, 8)), jnp.zeros((1, 1)), None, None).out.shape == (
        1,
        1,
        8,
    )
