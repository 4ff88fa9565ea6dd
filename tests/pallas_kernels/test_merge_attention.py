"""The log-sum-exp merge: one body for every implementation, and what it must never do."""

import functools
import math
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    SingleDeviceSharding,
    use_abstract_mesh,
)

from kvjax.pallas_kernels import merge_attention, paged_attention
from tests.pallas_kernels.races import WATCHED, assert_no_race

IMPLEMENTATIONS = ("reference", "xla", "tpu", "gpu")
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
# Parts, rows, width, dtype.
CASES = (
    (1, (3,), 64, "float32"),
    (2, (4, 9), 64, "float32"),
    (3, (5, 3, 2), 80, "float32"),
    (9, (300,), 128, "float32"),
    (2, (257,), 256, "bfloat16"),
    (4, (2, 3), 64, "float16"),
    (2, (), 64, "float32"),
)


def build(parts, rows, width, dtype, seed=0):
    """Parts whose log-sum-exps differ by hundreds, a third of them empty with NaN values."""
    rng = np.random.default_rng(seed)
    out = rng.normal(size=(parts, *rows, width))
    lse = rng.normal(size=(parts, *rows)) * rng.choice([1.0, 100.0], size=rows or None)
    lse += rng.choice([0.0, 1e4, -1e4], size=rows or None)
    empty = rng.random(lse.shape) < 0.3
    if rows:
        empty[(slice(None), *(0 for _ in rows))] = True  # a row that no part has keys for
        empty[(0, *(-1 for _ in rows))] = False
    lse[empty] = -np.inf
    out[empty] = rng.choice([np.nan, np.inf, -np.inf], size=(int(empty.sum()), width))
    return jnp.asarray(out, dtype), jnp.asarray(lse, jnp.float32)


def expected(out, lse):
    """Row by row in float64."""
    out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    rows = lse.shape[1:]
    mixed, total = np.zeros((*rows, out.shape[-1])), np.full(rows, -np.inf)
    for row in np.ndindex(rows):
        parts = [part for part in range(len(lse)) if lse[part][row] > -np.inf]
        if parts:
            top = max(lse[part][row] for part in parts)
            total[row] = top + math.log(sum(math.exp(lse[part][row] - top) for part in parts))
            for part in parts:
                mixed[row] += math.exp(lse[part][row] - total[row]) * out[part][row]
    return mixed, total


def run(implementation, out, lse, interpret=None):
    """Through the public function, or the Pallas kernel interpreted."""
    if implementation in ("reference", "xla"):
        return jax.jit(functools.partial(merge_attention, implementation=implementation))(out, lse)
    module = import_module(f"kvjax.pallas_kernels.merge_attention.{implementation}")
    if interpret is None:
        interpret = pltpu.InterpretParams() if implementation == "tpu" else True
    function = getattr(module, f"merge_attention_{implementation}")
    rows = lse.shape[1:]
    result = jax.jit(functools.partial(function, interpret=interpret))(
        out.reshape(len(out), -1, out.shape[-1]), lse.reshape(len(lse), -1)
    )
    return type(result)(result.out.reshape(*rows, -1), result.lse.reshape(rows))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_the_definition(implementation, case):
    out, lse = build(*case)
    result = run(implementation, out, lse)
    assert result.out.dtype == out.dtype
    assert result.lse.dtype == jnp.float32
    assert result.page_max is None
    assert result.page_sum is None
    tolerance = TOLERANCE[case[3]]
    for got, want in zip((result.out, result.lse), expected(out, lse), strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(np.asarray(got, np.float64), want, tolerance, tolerance)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_damage_is_seen_in_its_own_row_and_no_other(implementation):
    out, lse = build(3, (20,), 64, "float32")
    wanted = expected(out, lse)
    lse = lse.at[1, 7].set(jnp.nan)
    out = out.at[2, 9].set(jnp.nan)
    lse = lse.at[2, 9].set(lse[:, 9].max() + 1)
    result = run(implementation, out, lse)
    assert np.isnan(result.lse[7])
    assert np.isnan(result.out[jnp.asarray([7, 9])]).all()
    others = np.delete(np.arange(20), [7, 9])
    np.testing.assert_allclose(result.out[others], wanted[0][others], 1e-5, 1e-5)


@functools.cache
def attention_in_parts():
    """Attention page by page, stacked, and attention over the pages together."""
    rng = np.random.default_rng(3)
    q = jnp.asarray(rng.normal(size=(3, 6, 64)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(9, 2, 16, 64)), jnp.float32) for _ in range(2))
    tables = jnp.asarray(rng.permutation(9).reshape(3, 3), jnp.int32)
    lengths = jnp.asarray([48, 20, 3], jnp.int32)
    attend = jax.jit(paged_attention)
    parts = [
        attend(q, k, v, tables[:, page : page + 1], jnp.clip(lengths - 16 * page, 0, 16))
        for page in range(3)
    ]
    stacked = [jnp.stack([getattr(part, name) for part in parts]) for name in ("out", "lse")]
    return *stacked, attend(q, k, v, tables, lengths)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_parts_of_attention_merge_to_attention_over_all_keys(implementation):
    out, lse, whole = attention_in_parts()
    merged = run(implementation, out, lse)
    np.testing.assert_allclose(merged.out, whole.out, 1e-5, 1e-5)
    np.testing.assert_allclose(merged.lse, whole.lse, 1e-5, 1e-5)


def test_no_race(capfd):
    out, lse = build(3, (600,), 64, "float32")

    def merge():
        result = run("tpu", out, lse, WATCHED)
        np.testing.assert_allclose(result.out, expected(out, lse)[0], 1e-5, 1e-5)

    assert_no_race(capfd, merge)


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x4"])
def test_compiles_for_a_tpu(device, topology):
    sharding = SingleDeviceSharding(device(topology))
    module = import_module("kvjax.pallas_kernels.merge_attention.tpu")
    for width, dtype in ((128, jnp.float32), (80, jnp.bfloat16)):
        compiled = (
            jax.jit(module.merge_attention_tpu)
            .lower(
                jax.ShapeDtypeStruct((3, 1000, width), dtype, sharding=sharding),
                jax.ShapeDtypeStruct((3, 1000), jnp.float32, sharding=sharding),
            )
            .compile()
        )
        assert "tpu_custom_call" in compiled.as_text()


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_lowers_for_cuda():
    out, lse = build(*CASES[2])
    gpu = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=gpu)):
        function = jax.jit(functools.partial(merge_attention, implementation="gpu"))
        lowered = function.trace(
            jax.ShapeDtypeStruct(out.shape, out.dtype), jax.ShapeDtypeStruct(lse.shape, lse.dtype)
        ).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize(
    ("out", "lse", "message"),
    [
        (np.zeros((2, 3, 8), np.float64), np.zeros((2, 3), np.float32), "out is float64"),
        (np.zeros((2, 3, 8), np.float32), np.zeros((2, 3), jnp.bfloat16), "lse is bfloat16"),
        (np.zeros((2, 3, 8), np.float32), np.zeros((3, 2), np.float32), r"lse has shape \(3, 2\)"),
        (np.zeros((0, 8), np.float32), np.zeros(0, np.float32), "at least one entry"),
        (np.zeros(8, np.float32), np.zeros((), np.float32), r"it must be \[n, \.\.\., D\]"),
        ([np.zeros((3, 8))], np.zeros((1, 3), np.float32), "out is a list; .*stack them"),
    ],
)
def test_bad_arguments_are_refused_by_name(out, lse, message):
    with pytest.raises(ValueError, match=message):
        merge_attention(out, lse)


@pytest.mark.parametrize("implementation", ["tpu", "gpu"])
def test_a_named_kernel_that_cannot_run_says_why(implementation):
    out, lse = build(*CASES[0])
    with pytest.raises(ValueError, match="of merge_attention cannot run: it needs"):
        merge_attention(out, lse, implementation=implementation)
