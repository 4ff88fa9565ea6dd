"""Scores of pages: one body for every implementation, and what they must never do."""

import functools
import math
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from kvjax.pallas_kernels import page_scores
from kvjax.pallas_kernels.mosaic.layout import pool_format
from kvjax.pallas_kernels.page_scores import tpu
from kvjax.pallas_kernels.page_scores import xla as in_xla
from tests.pallas_kernels.conformance import POISON, TOLERANCE
from tests.pallas_kernels.races import WATCHED, assert_no_race

KINDS = ("mean", "bounds")
# Group, KV heads, head_dim, dtype, table width.
CASES = (
    (3, 2, 64, "float32", 7),
    (1, 3, 80, "bfloat16", 20),
    (4, 1, 256, "bfloat16", 1),
    (20, 2, 128, "float32", 300),
)
IMPLEMENTATIONS = ("reference", "xla", "tpu", "gpu")


def build(case, kind, seed=0):
    """Five sequences, one without pages; every row that no table names is NaN or infinite."""
    group, kv_heads, dim, dtype, width = case
    rng = np.random.default_rng(seed)
    counts = np.asarray([0, 1, width, max(width - 1, 0), width // 2])
    num_pages = counts.sum() + 5
    pools = [rng.choice(POISON, (num_pages, kv_heads, dim)) for _ in KINDS]
    tables = rng.choice([num_pages, num_pages + 7, -1, 2**31 - 1], (len(counts), width))
    free = list(rng.permutation(num_pages))
    for row, count in enumerate(counts):
        tables[row, :count] = [free.pop() for _ in range(count)]
        bounds = np.sort(rng.normal(size=(2, count, kv_heads, dim)), axis=0)
        for pool, values in zip(pools, bounds, strict=True):
            pool[tables[row, :count]] = values
    # What lies past a count may also be a page of another sequence, or of none.
    stale = np.arange(width)[None] >= counts[:, None]
    tables = np.where(stale & (rng.random(tables.shape) < 0.3), free[0], tables)
    return {
        "q": jnp.asarray(rng.normal(size=(len(counts), kv_heads * group, dim)), dtype),
        "representatives": tuple(
            jnp.asarray(pool, dtype) for pool in pools[: 1 if kind == "mean" else 2]
        ),
        "block_tables": jnp.asarray(tables, jnp.int32),
        "page_counts": jnp.asarray(counts, jnp.int32),
    }


def expected(arrays, scale=None):
    """For every query head, in float64, one page after the other."""
    q = np.asarray(arrays["q"], np.float64)
    pools = [np.asarray(pool, np.float64) for pool in arrays["representatives"]]
    tables, counts = np.asarray(arrays["block_tables"]), np.asarray(arrays["page_counts"])
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    group = q.shape[1] // pools[0].shape[1]
    scores = np.full((*q.shape[:2], tables.shape[1]), -np.inf)
    for row, head in np.ndindex(q.shape[:2]):
        for entry in range(counts[row]):
            each = [q[row, head] * pool[tables[row, entry], head // group] for pool in pools]
            scores[row, head, entry] = scale * np.max(each, axis=0).sum()
    return scores


@functools.cache
def batch_and_answer(case, kind):
    arrays = build(case, kind)
    return arrays, expected(arrays)


def run(implementation, arrays, aggregate="none", interpret=None, **options):
    """The public function; it is made to call the Pallas kernels interpreted."""
    if implementation in ("reference", "xla"):
        function = functools.partial(page_scores, implementation=implementation)
        return jax.jit(functools.partial(function, aggregate=aggregate, **options))(**arrays)
    module = import_module(f"kvjax.pallas_kernels.page_scores.{implementation}")
    if interpret is None:
        interpret = pltpu.InterpretParams() if implementation == "tpu" else True
    kernel = getattr(module, f"page_scores_{implementation}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_xla, "page_scores_xla", functools.partial(kernel, interpret=interpret))
        return run("xla", arrays, aggregate, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_the_definition(implementation, case, kind):
    arrays, wanted = batch_and_answer(case, kind)
    scores = run(implementation, arrays)
    assert scores.dtype == jnp.float32
    assert scores.shape == wanted.shape
    np.testing.assert_allclose(scores, wanted, TOLERANCE["float32"], TOLERANCE["float32"])


@pytest.mark.parametrize("aggregate", ["max", "sum", "mean"])
def test_aggregates_are_of_the_query_heads_of_a_kv_head(aggregate):
    arrays, _ = batch_and_answer(CASES[0], "bounds")
    wanted = expected(arrays, scale=0.3)
    wanted = getattr(wanted.reshape(len(wanted), 2, 3, -1), aggregate)(axis=2)
    for implementation in ("reference", "xla"):
        scores = run(implementation, arrays, aggregate, scale=0.3)
        np.testing.assert_allclose(scores, wanted, 1e-5, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_damage_is_seen_in_its_own_page_and_no_other(implementation, kind):
    arrays, wanted = batch_and_answer(CASES[0], kind)
    page = int(arrays["block_tables"][2, 3])
    pools = arrays["representatives"]
    pools = (*pools[:-1], pools[-1].at[page, 1, 5].set(jnp.nan))
    scores = np.asarray(run(implementation, arrays | {"representatives": pools}))
    assert np.isnan(scores[2, 3:, 3]).all()
    sound = np.ones(scores.shape, bool)
    sound[2, 3:, 3] = False
    np.testing.assert_allclose(scores[sound], wanted[sound], 1e-5, 1e-5)


def test_no_key_within_the_bounds_scores_higher():
    rng = np.random.default_rng(2)
    keys = rng.normal(size=(6, 16, 64)).astype(np.float32)
    q = jnp.asarray(rng.normal(size=(1, 1, 64)), jnp.float32)
    bounds = tuple(jnp.asarray(f(keys, axis=1)[:, None]) for f in (np.min, np.max))
    tables = jnp.arange(6, dtype=jnp.int32)[None]
    counts = jnp.asarray([6], jnp.int32)
    upper = page_scores(q, bounds, tables, counts, aggregate="none", scale=1.0)
    best = (keys @ np.asarray(q[0, 0])).max(axis=1)
    assert (np.asarray(upper[0, 0]) >= best).all()


def test_blocks_without_pages_are_not_visited(monkeypatch):
    """Many blocks, of which the loop takes those that hold pages, whoever's they are."""
    monkeypatch.setattr(in_xla, "BLOCK_PAGES", 8)
    arrays, wanted = batch_and_answer(CASES[1], "bounds")
    np.testing.assert_allclose(run("xla", arrays), wanted, 1e-5, 1e-5)


def test_tables_that_exceed_scalar_memory_are_split(monkeypatch):
    arrays, wanted = batch_and_answer(CASES[0], "mean")
    monkeypatch.setattr(tpu, "SCALAR_WORDS", 2 * (tpu.BLOCK_PAGES + 1))
    np.testing.assert_allclose(run("tpu", arrays), wanted, 1e-5, 1e-5)
    monkeypatch.setattr(tpu, "SCALAR_WORDS", tpu.BLOCK_PAGES)
    with pytest.raises(ValueError, match=r"block_tables has 7 entries a row.*use larger pages"):
        run("tpu", arrays)


def test_no_race_between_copies_and_computation(capfd):
    arrays, wanted = batch_and_answer(CASES[3], "bounds")

    def score():
        np.testing.assert_allclose(run("tpu", arrays, interpret=WATCHED), wanted, 1e-5, 1e-5)

    assert_no_race(capfd, score)


@pytest.mark.parametrize(
    ("topology", "heads", "kv_heads", "dim", "dtype", "kind"),
    [
        ("v5e:2x2", 32, 8, 128, jnp.bfloat16, "bounds"),
        ("v5p:2x2x1", 32, 8, 128, jnp.bfloat16, "mean"),
        ("v6e:2x4", 32, 8, 128, jnp.bfloat16, "bounds"),
        ("v5e:2x2", 9, 3, 64, jnp.float32, "bounds"),
        ("v6e:2x4", 16, 8, 256, jnp.float32, "bounds"),
        ("v5p:2x2x1", 32, 32, 80, jnp.bfloat16, "bounds"),
    ],
    ids=str,
)
def test_compiles_for_a_tpu_without_a_copy_of_the_pool(
    device, topology, heads, kv_heads, dim, dtype, kind
):
    sharding = SingleDeviceSharding(device(topology))

    def array(shape, dtype, sharding=sharding):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    pool = array((65_536, kv_heads, dim), dtype, pool_format(sharding, axes=3))
    lowered = jax.jit(tpu.page_scores_tpu).lower(
        array((8, heads, dim), jnp.float32),
        (pool,) * (1 if kind == "mean" else 2),
        array((8, 2000), jnp.int32),
        array((8,), jnp.int32),
    )
    assert "tpu_custom_call" in lowered.as_text()
    stored = pool.size * pool.dtype.itemsize
    assert lowered.compile().memory_analysis().temp_size_in_bytes < stored / 10


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_lowers_for_cuda(kind):
    arrays = build(CASES[1], kind)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    function = functools.partial(page_scores, aggregate="max", implementation="gpu")
    gpu = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=gpu)):
        lowered = jax.jit(function).trace(**shapes).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": jnp.zeros((4, 6, 64))}, "q has 4 rows, and so must they"),
        ({"q": jnp.zeros((5, 5, 64))}, "the query heads a multiple of the KV heads"),
        ({"q": jnp.zeros((5, 6, 80))}, "head_dim must be equal"),
        ({"representatives": jnp.zeros((3, 2, 64))}, r"it must be a tuple, \(mean,\) or"),
        ({"representatives": ()}, r"it must be a tuple, \(mean,\) or"),
        ({"representatives": (jnp.zeros((3, 64)),)}, r"representatives\[0\] has shape \(3, 64\)"),
        (
            {"representatives": (jnp.zeros((3, 2, 64)), jnp.zeros((4, 2, 64)))},
            "low and high must be alike",
        ),
        ({"block_tables": jnp.zeros((5, 0), jnp.int32)}, "at least one entry"),
        ({"page_counts": jnp.zeros(5, jnp.uint32)}, "page_counts is uint32; it must be int32"),
        ({"aggregate": "median"}, "aggregate is 'median'; it must be one of max, sum, mean, none"),
        ({"scale": -1}, "scale is -1"),
        ({"implementation": "tpu"}, "of page_scores cannot run: it needs a TPU"),
    ],
)
def test_bad_arguments_are_refused_by_name(changed, message):
    arguments = build(CASES[0], "mean") | {"aggregate": "max"}
    with pytest.raises(ValueError, match=message):
        page_scores(**arguments | changed)


def test_new_tables_do_not_compile_again():
    function = jax.jit(functools.partial(page_scores, aggregate="max"))
    pages = jax.ShapeDtypeStruct((5, 7), jnp.int32)
    for seed in range(3):
        arrays = build(CASES[0], "mean", seed)
        assert arrays["block_tables"].shape == pages.shape
        function(**arrays)
    assert function._cache_size() == 1
