"""Attention in float8: one body for every implementation, and what they must never do."""

import dataclasses
import functools
import math
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from kvjax.formats import float8, int8
from kvjax.pallas_kernels import float8_paged_attention, paged_attention
from kvjax.pallas_kernels.float8_attention import tpu
from kvjax.pallas_kernels.float8_attention import xla as in_xla
from kvjax.pallas_kernels.float8_attention.hopper import add_products
from kvjax.pallas_kernels.mosaic.layout import pool_format
from tests.pallas_kernels.conformance import TOLERANCE
from tests.pallas_kernels.float8_batches import (
    FLOAT8,
    add_exactly,
    add_on_hopper,
    attend,
    instruction,
    packed,
    rounded,
)
from tests.pallas_kernels.races import WATCHED, assert_no_race


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape; `static` shares one scale of everything, `long` adds a sequence of many tiles."""

    page_size: int = 16
    head_dim: int = 64
    v_head_dim: int | None = None
    kv_heads: int = 2
    group: int = 3
    dtype: str = "float32"
    static: bool = False
    long: bool = False
    flush_every: int | None = 1

    def __str__(self):
        changed = (f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        return ",".join(f"{f.name}={getattr(self, f.name)}" for f in changed) or "plain"


CASES = (
    Case(),
    Case(page_size=8, head_dim=128, group=4, kv_heads=1, long=True),
    Case(page_size=128, head_dim=256, group=1, flush_every=2, long=True),
    Case(page_size=24, head_dim=80, v_head_dim=64, static=True, long=True, flush_every=None),
    Case(dtype="bfloat16", page_size=64, head_dim=128, group=20, kv_heads=1, static=True),
)
HOPPER = Case(24, 32, 8, kv_heads=1, group=2, static=True, long=True)
IMPLEMENTATIONS = ("reference", "xla", "tpu", "gpu")


def build(case, seed=0):
    """A batch of several lengths, and the yardstick's arguments, row by row and head by head.

    What no sequence owns, or may see, is NaN: codes and scales.
    """
    rng = np.random.default_rng(seed)
    size, heads = case.page_size, case.kv_heads
    tile = max(1, 128 // size) * size
    lengths = [0, 1, size, 2 * size + 1, *([3 * tile + size + 3] if case.long else [])]
    lengths = rng.permutation(lengths)
    needed = -(-lengths // size)
    width, num_pages = needed.max() + 1, needed.sum() + 5
    free = list(rng.permutation(num_pages))
    tables = rng.choice([num_pages, num_pages + 7, free[0]], (len(lengths), width))
    owned = np.zeros((num_pages, size), bool)
    for row, length in enumerate(lengths):
        for entry in range(needed[row]):
            tables[row, entry] = free.pop()
            owned[tables[row, entry], : length - entry * size] = True

    def pool(dim, spread):
        codes = np.clip(rng.normal(size=(num_pages, heads, size, dim)) * 100, -448, 448)
        codes = np.where(owned[:, None, :, None], codes, np.nan).astype(FLOAT8)
        if case.static:
            return packed(codes, np.full((1, 1, 1, 1), 0.017, np.float32), shared=True)
        scale = 0.01 * np.exp(rng.normal(size=(num_pages, heads, 1, 1)) * spread)
        scale = np.where(owned.any(axis=1)[:, None, None, None], scale, np.nan)
        return packed(codes, scale.astype(np.float32).astype(jnp.bfloat16))

    return {
        "q": jnp.asarray(
            rng.normal(size=(len(lengths), heads * case.group, case.head_dim)) * 2, case.dtype
        ),
        "k_pages": pool(case.head_dim, 0.3),
        "v_pages": pool(case.v_head_dim or case.head_dim, 1.0),
        "block_tables": jnp.asarray(tables, jnp.int32),
        "lengths": jnp.asarray(lengths, jnp.int32),
    }


def expected(arrays, add=add_exactly, scale=None):
    """What the words of the contract come to: out, log-sum-exp, nearness to a tie."""
    q, lengths = np.asarray(arrays["q"], np.float32), np.asarray(arrays["lengths"])
    pools = arrays["k_pages"], arrays["v_pages"]
    codes = [np.asarray(pool.planes["codes"]).astype(np.float64) for pool in pools]
    scales = [
        np.broadcast_to(np.asarray(pool.scale, np.float64), (*pool.shape[:2], 1, 1))
        for pool in pools
    ]
    size, group = pools[0].shape[2], q.shape[1] // pools[0].shape[1]
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    out, lse, nearest = np.zeros((*q.shape[:2], pools[1].shape[3])), np.zeros(q.shape[:2]), 1.0
    for row, head in np.ndindex(*q.shape[:2]):
        length = lengths[row]
        used = np.asarray(arrays["block_tables"])[row, : -(-length // size)]
        tokens = [c[used, head // group].reshape(-1, c.shape[3])[:length] for c in codes]
        each = [np.repeat(s[used, head // group, 0, 0], size)[:length] for s in scales]
        tile = max(1, 128 // size) * size
        out[row, head], lse[row, head], near = attend(
            q[row, head], *tokens, *each, scale, tile, add
        )
        nearest = min(nearest, near)
    return out, lse, nearest


@functools.cache
def batch_and_answer(case):
    """The first batch in which float32 and float64 round every weight alike, and its answer."""
    for seed in range(50):
        arrays = build(case, seed)
        out, lse, nearest = expected(arrays)
        if nearest > 2e-6:
            return arrays, out, lse
    raise AssertionError("no batch without a tie")


def run(implementation, arrays, interpret=None, level=None, **options):
    """The public function; it is made to call the Pallas kernels interpreted."""
    if implementation in ("reference", "xla"):
        function = functools.partial(float8_paged_attention, implementation=implementation)
        function = functools.partial(function, **options)
        # XLA as users get it. The others are not what runs fast anywhere: compile them quickly.
        level = 0 if implementation == "reference" else level
        quick = None if level is None else {"xla_backend_optimization_level": level}
        return jax.jit(function, compiler_options=quick)(**arrays)
    module = import_module(f"kvjax.pallas_kernels.float8_attention.{implementation}")
    if interpret is None:
        interpret = pltpu.InterpretParams() if implementation == "tpu" else True
    kernel = getattr(module, f"float8_paged_attention_{implementation}")

    def interpreted(*arguments, accumulator, **keywords):
        assert accumulator == "native"
        return kernel(*arguments, interpret=interpret, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_xla, "float8_paged_attention_xla", interpreted)
        return run("xla", arrays, level=0, **options)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_the_definition(implementation, case):
    arrays, out, lse = batch_and_answer(case)
    result = run(implementation, arrays, flush_every=case.flush_every)
    assert result.out.dtype == case.dtype
    assert result.lse.dtype == jnp.float32
    assert result.page_max is None
    tolerance = TOLERANCE[case.dtype]
    np.testing.assert_allclose(result.out.astype(jnp.float32), out, tolerance, tolerance)
    np.testing.assert_allclose(result.lse, lse, 1e-5, 1e-5)
    assert not np.asarray(result.out, np.float32)[np.asarray(arrays["lengths"]) == 0].any()


@pytest.mark.parametrize("name", ["k_pages", "v_pages"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_damage_is_seen_in_its_own_sequence_and_no_other(implementation, name):
    arrays, out, _ = batch_and_answer(CASES[0])
    row = int(np.argmax(arrays["lengths"]))
    page = int(arrays["block_tables"][row, 0])
    pool = arrays[name]
    codes = pool.planes["codes"].at[page, 1, 2].set(jnp.nan)
    damaged = arrays | {name: dataclasses.replace(pool, planes={"codes": codes})}
    found = np.asarray(run(implementation, damaged).out)
    hit = np.zeros(found.shape[:2], bool)
    hit[row, 3:] = True
    assert np.isnan(found[hit]).all()
    np.testing.assert_allclose(found[~hit], out[~hit], 1e-5, 1e-5)


def test_an_h100_adds_as_the_model_does_in_whole_numbers():
    """Bit by bit, on products of every magnitude, subnormal ones and 0 among them."""
    rng = np.random.default_rng(0)
    weights = rounded(256 * np.exp2(-rng.uniform(0, 20, (40, 3, 64))))
    values = rng.normal(size=(40, 64, 5)) * np.exp2(rng.uniform(-9, 8, (40, 64, 5)))
    values = rounded(np.clip(values, -448, 448))
    sums = (rng.normal(size=(40, 3, 5)) * np.exp2(rng.uniform(-8, 18, (40, 3, 5)))).astype(
        np.float32
    )
    sums[::7] = 0
    found = jax.jit(add_products)(sums, *(x.astype(np.float32) for x in (weights, values)))
    for at in np.ndindex(sums.shape):
        batch, row, column = at
        wanted = float(sums[at])
        for step in (slice(32), slice(32, 64)):
            wanted = instruction(wanted, weights[batch, row, step], values[batch, step, column])
        assert found[at] == wanted


@pytest.mark.parametrize("flush_every", [1, 2, None])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_hoppers_sums_are_flushed_after_their_tiles(implementation, flush_every):
    arrays, _, _ = batch_and_answer(HOPPER)
    out, lse, _ = expected(arrays, add_on_hopper(flush_every))
    result = run(implementation, arrays, flush_every=flush_every, accumulator="hopper")
    # A sum that was scaled down is cut, and where it is cut float32 and float64 may differ by one.
    np.testing.assert_allclose(result.out, out, 1e-3, 1e-4)
    np.testing.assert_allclose(result.lse, lse, 1e-5, 1e-5)


@pytest.mark.parametrize("static", [False, True])
def test_pages_that_a_format_encoded_are_attended_nearly_as_their_values(static):
    """What float8 queries and weights cost, beside what float8 pages already did."""
    rng = np.random.default_rng(3)
    keys, values = (jnp.asarray(rng.normal(size=(40, 2, 16, 64)), jnp.float32) for _ in range(2))
    chosen = float8(scale=0.01 if static else None)

    @jax.jit
    def distance(q, keys, values):
        pools = chosen.keys.encode(keys, first), chosen.values.encode(values, first)
        tables, lengths = jnp.arange(40, dtype=jnp.int32)[None], jnp.asarray([635], jnp.int32)
        exact = paged_attention(q, *pools, tables, lengths).out
        off = float8_paged_attention(q, *pools, tables, lengths).out - exact
        return jnp.linalg.norm(off) / jnp.linalg.norm(exact)

    first = jnp.arange(40, dtype=jnp.int32) * 16
    q = jnp.asarray(rng.normal(size=(1, 6, 64)), jnp.float32)
    assert 0.01 < distance(q, keys, values) < 0.05


def test_weights_are_rounded_as_jax_rounds():
    every = np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float32)
    every = np.sort(every[every >= 0])
    every = every[every <= 256]
    middles = (every[1:] + every[:-1]) / 2
    near = np.concatenate([every, middles, np.nextafter(middles, 0), np.nextafter(middles, 256)])
    found = jax.jit(tpu._float8)(jnp.asarray(near, jnp.float32))
    np.testing.assert_array_equal(found, rounded(near))
    assert np.isnan(tpu._float8(jnp.asarray(np.nan, jnp.float32)))


def test_tables_that_exceed_scalar_memory_are_split(monkeypatch):
    arrays, out, _ = batch_and_answer(CASES[0])
    monkeypatch.setattr(tpu, "SCALAR_WORDS", 3 * (8 + 1))  # a tile has 8 pages
    np.testing.assert_allclose(run("tpu", arrays).out, out, 1e-5, 1e-5)
    monkeypatch.setattr(tpu, "SCALAR_WORDS", 8)
    with pytest.raises(ValueError, match=r"block_tables has 4 entries a row.*use larger pages"):
        run("tpu", arrays)


def test_no_race_between_copies_and_computation(capfd):
    arrays, out, _ = batch_and_answer(CASES[1])

    def attend_watched():
        np.testing.assert_allclose(run("tpu", arrays, interpret=WATCHED).out, out, 1e-5, 1e-5)

    assert_no_race(capfd, attend_watched)


@pytest.mark.parametrize(
    ("kind", "operand"),
    [("TPU v5 lite", jnp.bfloat16), ("TPU v6 lite", jnp.bfloat16), ("TPU7x", jnp.float8_e4m3fn)],
)
def test_a_tpu_multiplies_float8_where_it_can(kind, operand):
    """Elsewhere as bfloat16, in which every code is exact."""
    function = functools.partial(tpu.float8_paged_attention_tpu, scale=0.1, flush_every=1)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(kind, 1, "tpu"))):
        traced = jax.make_jaxpr(function)(**build(CASES[0]))
    assert operands_of_products(traced.jaxpr) == [jnp.dtype(operand)] * 4


def operands_of_products(jaxpr):
    """The dtypes that a kernel's products multiply, those inside loops too."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found += [x.aval.dtype for x in equation.invars]
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found += operands_of_products(inner)
    return found


@pytest.mark.parametrize(
    ("topology", "kind", "heads", "kv_heads", "page_size", "dim"),
    [
        ("v5e:2x2", "TPU v5 lite", 32, 8, 16, 128),
        ("v5e:2x2", "TPU v5 lite", 9, 3, 8, 64),
        ("v6e:2x4", "TPU v6 lite", 16, 8, 24, 256),
        ("v5p:2x2x1", "TPU v5", 32, 32, 128, 80),
        ("tpu7x:2x2x1", "TPU7x", 32, 8, 16, 128),
        ("tpu7x:2x2x1", "TPU7x", 32, 8, 64, 128),
    ],
    ids=str,
)
def test_compiles_for_a_tpu_without_a_copy_of_the_pool(
    device, topology, kind, heads, kv_heads, page_size, dim
):
    sharding = SingleDeviceSharding(device(topology))

    def array(shape, dtype, sharding=sharding):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    count = 2**22 // (page_size * kv_heads)
    codes = array((count, kv_heads, page_size, dim), FLOAT8, pool_format(sharding))
    pool = dataclasses.replace(
        build(CASES[0])["k_pages"],
        planes={"codes": codes},
        scale=array((count, kv_heads, 1, 1), jnp.bfloat16),
    )
    function = functools.partial(tpu.float8_paged_attention_tpu, scale=0.1, flush_every=1)
    target = AbstractDevice(kind, 1, "tpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=target)):
        lowered = jax.jit(function).lower(
            array((8, heads, dim), jnp.bfloat16),
            pool,
            pool,
            array((8, 64), jnp.int32),
            array((8,), jnp.int32),
        )
    assert "tpu_custom_call" in lowered.as_text()
    stored = codes.size * codes.dtype.itemsize
    assert lowered.compile().memory_analysis().temp_size_in_bytes < stored / 10


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("flush_every", [1, 4, None])
@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_lowers_for_cuda(case, flush_every):
    arrays = build(case)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    function = functools.partial(
        float8_paged_attention, flush_every=flush_every, implementation="gpu"
    )
    gpu = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=gpu)):
        traced = jax.jit(function).trace(**shapes)
        lowered = traced.lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@__gpu$xla.gpu.triton") == 1
    assert operands_of_products(traced.jaxpr.jaxpr) == [FLOAT8] * 4


POOL = build(CASES[0])["k_pages"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": jnp.zeros((4, 6))}, r"q has shape \(4, 6\); it must be \[B, Hq, D\]"),
        ({"q": jnp.zeros((3, 6, 64))}, "q has 3 rows, and so must they"),
        ({"q": jnp.zeros((4, 5, 64))}, "the query heads must be a multiple of the KV heads"),
        ({"q": jnp.zeros((4, 6, 80))}, "q has head_dim 80 and k_pages has 64"),
        ({"v_pages": jnp.zeros((9, 2, 16, 64))}, "v_pages is a .*; it must be PackedPages of"),
        (
            {"k_pages": int8().keys.encode(jnp.zeros((9, 2, 16, 64)))},
            "k_pages holds int8 codes of 8 bits; they must be float8_e4m3fn",
        ),
        (
            {"k_pages": float8("float8_e5m2").keys.encode(jnp.zeros((9, 2, 16, 64)))},
            "k_pages holds float8_e5m2 codes",
        ),
        (
            {"v_pages": float8(per="token").values.encode(jnp.zeros((9, 2, 16, 64)))},
            r"v_pages.scale has shape \(9, 2, 16, 1\); a page's head must have one scale",
        ),
        (
            {"v_pages": dataclasses.replace(POOL, middle=POOL.scale)},
            "v_pages has middle; an element must be its code times a scale",
        ),
        (
            {"k_pages": dataclasses.replace(POOL, position=jnp.zeros((9, 2, 1), jnp.int32))},
            "k_pages has position",
        ),
        ({"block_tables": jnp.zeros((4, 0), jnp.int32)}, "at least one entry"),
        ({"lengths": jnp.zeros(4, jnp.uint32)}, "lengths is uint32; it must be int32"),
        ({"scale": -1}, "scale is -1"),
        ({"flush_every": 0}, "flush_every is 0; .* pass None to never flush"),
        ({"flush_every": True}, "flush_every is True"),
        ({"accumulator": "float22"}, "accumulator is 'float22'; it must be one of native, hopper"),
        (
            {"accumulator": "hopper", "implementation": "gpu"},
            "accumulator is 'hopper' and implementation 'gpu'",
        ),
        ({"implementation": "tpu"}, "of float8_paged_attention cannot run: it needs a TPU"),
    ],
)
def test_bad_arguments_are_refused_by_name(changed, message):
    with pytest.raises(ValueError, match=message):
        float8_paged_attention(**build(CASES[0]) | changed)


def test_new_tables_do_not_compile_again():
    function = jax.jit(float8_paged_attention)
    for seed in range(3):
        function(**build(CASES[0], seed))
    assert function._cache_size() == 1
