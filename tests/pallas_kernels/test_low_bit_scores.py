"""Scores of low-bit pages: one body for every implementation, and what they must never do."""

import functools
import math
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from kvjax.pallas_kernels import low_bit_scores
from kvjax.pallas_kernels.low_bit_scores import tpu
from kvjax.pallas_kernels.low_bit_scores import xla as in_xla
from kvjax.pallas_kernels.mosaic.layout import pool_format
from kvjax.pallas_kernels.packed_bits import PLANES, float8_values, token_code
from kvjax.policies import LowBitKeys
from tests.pallas_kernels.conformance import TOLERANCE
from tests.pallas_kernels.races import WATCHED, assert_no_race

# Bits, page size, group, KV heads, head_dim, dtype, list width, cap of the scores.
CASES = (
    (3, 16, 3, 2, 64, "float32", 7, None),
    (2, 8, 1, 3, 80, "bfloat16", 20, 2.0),
    (4, 24, 4, 1, 256, "float16", 1, None),
    (3, 32, 20, 1, 128, "bfloat16", 150, None),
    (4, 128, 2, 2, 24, "float32", 3, 0.5),
)
TPU_CASES = (*CASES[:2], (4, 16, 4, 1, 256, "float32", 1, None), CASES[3])
IMPLEMENTATIONS = ("reference", "xla", "tpu", "gpu")
EACH = [
    (implementation, case)
    for implementation in IMPLEMENTATIONS
    for case in (TPU_CASES if implementation == "tpu" else CASES)
]


def packed(codes, bits):
    """Planes of codes [Hkv, N, P, D], one token after the other."""
    heads, pages, size, dim = codes.shape
    planes, below = {}, 0
    for name, wide in PLANES[bits].items():
        rows = size * wide // 8
        planes[name] = np.zeros((heads, pages, rows, dim), np.uint8)
        for token in range(size):
            field = (codes[:, :, token] >> below) % 2**wide
            planes[name][:, :, token % rows] |= (field << token // rows * wide).astype(np.uint8)
        below += wide
    return planes


def build(case, seed=0):
    """Five sequences, one without pages; what no list names is NaN, infinite, or any bits."""
    bits, size, group, kv_heads, dim, dtype, width, _ = case
    rng = np.random.default_rng(seed)
    counts = np.asarray([0, 1, width, max(width - 1, 0), width // 2])[:, None]
    # Each KV head has a list of its own, some of them shorter.
    counts = np.maximum(counts - np.arange(kv_heads) * (np.arange(5)[:, None] == 2), 0)
    num_pages = 5 * width + 5
    ids = rng.choice([num_pages, num_pages + 7, -1, 2**31 - 1], (5, kv_heads, width))
    listed = np.zeros((kv_heads, num_pages), bool)
    for row, head in np.ndindex(counts.shape):
        chosen = rng.choice(num_pages - 5, counts[row, head], replace=False)
        ids[row, head, : len(chosen)] = chosen
        listed[head, chosen] = True
    # What lies past a count may also be a page of another list, or of none.
    stale = np.arange(width) >= counts[..., None]
    ids = np.where(stale & (rng.random(ids.shape) < 0.3), num_pages - 1, ids)

    def small(shape, low):
        values = rng.integers(low, 120, shape).astype(np.uint8)  # float8 bits, all finite
        values = values.view(jnp.float8_e4m3fn.dtype)
        return np.where(listed[..., None], values, values.dtype.type(np.nan))

    once = (kv_heads, num_pages, dim)
    codes = rng.integers(0, 2**bits, (kv_heads, num_pages, size, dim))
    step, middle = small(once, 0), small(once, 0)
    middle = np.where(rng.random(once) < 0.5, middle, -middle)
    unit = np.exp2(rng.integers(-11, -8, (kv_heads, num_pages, 2)).astype(float))
    unit = np.where(listed[..., None], unit, rng.choice([np.nan, np.inf], unit.shape))
    arrays = {
        "q": jnp.asarray(rng.normal(size=(5, kv_heads * group, dim)), dtype),
        "pages": {
            **{name: jnp.asarray(plane) for name, plane in packed(codes, bits).items()},
            "step": jnp.asarray(step),
            "middle": jnp.asarray(middle),
            "unit": jnp.asarray(unit, jnp.bfloat16),
        },
        "page_ids": jnp.asarray(ids, jnp.int32),
        "page_counts": jnp.asarray(counts, jnp.int32),
    }
    unit = unit[:, :, None, :]
    steps = step.astype(np.float64)[:, :, None] * unit[..., :1]
    middles = middle.astype(np.float64)[:, :, None] * unit[..., 1:]
    return arrays, middles + steps * (codes - (2**bits - 1) / 2)


def expected(arrays, keys, scale, soft_cap):
    """For every query head, in float64, one page after the other."""
    q, ids = np.asarray(arrays["q"], np.float64), np.asarray(arrays["page_ids"])
    group = q.shape[1] // ids.shape[1]
    found = np.full((*q.shape[:2], ids.shape[2]), -np.inf)
    for row, head in np.ndindex(q.shape[:2]):
        kv_head = head // group
        for entry in range(int(arrays["page_counts"][row, kv_head])):
            scores = scale * (keys[kv_head, ids[row, kv_head, entry]] @ q[row, head])
            scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
            found[row, head, entry] = np.logaddexp.reduce(scores)
    return found


@functools.cache
def batch_and_answer(case):
    arrays, keys = build(case)
    return arrays, expected(arrays, keys, 1 / math.sqrt(case[4]), case[-1])


def run(implementation, arrays, interpret=None, **options):
    """The public function; it is made to call the Pallas kernels interpreted."""
    if implementation in ("reference", "xla"):
        function = functools.partial(low_bit_scores, implementation=implementation, **options)
        return jax.jit(function)(**arrays)
    module = import_module(f"kvjax.pallas_kernels.low_bit_scores.{implementation}")
    if interpret is None:
        interpret = pltpu.InterpretParams() if implementation == "tpu" else True
    kernel = getattr(module, f"low_bit_scores_{implementation}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_xla, "low_bit_scores_xla", functools.partial(kernel, interpret=interpret))
        return run("xla", arrays, **options)


def small_blocks(monkeypatch, tokens):
    for name in ("BLOCK_TOKENS", "FLOAT_BLOCK_TOKENS"):
        monkeypatch.setattr(in_xla, name, tokens)


def options_of(case):
    return {"bits": case[0], "soft_cap": case[-1]}


@pytest.mark.parametrize(("implementation", "case"), EACH, ids=str)
def test_equals_the_definition(implementation, case):
    arrays, wanted = batch_and_answer(case)
    scores = run(implementation, arrays, **options_of(case))
    assert scores.dtype == jnp.float32
    assert scores.shape == wanted.shape
    # bfloat16 holds what stands for a key exactly, so even its queries lose nothing.
    np.testing.assert_allclose(scores, wanted, TOLERANCE["float32"], TOLERANCE["float32"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bits", PLANES)
def test_keys_of_a_sketch_score_as_the_keys_it_stands_for(implementation, bits):
    rng = np.random.default_rng(bits)
    keys = rng.normal(size=(9, 2, 16, 64)) + 3 * rng.normal(size=(1, 2, 1, 64))
    sketch = LowBitKeys(bits)
    pages = sketch.build(jnp.asarray(keys, jnp.float32))
    ids = jnp.asarray(np.stack([rng.permutation(9) for _ in range(2)])[None], jnp.int32)
    arrays = {
        "q": jnp.asarray(rng.normal(size=(1, 6, 64)), jnp.float32),
        "pages": pages,
        "page_ids": ids,
        "page_counts": jnp.full((1, 2), 9, jnp.int32),
    }
    restored = np.asarray(sketch.keys(pages), np.float64).swapaxes(0, 1)
    scores = run(implementation, arrays, bits=bits, scale=0.1)
    np.testing.assert_allclose(scores, expected(arrays, restored, 0.1, None), 1e-5, 1e-5)


@pytest.mark.parametrize("implementation", ["reference", "xla"])  # kernels always get lists
def test_without_lists_all_pages_are_scored_in_order(implementation, monkeypatch):
    """Up to each count, in blocks of which the last overlaps; what lies past it may be NaN."""
    small_blocks(monkeypatch, 100)
    arrays, _ = build(CASES[0])
    counts = jnp.asarray([[7, 7], [0, 1], [3, 3], [8, 0], [2, 6]], jnp.int32)
    ids = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), (5, 2, 8))
    pages = {name: each[:, :8] for name, each in arrays["pages"].items()}
    for name in ("step", "middle", "unit"):
        whole = jnp.nan_to_num(pages[name].astype(jnp.float32), nan=1.0, posinf=1.0)
        pages[name] = whole.astype(pages[name].dtype).at[1, 7].set(jnp.nan)
    listed = arrays | {"pages": pages, "page_counts": counts, "page_ids": ids}
    wanted = run("reference", listed, bits=3)
    scores = run(implementation, listed | {"page_ids": None}, bits=3)
    assert np.isfinite(scores).sum() == 3 * counts.sum()
    np.testing.assert_allclose(scores, wanted, 1e-5, 1e-5)


@pytest.mark.parametrize("name", ["step", "middle", "unit"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_damage_is_seen_in_its_own_page_and_no_other(implementation, name):
    arrays, wanted = batch_and_answer(CASES[0])
    ids, counts = np.asarray(arrays["page_ids"]), np.asarray(arrays["page_counts"])
    page = ids[2, 1, 3]
    damaged = arrays["pages"][name].at[1, page, 1].set(jnp.nan)
    pages = arrays["pages"] | {name: damaged}
    scores = np.asarray(run(implementation, arrays | {"pages": pages}, bits=3))
    there = (ids == page) & (np.arange(7) < counts[..., None]) & (np.arange(2) == 1)[:, None]
    there = np.repeat(there, 3, axis=1)
    assert there.sum() >= 3
    np.testing.assert_array_equal(np.isnan(scores), there)
    np.testing.assert_allclose(scores[~there], wanted[~there], 1e-5, 1e-5)


def test_a_query_of_nan_is_its_own_sequences_business():
    arrays, wanted = batch_and_answer(CASES[0])
    broken = arrays | {"q": arrays["q"].at[3].set(jnp.nan)}
    for implementation in IMPLEMENTATIONS:
        scores = np.asarray(run(implementation, broken, bits=3))
        assert np.isnan(scores[3][wanted[3] > -np.inf]).all()
        np.testing.assert_allclose(scores[:3], wanted[:3], 1e-5, 1e-5)


def test_every_float8_is_decoded():
    every = np.arange(256)
    wanted = every.astype(np.uint8).view(jnp.float8_e4m3fn.dtype).astype(np.float32)
    found = float8_values(jnp.asarray(every, jnp.int32))
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found)[:127], np.signbit(wanted)[:127])


@pytest.mark.parametrize("bits", PLANES)
def test_one_tokens_code_comes_back(bits):
    codes = np.random.default_rng(0).integers(0, 2**bits, (2, 3, 16, 5))
    planes = {name: jnp.asarray(x, jnp.int32) for name, x in packed(codes, bits).items()}
    for token in range(16):
        np.testing.assert_array_equal(token_code(planes, token, bits), codes[:, :, token])


def test_blocks_without_pages_are_not_visited(monkeypatch):
    """Many blocks, of which the loop takes those that hold pages, whoever's they are."""
    small_blocks(monkeypatch, 32)
    arrays, wanted = batch_and_answer(CASES[1])
    scores = run("xla", arrays, **options_of(CASES[1]))
    np.testing.assert_allclose(scores, wanted, 1e-5, 1e-5)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpus_with_and_without_products_of_bfloat16_say_the_same(case, native, monkeypatch):
    monkeypatch.setattr(in_xla, "cpu_multiplies_bfloat16", lambda: native)
    arrays, wanted = batch_and_answer(case)
    scores = run("xla", arrays, **options_of(case))
    np.testing.assert_allclose(scores, wanted, 1e-5, 1e-5)


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_many_queries_score_as_few(case, monkeypatch):
    monkeypatch.setattr(in_xla, "FEW", 0)
    arrays, wanted = batch_and_answer(case)
    scores = run("xla", arrays, **options_of(case))
    np.testing.assert_allclose(scores, wanted, 1e-5, 1e-5)


def test_lists_that_exceed_scalar_memory_are_split(monkeypatch):
    arrays, wanted = batch_and_answer(CASES[0])
    monkeypatch.setattr(tpu, "SCALAR_WORDS", 3 * (tpu.BLOCK_PAGES + 1))
    np.testing.assert_allclose(run("tpu", arrays, bits=3), wanted, 1e-5, 1e-5)
    monkeypatch.setattr(tpu, "SCALAR_WORDS", tpu.BLOCK_PAGES)
    with pytest.raises(ValueError, match=r"page_ids has 7 entries a list.*use larger pages"):
        run("tpu", arrays, bits=3)


def test_no_race_between_copies_and_computation(capfd):
    arrays, wanted = batch_and_answer(CASES[3])

    def score():
        scores = run("tpu", arrays, WATCHED, bits=3)
        np.testing.assert_allclose(scores, wanted, 1e-5, 1e-5)

    assert_no_race(capfd, score)


@pytest.mark.parametrize(
    ("topology", "bits", "page_size", "heads", "kv_heads", "dim", "dtype"),
    [
        ("v5e:2x2", 3, 16, 32, 8, 128, jnp.bfloat16),
        ("v5p:2x2x1", 4, 16, 32, 8, 128, jnp.bfloat16),
        ("v6e:2x4", 2, 16, 32, 8, 128, jnp.bfloat16),
        ("v5e:2x2", 3, 16, 9, 3, 64, jnp.float32),
        ("v6e:2x4", 3, 8, 16, 8, 256, jnp.float32),
        ("v5p:2x2x1", 2, 64, 32, 32, 80, jnp.bfloat16),
        ("v5e:2x2", 4, 128, 8, 2, 64, jnp.bfloat16),
        ("v6e:2x4", 3, 24, 8, 2, 128, jnp.bfloat16),
    ],
    ids=str,
)
def test_compiles_for_a_tpu_without_unpacking_or_copying_the_pool(
    device, topology, bits, page_size, heads, kv_heads, dim, dtype
):
    sharding = SingleDeviceSharding(device(topology))

    def array(shape, dtype, sharding=sharding):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    num_pages = 2_097_152 // page_size
    once = array((kv_heads, num_pages, dim), jnp.float8_e4m3fn, pool_format(sharding, axes=3))
    pages = {"step": once, "middle": once, "unit": array((kv_heads, num_pages, 2), jnp.bfloat16)}
    for name, wide in PLANES[bits].items():
        rows = (kv_heads, num_pages, page_size * wide // 8, dim)
        pages[name] = array(rows, jnp.uint8, pool_format(sharding))
    function = functools.partial(tpu.low_bit_scores_tpu, bits=bits, scale=0.1, soft_cap=30.0)
    lowered = jax.jit(function).lower(
        array((8, heads, dim), dtype),
        pages,
        array((8, kv_heads, 200), jnp.int32),
        array((8, kv_heads), jnp.int32),
    )
    assert "tpu_custom_call" in lowered.as_text()
    temporary = lowered.compile().memory_analysis().temp_size_in_bytes
    assert temporary < once.size / 2  # bytes of the smallest part of the pool


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_lowers_for_cuda(case):
    arrays, _ = build(case)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    function = functools.partial(low_bit_scores, **options_of(case), implementation="gpu")
    gpu = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=gpu)):
        lowered = jax.jit(function).trace(**shapes).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@__gpu$xla.gpu.triton") == 1


POOL = build(CASES[0])[0]["pages"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bits": 5}, "bits is 5; it must be 2, 3 or 4"),
        ({"bits": True}, "bits is True"),
        ({"bits": 2}, r"pages holds \['codes', 'middle', 'step', 'top', 'unit'\]; 2-bit keys are"),
        ({"pages": jnp.zeros(3)}, "pages holds "),
        ({"q": jnp.zeros((4, 6, 64))}, r"so they must be \(4, 2\) and how many pages"),
        ({"q": jnp.zeros((5, 5, 64))}, "the query heads must be a multiple of the KV heads"),
        ({"q": jnp.zeros((5, 6, 80))}, r"q has head_dim 80 and pages\['step'\] 64"),
        ({"pages": POOL | {"step": POOL["step"][0]}}, r"pages\['step'\] has shape \(40, 64\)"),
        ({"pages": POOL | {"codes": POOL["codes"][:, :, :3]}}, "3 rows, 12 tokens of 3 bits"),
        ({"pages": POOL | {"codes": POOL["codes"][:, :, :1]}}, "from 8 to 128 tokens"),
        ({"pages": POOL | {"top": POOL["top"][:, :9]}}, r"pages\['top'\] is uint8 .* must be"),
        (
            {"pages": POOL | {"middle": POOL["middle"].astype(jnp.bfloat16)}},
            r"pages\['middle'\] is bfloat16 .* it must be float8_e4m3fn",
        ),
        ({"page_ids": jnp.zeros((5, 2, 0), jnp.int32)}, "at least one entry"),
        (
            {"page_ids": None, "page_counts": jnp.zeros((5, 1), jnp.int32)},
            r"page_ids has shape None and page_counts \(5, 1\)",
        ),
        ({"page_ids": jnp.zeros((5, 1, 7), jnp.int32)}, "broadcast what heads share"),
        ({"page_counts": jnp.zeros((5, 2), jnp.uint32)}, "page_counts is uint32; it must be int32"),
        ({"scale": -1}, "scale is -1"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0"),
        ({"implementation": "tpu"}, "of low_bit_scores cannot run: it needs a TPU"),
    ],
)
def test_bad_arguments_are_refused_by_name(changed, message):
    arguments = build(CASES[0])[0] | {"bits": 3}
    with pytest.raises(ValueError, match=message):
        low_bit_scores(**arguments | changed)


def test_a_pool_that_int32_cannot_address_is_refused():
    def shape(*sizes, dtype):
        return jax.ShapeDtypeStruct((1, 2**22, *sizes), dtype)

    once = shape(128, dtype=jnp.float8_e4m3fn)
    pages = {"codes": shape(8, 128, dtype=jnp.uint8), "step": once, "middle": once}
    pages["unit"] = shape(2, dtype=jnp.bfloat16)
    arrays = build(CASES[0])[0]
    arrays |= {"q": jnp.zeros((5, 4, 128)), "page_ids": arrays["page_ids"][:, :1]}
    arrays |= {"page_counts": arrays["page_counts"][:, :1], "pages": pages}
    with pytest.raises(ValueError, match=r"pages\['codes'\] has 4294967296 elements.*split it"):
        low_bit_scores(**arrays, bits=4)


def test_new_lists_do_not_compile_again():
    function = jax.jit(functools.partial(low_bit_scores, bits=3))
    for seed in range(3):
        function(**build(CASES[0], seed)[0])
    assert function._cache_size() == 1
