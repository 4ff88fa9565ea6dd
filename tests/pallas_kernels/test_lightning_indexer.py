"""Scores of a lightning indexer and the choice by them: one body for every implementation."""

import dataclasses
import functools
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from kvjax.pallas_kernels import lightning_scores, ragged_lightning_scores, top_tokens
from kvjax.pallas_kernels.lightning_indexer import tiles, tpu
from kvjax.pallas_kernels.lightning_indexer import xla as in_xla
from kvjax.pallas_kernels.lightning_indexer.float4 import float4_codes, float4_values
from kvjax.pallas_kernels.mosaic.layout import pool_format
from tests.pallas_kernels.conformance import POISON, TOLERANCE
from tests.pallas_kernels.races import WATCHED, assert_no_race

IMPLEMENTATIONS = ("reference", "xla", "tpu", "gpu")
FLOAT8, FLOAT4 = "float8_e4m3fn", "float4_e2m1fn"
MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
LEVELS = np.asarray([*MAGNITUDES, *(-one for one in MAGNITUDES)])  # of float4_e2m1fn
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@dataclasses.dataclass(frozen=True)
class Case:
    ragged: bool
    page_size: int
    heads: int
    dim: int
    keys: str
    q: str = "float32"
    long: int = 0  # pages of one more sequence


CASES = (
    Case(False, 16, 5, 64, "bfloat16", "bfloat16"),
    Case(True, 8, 3, 128, FLOAT8, long=70),
    Case(True, 32, 2, 64, "float32"),
    Case(True, 16, 3, 128, FLOAT4, "bfloat16", long=70),
)
XLA_CASES = (Case(False, 12, 64, 24, "float16", "float16"), Case(False, 17, 1, 80, FLOAT8))
XLA_CASES += (Case(False, 24, 2, 24, FLOAT4),)
EACH = [(name, case) for case in CASES for name in IMPLEMENTATIONS]
EACH += [(name, case) for case in XLA_CASES for name in ("reference", "xla")]


def build(case, seed=0):
    """A hostile batch, and what each query sees: (arrays by name, [(table, tokens)])."""
    rng = np.random.default_rng(seed)
    size = case.page_size
    # (cached tokens, queries): whole prompts, chunks, decodes, rows with neither.
    batch = [(2 * size + 1, size + 3), (0, 0), (5, 5), (size, 0), (2 * size, 1), (1, 1)]
    batch += [(case.long * size - 1, 9)] * bool(case.long)
    lengths, queries = rng.permutation(batch).T
    if not case.ragged:
        queries = np.ones_like(queries)
    needed = -(-lengths // size)
    num_pages = needed.sum() + 5
    free = list(rng.permutation(num_pages))
    tables = rng.choice([num_pages, num_pages + 7, free.pop()], (len(lengths), needed.max() + 1))
    keys = rng.choice(POISON, (num_pages, size, case.dim))
    scales = rng.choice(POISON, (num_pages, size))
    for row, length in enumerate(lengths):
        tables[row, : needed[row]] = [free.pop() for _ in range(needed[row])]
        for slot in range(length):
            at = tables[row, slot // size], slot % size
            keys[at], scales[at] = rng.normal(size=case.dim), rng.uniform(0.01, 2)
    sees = [
        (tables[row], length - count + query + 1 if case.ragged else length)
        for row, (length, count) in enumerate(zip(lengths, queries, strict=True))
        for query in range(count)
    ]
    sees += [(tables[0], 0)] * (3 * case.ragged)  # padding
    with np.errstate(over="ignore"):
        arrays = {
            "q": jnp.asarray(rng.normal(size=(len(sees), case.heads, case.dim)), case.q),
            "weights": jnp.asarray(rng.normal(size=(len(sees), case.heads)), jnp.float32),
            "block_tables": jnp.asarray(tables, jnp.int32),
        }
        if case.keys == FLOAT4:
            codes = rng.integers(0, 16, keys.shape)
            low, high = np.split(codes, 2, axis=1)
            arrays["keys"] = jnp.asarray(low | high << 4, jnp.uint8)
        else:
            arrays["keys"] = jnp.asarray(keys, jnp.float32).astype(case.keys)
    if case.keys in (FLOAT8, FLOAT4):
        arrays["key_scales"] = jnp.asarray(scales, jnp.float32)
    lengths = jnp.asarray(lengths, jnp.int32)
    if case.ragged:
        starts = np.concatenate([[0], np.cumsum(queries)])
        return arrays | {"kv_lengths": lengths, "cu_q_lengths": jnp.asarray(starts, "int32")}, sees
    return arrays | {"lengths": lengths}, sees


def expected(arrays, sees, scale):
    """In float64, one query after the other."""
    q, weights = (np.asarray(arrays[name], np.float64) for name in ("q", "weights"))
    keys = np.asarray(arrays["keys"])
    if keys.dtype == np.uint8:
        keys = LEVELS[np.concatenate([keys & 15, keys >> 4], axis=1)]
    keys = keys.astype(np.float64)
    if "key_scales" in arrays:
        with np.errstate(invalid="ignore"):
            keys = keys * np.asarray(arrays["key_scales"], np.float64)[..., None]
    pages, size, _ = keys.shape
    scores = np.full((len(sees), arrays["block_tables"].shape[1] * size), -np.inf)
    for row, (table, tokens) in enumerate(sees):
        held = keys[np.clip(table, 0, pages - 1)].reshape(-1, keys.shape[2])[:tokens]
        products = np.maximum(held @ q[row].T, 0)
        scores[row, :tokens] = scale * products @ weights[row]
    return scores


@functools.cache
def batch_and_answer(case):
    arrays, sees = build(case)
    return arrays, sees, expected(arrays, sees, 0.3)


def run(implementation, case, arrays, interpret=None):
    """The public function; it is made to call the Pallas kernels interpreted."""
    public = ragged_lightning_scores if case.ragged else lightning_scores
    if implementation in ("reference", "xla"):
        return quick(functools.partial(public, scale=0.3, implementation=implementation))(**arrays)
    module = import_module(f"kvjax.pallas_kernels.lightning_indexer.{implementation}")
    if interpret is None:
        interpret = pltpu.InterpretParams() if implementation == "tpu" else True
    kernel = getattr(module, f"lightning_scores_{implementation}")
    with pytest.MonkeyPatch.context() as patch:
        kernel = functools.partial(kernel, interpret=interpret)
        patch.setattr(in_xla, "lightning_scores_xla", kernel)
        return run("xla", case, arrays)


def assert_close(scores, wanted, rows=slice(None)):
    tolerance = TOLERANCE["float32"]
    np.testing.assert_allclose(np.asarray(scores)[rows], wanted[rows], tolerance, tolerance)


@pytest.mark.parametrize(("implementation", "case"), EACH, ids=str)
def test_equals_the_definition(implementation, case):
    arrays, _, wanted = batch_and_answer(case)
    scores = run(implementation, case, arrays)
    assert scores.dtype == jnp.float32
    assert scores.shape == wanted.shape
    assert_close(scores, wanted)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_damage_is_seen_in_its_own_token_and_query_and_nowhere_else(implementation):
    case = CASES[1]
    arrays, sees, wanted = batch_and_answer(case)
    victim = int(np.argmax([tokens for _, tokens in sees]))
    table, tokens = sees[victim]
    page, slot = table[3], 2
    arrays = arrays | {
        "keys": arrays["keys"].at[page, slot, 5].set(jnp.nan),
        "q": arrays["q"].at[victim, 1, 7].set(jnp.nan),
    }
    scores = np.asarray(run(implementation, case, arrays))
    assert np.isnan(scores[victim, :tokens]).all()
    hit = np.zeros(scores.shape, bool)
    hit[victim, :tokens] = True
    for row, (other, seen) in enumerate(sees):
        for entry in np.flatnonzero(other == page):
            at = entry * case.page_size + slot
            hit[row, at] |= at < seen
    assert hit.sum() > tokens
    assert np.isnan(scores[hit]).all()
    np.testing.assert_allclose(scores[~hit], wanted[~hit], 1e-5, 1e-5)


def test_float4_codes_are_of_the_nearest_numbers():
    values = np.random.default_rng(0).uniform(-6, 6, 3000).astype(np.float32)
    values[:16] = LEVELS
    codes = np.asarray(float4_codes(jnp.asarray(values)))
    held = np.asarray(float4_values(jnp.asarray(codes, jnp.int32)))
    np.testing.assert_array_equal(held, LEVELS[codes])
    np.testing.assert_array_equal(held[:16], values[:16])
    nearest = np.abs(values[:, None] - LEVELS).min(axis=1)
    np.testing.assert_allclose(np.abs(held - values), nearest, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_chunks_see_what_one_query_at_a_time_sees(rows, monkeypatch):
    """A causal mask by absolute positions, whatever the tiles of queries are."""
    monkeypatch.setattr(tiles, "TILE_ROWS", rows)
    arrays, _, wanted = batch_and_answer(CASES[2])
    assert_close(run("xla", CASES[2], arrays), wanted)


def test_blocks_without_tokens_are_not_visited(monkeypatch):
    """Keys of pages that do not count are NaN, which damage the blocks that are visited."""
    monkeypatch.setattr(in_xla, "BLOCK_TOKENS", 16)  # two pages
    counts, width, size = np.asarray([3, 0, 5]), 7, 8
    counted = np.arange(width) < counts[:, None]
    visited = np.arange(width) < -(-counts[:, None] // 2) * 2
    keys = np.ones((3 * width, size, 16), np.float32)
    keys[~counted.reshape(-1)] = np.nan
    ids = jnp.arange(3 * width, dtype=jnp.int32).reshape(3, width)
    q, weights = jnp.ones((3, 2, 4, 16)), jnp.ones((3, 2, 4))
    score = quick(in_xla.lightning_scores_xla)
    scores = score(q, weights, jnp.asarray(keys), None, ids, jnp.asarray(counts, jnp.int32))
    by_page = np.asarray(scores).reshape(3, 2, width, size)
    damaged = np.broadcast_to((visited & ~counted)[:, None, :, None], by_page.shape)
    np.testing.assert_array_equal(np.isnan(by_page), damaged)
    assert damaged.any()
    assert (by_page.swapaxes(1, 2)[counted] == 64).all()


def lexsorted(scores, visible, k):
    """The choice by a total order: score down, place up; NaN is -inf and -0 is 0."""
    rank = np.where(np.isnan(scores), -np.inf, scores) + 0.0
    lists = np.full((len(scores), k), scores.shape[1])
    for row, seen in enumerate(visible):
        order = np.lexsort((np.arange(seen), -rank[row, :seen]))[:k]
        lists[row, : len(order)] = order
    return lists


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("k", [1, 2048, 7000])
def test_a_choice_is_exact_and_ties_go_to_the_earlier_token(implementation, k):
    """Equal scores by the thousand, of both zeros, of infinities and NaN; K above the context."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(8, 6000)).astype(np.float32)
    scores[0] = 0.25
    scores[1] = rng.choice([-1.0, 0.5, 2.0], 6000)
    scores[2] = rng.choice([0.0, -0.0], 6000)
    scores[3, :5000] = scores[3, 7]
    scores[4] = rng.choice([np.nan, np.inf, -np.inf, 1.0], 6000)
    scores[5] = np.nan
    visible = np.asarray([6000, 5999, 6000, 5500, 6000, 4000, 3, 0], np.int32)
    choose = functools.partial(top_tokens, k=k, implementation=implementation)
    choice = quick(choose)(jnp.asarray(scores), jnp.asarray(visible))
    np.testing.assert_array_equal(choice.token_ids, lexsorted(scores, visible, k))
    np.testing.assert_array_equal(choice.counts, np.minimum(visible, k))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": jnp.zeros((6, 5))}, r"q has shape \(6, 5\); it must be \[T, Hi, Di\]"),
        ({"q": jnp.zeros((5, 5, 64), "bfloat16")}, r"weights is float32 \(6, 5\); it must be"),
        ({"weights": jnp.zeros((6, 5), "bfloat16")}, "weights is bfloat16"),
        ({"keys": jnp.zeros((9, 16, 32))}, "q has head_dim 64 and keys 32; they must be equal"),
        ({"keys": jnp.zeros((9, 4, 64))}, r"page_size \(axis 1 of keys\) is 4; it must be from 8"),
        ({"keys": jnp.zeros((9, 16, 64), FLOAT8)}, "float8_e4m3fn and key_scales is None"),
        ({"keys": jnp.zeros((9, 16, 64), "int8")}, "keys is int8; it must be float32"),
        ({"key_scales": jnp.zeros((9, 16))}, "keys is bfloat16 and key_scales is given"),
        ({"lengths": jnp.zeros(5, "int32")}, "lengths has shape .*block_tables has 6 rows"),
        ({"block_tables": jnp.zeros((6, 0), "int32")}, "every axis needs at least one entry"),
        ({"scale": 0.0}, "scale is 0.0; it must be finite and above 0"),
        ({"implementation": "tpu"}, "of lightning_indexer cannot run: it needs a TPU"),
        (
            {"keys": jax.ShapeDtypeStruct((2**22, 16, 64), jnp.float32)},
            "keys has 4194304 pages.*at most 2097151 pages",
        ),
    ],
)
def test_bad_arguments_are_refused_by_name(changed, message):
    arrays, _, _ = batch_and_answer(CASES[0])
    with pytest.raises(ValueError, match=message):
        lightning_scores(**{"scale": 0.3} | arrays | changed)


def test_bad_choices_are_refused_by_name():
    scores, visible = jnp.zeros((2, 5)), jnp.zeros(2, jnp.int32)
    for changed, message in (
        ({"k": 0}, "k is 0; it must be an integer, at least 1"),
        ({"scores": jnp.zeros((2, 5), "bfloat16")}, "scores is bfloat16"),
        ({"visible": jnp.zeros(3, jnp.int32)}, r"visible has shape \(3,\); scores has 2 rows"),
        ({"implementation": "tpu"}, "implementation is 'tpu'; it must be None, 'reference' or"),
    ):
        with pytest.raises(ValueError, match=message):
            top_tokens(**{"scores": scores, "visible": visible, "k": 3} | changed)


def test_no_race_between_copies_and_computation(capfd):
    arrays, _, wanted = batch_and_answer(CASES[1])

    def score():
        assert_close(run("tpu", CASES[1], arrays, WATCHED), wanted)

    assert_no_race(capfd, score)


def test_tables_that_exceed_scalar_memory_are_split(monkeypatch):
    arrays, _, wanted = batch_and_answer(CASES[0])
    monkeypatch.setattr(tpu, "SCALAR_WORDS", 2 * (32 + 1))
    assert_close(run("tpu", CASES[0], arrays), wanted)
    monkeypatch.setattr(tpu, "SCALAR_WORDS", 32)
    with pytest.raises(ValueError, match=r"block_tables has 4 entries a row.*use larger pages"):
        run("tpu", CASES[0], arrays)


HEADS, DIM, CONTEXT = 64, 128, 131_072  # of DeepSeek-V3.2


def released(ragged, keys, page_size, array, pool):
    """A call's arguments by name: 8 contexts of 128k tokens fill the pool."""
    rows, width = 4 + 60 * ragged, CONTEXT // page_size
    float4 = keys == FLOAT4
    stored, kind = (page_size // 2, jnp.uint8) if float4 else (page_size, jnp.dtype(keys))
    arguments = {
        "q": array((rows, HEADS, DIM), jnp.bfloat16),
        "weights": array((rows, HEADS), jnp.float32),
        "keys": pool((8 * width, stored, DIM), kind),
        "block_tables": array((4, width), jnp.int32),
    }
    if keys in (FLOAT8, FLOAT4):
        arguments["key_scales"] = array((8 * width, page_size), jnp.float32)
    if ragged:
        ends = {"kv_lengths": array((4,), jnp.int32), "cu_q_lengths": array((5,), jnp.int32)}
        return arguments | ends
    return arguments | {"lengths": array((4,), jnp.int32)}


@pytest.mark.parametrize(
    ("topology", "ragged", "keys", "page_size"),
    [
        ("v5e:2x2", False, FLOAT8, 64),
        ("v5e:2x2", True, "bfloat16", 64),
        ("v6e:2x4", False, "bfloat16", 16),
        ("v5p:2x2x1", True, FLOAT8, 128),
        ("v5e:2x2", False, FLOAT4, 64),
    ],
    ids=str,
)
def test_compiles_for_a_tpu_without_a_copy_of_the_pool(device, topology, ragged, keys, page_size):
    sharding = SingleDeviceSharding(device(topology))
    array = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    pool = functools.partial(jax.ShapeDtypeStruct, sharding=pool_format(sharding, axes=3))
    arguments = released(ragged, keys, page_size, array, pool)
    public = ragged_lightning_scores if ragged else lightning_scores
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_xla, "lightning_scores_xla", tpu.lightning_scores_tpu)
        function = functools.partial(public, scale=0.01, implementation="xla")
        lowered = jax.jit(function).lower(**arguments)
    assert "tpu_custom_call" in lowered.as_text()
    stored = arguments["keys"].size * arguments["keys"].dtype.itemsize
    rows, tiled = arguments["q"].shape[0], 1 if not ragged else 2
    scores = 4 * CONTEXT * rows * tiled
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < stored / 10 + 2 * scores


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("keys", [FLOAT8, FLOAT4, "bfloat16"])
def test_lowers_for_cuda(keys):
    arguments = released(True, keys, 64, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct)
    function = functools.partial(ragged_lightning_scores, scale=0.01, implementation="gpu")
    gpu = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=gpu)):
        lowered = jax.jit(function).trace(**arguments).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@__gpu$xla.gpu.triton") == 1


def test_xla_copies_no_pool():
    """Neither a missing axis nor float8 makes XLA take the whole pool through another array."""
    for keys in (FLOAT8, FLOAT4, "bfloat16"):
        arguments = released(False, keys, 64, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct)
        function = functools.partial(lightning_scores, scale=0.01, implementation="xla")
        level = {"xla_backend_optimization_level": 1}
        compiled = jax.jit(function).lower(**arguments).compile(compiler_options=level)
        scores = 4 * CONTEXT * arguments["q"].shape[0]
        assert compiled.memory_analysis().temp_size_in_bytes < 3 * scores + 2**24


def test_new_tables_do_not_compile_again():
    function = jax.jit(functools.partial(ragged_lightning_scores, scale=0.3))
    for seed in range(3):
        arrays, _ = build(CASES[2], seed)
        function(**arrays)
    assert function._cache_size() == 1
