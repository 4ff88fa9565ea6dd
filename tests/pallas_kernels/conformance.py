"""The one test body that every implementation of both attention operations runs.

A case is a shape and a set of options; `build` turns it into a batch that is as hostile as a real
pool: physical pages shuffled, every slot that no query of its sequence may see NaN or infinite (in
pages that no sequence owns, past the length, before the window), unused table entries out of range
or pointing at such pages, padding queries NaN. `check` runs it a second time with NaN among the
visible keys of one sequence and the visible values of another: no other sequence may notice.
"""

import dataclasses
import functools
import math
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kvjax.pallas_kernels import paged_attention, ragged_paged_attention, supported
from tests.pallas_kernels import oracle

POISON = (np.nan, np.inf, -np.inf)
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
API = {"paged_attention": paged_attention, "ragged_paged_attention": ragged_paged_attention}
INTERPRET = {"tpu": pltpu.InterpretParams(), "gpu": True}
HOME = {"reference": "cpu", "xla": "cpu", "tpu": "tpu", "gpu": "gpu"}


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape and its options.

    `positions` is what to add to lengths - 1 (decode only), `residual` is of ragged batches only;
    `long` adds a sequence of many pages, longer than the blocks that implementations work in, and
    in a ragged batch a chunk as large.
    """

    page_size: int = 16
    head_dim: int = 64
    v_head_dim: int | None = None
    kv_heads: int = 2
    group: int = 3
    dtype: str = "float32"
    q_dtype: str | None = None
    scale: float | None = None
    window: int | None = None
    sink_tokens: int = 0
    sink_logits: bool = False
    soft_cap: float | None = None
    positions: int | None = None
    page_stats: bool = False
    residual: int | None = None
    long: bool = False

    @property
    def name(self):
        """What differs from the plain case."""
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return ",".join(changed) or "plain"


SHAPES = (
    Case(page_stats=True),
    Case(page_size=8, head_dim=128, group=4, page_stats=True),
    Case(page_size=64, head_dim=80, kv_heads=1, group=4),
    Case(page_size=128, head_dim=256, group=1, page_stats=True),
    Case(page_size=24, head_dim=128, v_head_dim=64),
    Case(head_dim=24, v_head_dim=16, kv_heads=3, group=1),
    Case(dtype="bfloat16", head_dim=128, page_stats=True),
    Case(dtype="bfloat16", page_size=64, head_dim=80, group=4),
    Case(dtype="bfloat16", q_dtype="float32", kv_heads=1, group=3),
    Case(dtype="float16"),
)
OPTIONS = (
    Case(window=5, page_stats=True),
    Case(window=20, sink_tokens=3, page_stats=True),
    Case(window=1),
    Case(window=10_000, soft_cap=2.0),
    Case(sink_logits=True, page_stats=True),
    Case(
        window=18,
        sink_tokens=2,
        sink_logits=True,
        soft_cap=3.0,
        scale=0.2,
        page_stats=True,
        head_dim=128,
        dtype="bfloat16",
    ),
    Case(long=True, kv_heads=1, group=2, page_stats=True),
    Case(long=True, kv_heads=1, group=2, window=150, sink_tokens=40, page_stats=True),
    Case(long=True, kv_heads=1, group=2, page_size=8, window=70, dtype="bfloat16"),
)
DECODE = (
    *SHAPES,
    *OPTIONS,
    Case(window=16, sink_tokens=18, scale=0.3),
    Case(positions=1, window=5, page_stats=True),
    Case(positions=1, window=1, sink_logits=True, page_stats=True),
    Case(positions=-2, window=20, sink_tokens=2),
)
RAGGED = (
    *SHAPES,
    *OPTIONS,
    Case(residual=16, page_stats=True),
    Case(long=True, kv_heads=1, group=2, page_size=8, residual=20, window=70, sink_tokens=10),
)
# Compiling an interpreted Triton kernel takes seconds, so it runs the cases that differ most.
GPU_DECODE = (
    Case(page_stats=True),
    Case(page_size=64, head_dim=80, kv_heads=1, group=4),
    Case(page_size=40, head_dim=256, group=1, page_stats=True),
    Case(dtype="bfloat16", page_size=8, head_dim=128, v_head_dim=64, window=5),
    Case(positions=1, window=5, sink_tokens=3, sink_logits=True, soft_cap=2.0, page_stats=True),
)
GPU_RAGGED = (
    Case(page_stats=True, window=20, sink_tokens=3, sink_logits=True, soft_cap=2.0),
    Case(dtype="bfloat16", page_size=8, head_dim=80, group=4),
)


def pool(rng, case, lengths, width):
    """Pages that hold each sequence's random tokens, in shuffled places among poison."""
    needed = [-(-length // case.page_size) for length in lengths]
    num_pages = sum(needed) + 5
    free = list(rng.permutation(num_pages))
    v_head_dim = case.v_head_dim or case.head_dim
    shape = (num_pages, case.kv_heads, case.page_size)
    k_pages = rng.choice(POISON, (*shape, case.head_dim))
    v_pages = rng.choice(POISON, (*shape, v_head_dim))
    block_tables = np.full((len(lengths), width), num_pages, np.int32)
    for row, length in enumerate(lengths):
        for entry in range(needed[row]):
            page = free.pop()
            block_tables[row, entry] = page
            held = min(case.page_size, length - entry * case.page_size)
            k_pages[page, :, :held] = rng.normal(size=(case.kv_heads, held, case.head_dim))
            v_pages[page, :, :held] = rng.normal(size=(case.kv_heads, held, v_head_dim))
    # Entries past the length: half say "no page" (N), the others are stale: such a page, or N + 7.
    stale = np.arange(width)[None, :] >= np.asarray(needed)[:, None]
    choice = rng.integers(0, 4, block_tables.shape)
    block_tables[stale & (choice == 0)] = free[0]
    block_tables[stale & (choice == 1)] = num_pages + 7
    return k_pages, v_pages, block_tables


def build(op, case, seed=0):
    """A batch for the case: (arrays by argument name, options by argument name)."""
    rng = np.random.default_rng(seed)
    size = case.page_size
    heads = case.kv_heads * case.group
    if op == "paged_attention":
        lengths = [0, 1, size - 1, size, size + 1, 2 * size, 2 * size + 1]
        lengths = rng.permutation(lengths + [33 * size + 3] * case.long)
        rows = len(lengths)
    else:
        # (cached tokens, queries): prefill chunks, whole prompts, decodes, and a row with neither.
        batch = [(size + 1, 1), (2 * size + 1, size + 3), (0, 0), (5, 5), (size, 0), (2 * size, 1)]
        batch += [(1, 1), (size - 1, 4)] + [(33 * size + 3, 150)] * case.long
        order = rng.permutation(len(batch))
        lengths, queries = np.asarray(batch)[order].T
        starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
        rows = starts[-1] + 3
    k_pages, v_pages, block_tables = pool(rng, case, lengths, width=-(-max(lengths) // size) + 1)
    q = rng.normal(size=(rows, heads, case.head_dim))
    arrays = {
        "q": jnp.asarray(q, case.q_dtype or case.dtype),
        "block_tables": jnp.asarray(block_tables),
    }
    options = {
        "scale": case.scale,
        "window": case.window,
        "sink_tokens": case.sink_tokens,
        "sink_logits": None,
        "soft_cap": case.soft_cap,
        "page_stats": case.page_stats,
    }
    if case.sink_logits:
        options["sink_logits"] = jnp.asarray(rng.normal(size=heads), jnp.float32)
    if op == "paged_attention":
        arrays["lengths"] = jnp.asarray(lengths, jnp.int32)
        options["query_positions"] = (
            None
            if case.positions is None
            else jnp.maximum(arrays["lengths"] - 1 + case.positions, 0)
        )
    else:
        if case.residual is not None:
            options["residual"] = case.residual
        arrays["q"] = arrays["q"].at[starts[-1] :].set(jnp.nan)
        arrays["kv_lengths"] = jnp.asarray(lengths, jnp.int32)
        arrays["cu_q_lengths"] = jnp.asarray(starts)
    arrays["k_pages"] = k_pages
    seen = {(row, slot) for _, row, slots in views(op, arrays, options) for slot in slots}
    for row, length in enumerate(lengths):
        dead = [slot for slot in range(length) if (row, slot) not in seen]
        for pages in (k_pages, v_pages):
            at = at_slots(block_tables[row], dead, size)
            pages[at] = rng.choice(POISON, pages[at].shape)
    arrays["k_pages"] = jnp.asarray(k_pages, case.dtype)
    arrays["v_pages"] = jnp.asarray(v_pages, case.dtype)
    return arrays, options


def views(op, arrays, options):
    """What each query may see: (its row of q, its sequence, slots)."""
    if op == "paged_attention":
        lengths = np.asarray(arrays["lengths"])
        positions = options["query_positions"]
        positions = lengths - 1 if positions is None else np.asarray(positions)
        queries = [(row, row, position) for row, position in enumerate(positions)]
    else:
        lengths, starts = np.asarray(arrays["kv_lengths"]), np.asarray(arrays["cu_q_lengths"])
        queries = [
            (row, sequence, length - starts[sequence + 1] + row)
            for sequence, length in enumerate(lengths)
            for row in range(starts[sequence], starts[sequence + 1])
        ]
    limits = options["window"], options["sink_tokens"]
    residual, size = options.get("residual"), arrays["k_pages"].shape[2]
    return [
        (row, sequence, oracle.visible_slots(length, position, *limits))
        for row, sequence, position in queries
        for length in [oracle.encoded(lengths[sequence], position, residual, size)]
    ]


def at_slots(table, slots, page_size):
    """The index of some slots of a sequence, all heads, in a pool [N, Hkv, P, D]."""
    slots = np.asarray(slots, np.int32)
    return table[slots // page_size], slice(None), slots % page_size


@functools.cache
def batch_and_answer(op, case):
    """A case's batch and what the oracle says of it, made once for all implementations."""
    arrays, options = build(op, case)
    return arrays, options, expected(op, arrays, options)


def expected(op, arrays, options):
    """What the oracle says, as numpy arrays in the order of `AttentionOutput`."""
    held = {name: np.asarray(array) for name, array in arrays.items()}
    settings = {name: value for name, value in options.items() if name != "page_stats"}
    if op == "ragged_paged_attention":
        return oracle.ragged(**held, **settings)
    positions = settings.pop("query_positions")
    positions = held["lengths"] - 1 if positions is None else np.asarray(positions)
    return oracle.paged(**held, query_positions=positions, **settings)


def why_not(op, implementation, arrays):
    """The reason why an implementation refuses these shapes on its own platform, or None."""
    return supported(
        op,
        implementation,
        platform=HOME[implementation],
        head_dim=arrays["q"].shape[2],
        v_head_dim=arrays["v_pages"].shape[3],
        page_size=arrays["k_pages"].shape[2],
        dtype=arrays["k_pages"].dtype,
    )


def run(op, implementation, arrays, options):
    """Call an implementation: through the public function, or the Pallas kernel interpreted."""
    options = dict(options)
    if implementation in ("tpu", "gpu"):
        # The public function refuses them here; what it resolves is resolved here too.
        if options["scale"] is None:
            options["scale"] = 1 / math.sqrt(arrays["q"].shape[2])
        if "query_positions" in options and options["query_positions"] is None:
            options["query_positions"] = arrays["lengths"] - 1
    traced = {name: value for name, value in options.items() if isinstance(value, jax.Array)}
    static = tuple((name, value) for name, value in options.items() if name not in traced)
    return _compiled(op, implementation, static)(**arrays, **traced)


@functools.cache
def _compiled(op, implementation, options):
    if implementation in ("reference", "xla"):
        function = functools.partial(API[op], implementation=implementation)
    else:
        module = import_module(f"kvjax.pallas_kernels.{op}.{implementation}")
        function = getattr(module, f"{op}_{implementation}")
        function = functools.partial(function, interpret=INTERPRET[implementation])
    # XLA as users get it. The others are not what runs fast anywhere: compile them quickly.
    level = None if implementation == "xla" else {"xla_backend_optimization_level": 0}
    return jax.jit(functools.partial(function, **dict(options)), compiler_options=level)


def assert_close(result, wanted, tolerance, page_stats):
    """Hold a result against the oracle; infinities must match exactly."""
    for name, got, want in zip(result._fields, result, wanted, strict=True):
        if name.startswith("page") and not page_stats:
            assert got is None
            continue
        if name != "out":
            assert got.dtype == jnp.float32
        assert got.shape == want.shape
        got = np.asarray(got, np.float64)
        np.testing.assert_allclose(got, want, tolerance, tolerance, err_msg=name)


def check(op, implementation, case):
    """The body: the implementation equals the oracle, or is refused by name with its reason."""
    arrays, options, wanted = batch_and_answer(op, case)
    reason = why_not(op, implementation, arrays)
    if reason is not None:
        with pytest.raises(ValueError, match="cannot run") as error:
            API[op](**arrays, **options, implementation=implementation)
        assert reason in str(error.value)
        return
    result = run(op, implementation, arrays, options)
    assert result.out.dtype == arrays["q"].dtype
    assert_close(result, wanted, TOLERANCE[case.dtype], case.page_stats)
    blind = ~wanted[0].any(axis=2)  # sees no key: not nearly nothing, nothing
    assert not np.asarray(result.out, np.float32)[blind].any()
    check_that_damage_stays_alone(op, implementation, case)


def check_that_damage_stays_alone(op, implementation, case):
    """NaN that a sequence may see is in its own rows, and only there."""
    arrays, options, wanted = batch_and_answer(op, case)
    arrays, looks = dict(arrays), views(op, arrays, options)
    sound, hit, hit_keys = np.ones(len(arrays["q"]), bool), [], []
    widest = {}  # the most that one query of each sequence sees
    for _, sequence, slots in looks:
        if len(slots) > len(widest.get(sequence, ())):
            widest[sequence] = slots
    victims = sorted(widest, key=lambda sequence: -len(widest[sequence]))
    for name, victim in zip(("v_pages", "k_pages"), victims, strict=False):
        slot = widest[victim][len(widest[victim]) // 2]
        at = at_slots(np.asarray(arrays["block_tables"])[victim], [slot], case.page_size)
        arrays[name] = arrays[name].at[at].set(jnp.nan)
        sound[[row for row, sequence, _ in looks if sequence == victim]] = False
        rows = [row for row, sequence, slots in looks if sequence == victim and slot in slots]
        hit += rows
        hit_keys += [(row, slot // case.page_size) for row in rows if name == "k_pages"]
    result = run(op, implementation, arrays, options)
    result = result._replace(
        **{name: np.asarray(x) for name, x in result._asdict().items() if x is not None}
    )
    others = [None if x is None else x[sound] for x in result]
    tolerance = TOLERANCE[case.dtype]
    assert_close(type(result)(*others), [x[sound] for x in wanted], tolerance, case.page_stats)
    assert np.isnan(np.asarray(result.out, np.float32)[hit]).all()
    for row, page in hit_keys:
        assert np.isnan(result.lse[row]).all()
        assert not case.page_stats or np.isnan(result.page_sum[row, :, page]).all()
