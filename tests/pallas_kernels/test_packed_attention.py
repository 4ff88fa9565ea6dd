"""Attention over packed pools: the shared bodies, races, what is refused, and CUDA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from kvjax.pallas_kernels import paged_attention, sparse_paged_attention, supported
from kvjax.pallas_kernels.code_levels import FLOAT8, code_levels
from kvjax.pallas_kernels.mosaic import tiles
from kvjax.pallas_kernels.paged_attention.tpu import paged_attention_tpu
from kvjax.pallas_kernels.support import choose
from tests.pallas_kernels import conformance, sparse_conformance
from tests.pallas_kernels.conformance import Case
from tests.pallas_kernels.packed_conformance import PACKINGS, batch_and_answer, check, packed
from tests.pallas_kernels.races import WATCHED, assert_no_race

CASES = (
    ("paged_attention", "int8", Case(page_stats=True)),
    ("paged_attention", "int4", Case(window=20, sink_tokens=3, page_stats=True)),
    ("paged_attention", "int2-int3", Case(page_size=24, head_dim=128, v_head_dim=64)),
    ("ragged_paged_attention", "float8", Case(page_size=8, window=18, sink_logits=True)),
    ("ragged_paged_attention", "int4", Case(residual=16, head_dim=128, group=1)),
    ("ragged_paged_attention", "int2-int3", Case(q_dtype="bfloat16", soft_cap=3.0)),
    ("sparse_paged_attention", "by-channel", Case(page_stats=True)),
    ("sparse_paged_attention", "int4", Case(page_size=8, kv_heads=1, group=4)),
)
H100 = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")


# Mosaic runs each case, the others those that differ most; interpreting compiles for seconds.
EACH = [("tpu", *case) for case in CASES] + [("reference", *CASES[0])]
EACH += [("xla", *CASES[at]) for at in (1, 4, 5, 6)]
EACH += [("gpu", *CASES[at]) for at in (1, 2, 3, 6)]


@pytest.mark.parametrize(
    ("implementation", "op", "name", "case"), EACH, ids=lambda value: getattr(value, "name", value)
)
def test_equals_attention_over_the_elements(implementation, op, name, case):
    check(op, implementation, case, name)


def test_no_race_between_copies_and_unpacking(capfd, monkeypatch):
    case = Case(long=True, head_dim=128, kv_heads=2, group=1)
    monkeypatch.setattr(tiles, "MAX_KV_TOKENS", 128)
    arrays, options, wanted = batch_and_answer("paged_attention", case, "int4")

    def attend():
        function = functools.partial(
            paged_attention_tpu,
            interpret=WATCHED,
            **options | {"scale": 128**-0.5, "query_positions": arrays["lengths"] - 1},
        )
        result = jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})(**arrays)
        jax.block_until_ready(result)
        conformance.assert_close(result, wanted, 1e-5, page_stats=False)

    assert_no_race(capfd, attend)


@pytest.mark.parametrize("kind", FLOAT8)
def test_every_float8_is_decoded(kind):
    bits = jnp.arange(256, dtype=jnp.int32)
    wanted = jax.lax.bitcast_convert_type(bits.astype(jnp.uint8), jnp.dtype(kind))
    np.testing.assert_array_equal(code_levels(bits, kind, 0.0), wanted.astype(jnp.float32))


# JAX 0.11 and later say that the backend will go; the kernels' docstrings say so too.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", PACKINGS)
@pytest.mark.parametrize("op", ["paged_attention", "sparse_paged_attention"])
def test_lowers_for_cuda(op, name):
    case = Case(dtype="float32", q_dtype="bfloat16", head_dim=128)
    if op == "paged_attention":
        (arrays, options), function = conformance.build(op, case), paged_attention
    else:
        (arrays, options), function = sparse_conformance.build(case), sparse_paged_attention
    arrays, _ = packed(arrays, name)
    function = functools.partial(function, **options, implementation="gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=H100)):
        lowered = jax.jit(function).trace(**arrays).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@__gpu$xla.gpu.triton") == 1


def on_tpu():
    """A context in which programs are for a TPU."""
    device = AbstractDevice("TPU v5 lite", 1, "tpu")
    return use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("levels", jnp.zeros((1, 16), jnp.float32), "the pages have levels"),
        ("outlier_at", jnp.zeros((1, 2, 3), jnp.uint16), "the pages have outlier_at"),
        ("position", jnp.zeros((1, 2, 1), jnp.int32), "the pages have position"),
    ],
)
def test_what_the_kernels_do_not_read_is_left_to_xla(field, value, reason):
    case = Case()
    arrays, options = conformance.build("paged_attention", case)
    arrays, _ = packed(arrays, "int4")
    shape = {"head_dim": 64, "page_size": 16, "dtype": jnp.bfloat16}
    pools = arrays["k_pages"], dataclasses.replace(arrays["v_pages"], **{field: value})
    with on_tpu():
        assert choose("paged_attention", None, pools=(pools[0],), **shape) == "tpu"
        assert choose("paged_attention", None, pools=pools, **shape) == "xla"
    for implementation in ("tpu", "gpu"):
        said = supported(
            "paged_attention", implementation, platform=implementation, pools=pools, **shape
        )
        assert said.startswith(reason)
        with pytest.raises(ValueError, match=f"paged_attention cannot run: {reason}"):
            paged_attention(
                **arrays | {"v_pages": pools[1]}, **options, implementation=implementation
            )


def test_queries_that_the_mosaic_kernel_does_not_take_are_named():
    arrays, _ = conformance.build("paged_attention", Case())
    pools = packed(arrays, "int8")[0]["k_pages"]
    said = supported(
        "paged_attention", "tpu", platform="tpu", head_dim=64, dtype=jnp.float16, pools=(pools,)
    )
    assert "float16" in said
