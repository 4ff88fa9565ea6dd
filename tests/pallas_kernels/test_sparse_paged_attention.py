"""Sparse paged attention: the shared body, races, other machines, and what it must never do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from kvjax.pallas_kernels import (
    check_page_lists,
    merge_attention,
    paged_attention,
    sparse_paged_attention,
)
from kvjax.pallas_kernels.mosaic import tiles, work
from kvjax.pallas_kernels.mosaic.layout import pool_format
from kvjax.pallas_kernels.sparse_paged_attention.tpu import sparse_paged_attention_tpu
from tests.pallas_kernels.conformance import Case, assert_close
from tests.pallas_kernels.races import WATCHED, assert_no_race
from tests.pallas_kernels.sparse_conformance import (
    CASES,
    GPU_CASES,
    MORE_CASES,
    batch_and_answer,
    build,
    check,
    run,
)

# Not what the shared body compiles with, so that a patched module is seen.
FRESH = pltpu.InterpretParams(num_cores_or_threads=1)


def each(implementations, cases):
    """Every implementation of one case after the other: they share its batch and its answer."""
    return [
        pytest.param(implementation, case, id=f"{implementation}-{case.name}")
        for case in cases
        for implementation in implementations
    ]


@pytest.mark.parametrize(
    ("implementation", "case"),
    each(("reference", "xla"), CASES + MORE_CASES) + each(("gpu",), GPU_CASES),
)
def test_equals_the_definition(implementation, case):
    check(implementation, case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_mosaic_kernel_equals_the_definition(case):
    check("tpu", case)


def test_no_race_between_copies_and_computation(capfd, monkeypatch):
    case = Case(page_size=64, kv_heads=2, group=2, long=True, page_stats=True)
    monkeypatch.setattr(tiles, "MAX_KV_TOKENS", 128)
    monkeypatch.setattr(tiles, "DECODE_ROWS", 16)

    def attend():
        arrays, options, wanted = batch_and_answer(case)
        assert_close(run("tpu", arrays, options, WATCHED), wanted, 1e-5, case.page_stats)

    assert_no_race(capfd, attend)


def test_lists_that_exceed_scalar_memory_are_split(monkeypatch):
    case = Case(kv_heads=2, group=2, sink_logits=True, page_stats=True)
    arrays, options, wanted = batch_and_answer(case)
    words = 2 * arrays["page_ids"].shape[2] + len(work.Work._fields) + 1
    monkeypatch.setattr(work, "SCALAR_WORDS", 3 * words + len(work.Work._fields) + 1)
    result = run("tpu", arrays, options, FRESH)
    assert_close(result, wanted, 1e-5, page_stats=True)


def test_a_list_that_no_scalar_memory_holds_is_refused():
    with pytest.raises(ValueError, match=r"page_ids has 120000 entries a list.*fewer pages"):
        work.lists_per_kernel(4, 120_000, 1)


def compile_for(device, heads, kv_heads, head_dim, *, page_size, dtype, page_stats, sinks):
    """Compile a call of 8 sequences and 61 pages a list, over pools that are laid out for it."""
    sharding = SingleDeviceSharding(device)

    def array(shape, dtype, sharding=sharding):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    pool = array(
        (262_144 // page_size, kv_heads, page_size, head_dim), dtype, pool_format(sharding)
    )
    lists = array((8, kv_heads, 61), jnp.int32)
    function = functools.partial(
        sparse_paged_attention_tpu, scale=0.1, soft_cap=None, page_stats=page_stats
    )
    lowered = jax.jit(function).lower(
        array((8, heads, head_dim), dtype),
        pool,
        pool,
        lists,
        lists,
        sink_logits=array((heads,), jnp.float32) if sinks else None,
    )
    assert "tpu_custom_call" in lowered.as_text()
    return pool, lowered.compile()


@pytest.mark.parametrize(
    ("topology", "shape", "page_size", "dtype", "everything"),
    [
        ("v5e:2x2", (32, 8, 128), 16, jnp.bfloat16, True),
        ("v5p:2x2x1", (32, 8, 128), 16, jnp.bfloat16, True),
        ("v6e:2x4", (32, 8, 128), 16, jnp.bfloat16, True),
        ("v5e:2x2", (9, 3, 64), 16, jnp.bfloat16, False),
        ("v5e:2x2", (16, 8, 256), 64, jnp.float32, True),
        ("v5p:2x2x1", (32, 32, 80), 128, jnp.bfloat16, False),
        ("v6e:2x4", (8, 2, 64), 8, jnp.float32, True),
    ],
    ids=str,
)
def test_compiles_for_a_tpu_without_a_copy_of_the_pool(
    device, topology, shape, page_size, dtype, everything
):
    pool, compiled = compile_for(
        device(topology),
        *shape,
        page_size=page_size,
        dtype=dtype,
        page_stats=everything,
        sinks=everything,
    )
    stored = pool.size * pool.dtype.itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < stored / 10


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("case", GPU_CASES + MORE_CASES[:2], ids=lambda case: case.name)
def test_lowers_for_cuda(case):
    arrays, options = build(case)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
    function = functools.partial(sparse_paged_attention, **options, implementation="gpu")
    gpu = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=gpu)):
        lowered = jax.jit(function).trace(**shapes).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize("implementation", ["reference", "xla", "tpu"])
def test_all_pages_listed_is_attention(implementation):
    """Every page of every sequence, in an order of each KV head's own: exact attention."""
    rng = np.random.default_rng(5)
    q = jnp.asarray(rng.normal(size=(3, 4, 64)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(20, 2, 16, 64)), jnp.float32) for _ in range(2))
    lengths = np.asarray([80, 33, 0], np.int32)
    tables = rng.permutation(15).reshape(3, 5).astype(np.int32)
    order = np.stack([[rng.permutation(5) for _ in range(2)] for _ in range(3)])
    page_ids = np.take_along_axis(np.broadcast_to(tables[:, None], (3, 2, 5)), order, axis=2)
    page_tokens = np.clip(lengths[:, None, None] - 16 * order, 0, 16)
    arrays = {
        "q": q,
        "k_pages": k,
        "v_pages": v,
        "page_ids": jnp.asarray(page_ids),
        "page_tokens": jnp.asarray(page_tokens, jnp.int32),
    }
    options = {"scale": None, "sink_logits": None, "soft_cap": None, "page_stats": True}
    result = run(implementation, arrays, options)
    exact = jax.jit(functools.partial(paged_attention, page_stats=True))(
        q, k, v, jnp.asarray(tables), jnp.asarray(lengths)
    )
    np.testing.assert_allclose(result.out, exact.out, 1e-5, 1e-5)
    np.testing.assert_allclose(result.lse, exact.lse, 1e-5, 1e-5)
    by_head = np.repeat(order, 2, axis=1)
    for name in ("page_max", "page_sum"):
        wanted = np.take_along_axis(np.asarray(getattr(exact, name)), by_head, axis=2)
        np.testing.assert_allclose(getattr(result, name), wanted, 1e-5, 1e-5)


def test_parts_of_a_list_merge_to_the_whole():
    """Resident pages and fetched ones, attended apart, are the list attended at once."""
    arrays, options, wanted = batch_and_answer(CASES[0])
    options = options | {"page_stats": False}
    parts = [
        run(
            "reference",
            arrays | {name: arrays[name][:, :, at] for name in ("page_ids", "page_tokens")},
            options,
        )
        for at in (slice(0, 2), slice(2, None))
    ]
    merged = merge_attention(
        jnp.stack([part.out for part in parts]), jnp.stack([part.lse for part in parts])
    )
    np.testing.assert_allclose(merged.out, wanted[0], 1e-5, 1e-5)
    np.testing.assert_allclose(merged.lse, wanted[1], 1e-5, 1e-5)


def test_new_lists_do_not_compile_again():
    function = jax.jit(sparse_paged_attention)
    for seed in range(3):
        function(**build(CASES[0], seed)[0])
    assert function._cache_size() == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": (5, 6, 64)}, r"page_ids has shape \(4, 2, 5\); q has 5 rows and k_pages 2 KV heads"),
        ({"q": (4, 5, 64)}, "q has 5 heads and k_pages has 2 KV heads"),
        ({"q": (4, 6, 80)}, "q has head_dim 80"),
        ({"page_ids": (4, 5)}, r"page_ids has shape .*it must be \[B, Hkv, K\]"),
        ({"page_ids": (4, 3, 5)}, r"page_ids has shape \(4, 3, 5\)"),
        ({"page_ids": (4, 2, 0)}, "every axis needs at least one entry"),
        ({"page_tokens": (4, 2, 6)}, r"page_tokens has shape .*it must be page_ids'"),
        ({"v_pages": (25, 2, 8, 64)}, "may differ only in the last axis"),
    ],
)
def test_shapes_are_refused_by_name(changed, message):
    arrays, _ = build(Case())
    for name, shape in changed.items():
        arrays[name] = jnp.zeros(shape, arrays[name].dtype)
    with pytest.raises(ValueError, match=message):
        sparse_paged_attention(**arrays)


def test_other_bad_arguments_are_refused_by_name():
    arrays, _ = build(Case())
    for name in ("page_ids", "page_tokens"):
        with pytest.raises(ValueError, match=f"{name} is uint16; it must be int32"):
            sparse_paged_attention(**arrays | {name: arrays[name].astype(jnp.uint16)})
    for option, value in (("scale", 0.0), ("soft_cap", -1.0), ("page_stats", 1)):
        with pytest.raises(ValueError, match=f"{option} is {value}"):
            sparse_paged_attention(**arrays, **{option: value})
    for implementation in ("tpu", "gpu"):
        with pytest.raises(ValueError, match="of sparse_paged_attention cannot run: it needs"):
            sparse_paged_attention(**arrays, implementation=implementation)


@pytest.mark.parametrize(
    ("ids", "tokens", "message"),
    [
        ([0, -1], [1, 1], r"page_ids\[0, 0, 1\] is -1; write num_pages \(7\)"),
        ([0, 3], [8, 9], r"page_tokens\[0, 0, 1\] is 9; it must be from 0 to 8"),
        ([0, 3], [-1, 8], r"page_tokens\[0, 0, 0\] is -1"),
        ([3, 3], [8, 1], r"page_ids\[0, 0\] names page 3 twice"),
        ([3, 3, 1], [8, 8], r"page_tokens has shape \(1, 1, 2\)"),
    ],
)
def test_values_of_lists_are_checked_outside_jit(ids, tokens, message):
    with pytest.raises(ValueError, match=message):
        check_page_lists(
            np.asarray([[ids]], np.int32),
            np.asarray([[tokens]], np.int32),
            num_pages=7,
            page_size=8,
        )


def test_good_lists_pass():
    ids = np.asarray([[[3, 7, 7, 9], [3, 3, 0, 1]]], np.int32)
    tokens = np.asarray([[[8, 8, 1, 0], [8, 0, 1, 2]]], np.int32)
    check_page_lists(jnp.asarray(ids), jnp.asarray(tokens), num_pages=7, page_size=8)
