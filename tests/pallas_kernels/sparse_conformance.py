"""The test body that every implementation of sparse paged attention runs.

Lists are hostile: pages shuffled, holes anywhere, entries that say N, more than N or -1, entries
of no tokens that name poisoned pages, parts of pages in the middle, lists of nothing. Everything
that no list counts is NaN or infinite, in the very pages that are listed too, and every KV head's
rows of a page belong to another sequence. `check` runs the batch again with damage in two lists.
"""

import functools
import math
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import sparse_paged_attention
from kvjax.pallas_kernels.sparse_paged_attention.lists import bounded_lists
from tests.pallas_kernels import oracle
from tests.pallas_kernels.conformance import INTERPRET, POISON, TOLERANCE, Case, assert_close

BATCH = 4
CASES = (
    Case(page_stats=True),
    Case(page_size=8, head_dim=128, group=4, page_stats=True),
    Case(page_size=64, head_dim=80, kv_heads=1, group=4),
    Case(page_size=128, head_dim=256, group=1, page_stats=True),
    Case(page_size=24, head_dim=128, v_head_dim=64),
    Case(dtype="bfloat16", head_dim=128, page_stats=True),
    Case(sink_logits=True, soft_cap=3.0, scale=0.2, page_stats=True),
    Case(long=True, kv_heads=2, group=2, page_stats=True),
    Case(long=True, page_size=8, kv_heads=1, group=20, dtype="bfloat16"),
)
# The Mosaic kernel refuses the first two; interpreting it for the third shows nothing new.
MORE_CASES = (
    Case(head_dim=24, v_head_dim=16, kv_heads=3, group=1),
    Case(dtype="float16"),
    Case(dtype="bfloat16", q_dtype="float32", kv_heads=3, group=1, soft_cap=2.0),
)
# Compiling an interpreted Triton kernel takes seconds, so it runs the cases that differ most.
GPU_CASES = (CASES[0], CASES[2], CASES[5], CASES[6])


def build(case, seed=0):
    """A batch for the case: (arrays by argument name, options by argument name)."""
    rng = np.random.default_rng(seed)
    size, heads = case.page_size, case.kv_heads * case.group
    width = 1100 // size + 3 if case.long else 5
    num_pages = BATCH * width + 5
    shape = (num_pages, case.kv_heads, size)
    k_pages = rng.choice(POISON, (*shape, case.head_dim))
    v_pages = rng.choice(POISON, (*shape, case.v_head_dim or case.head_dim))
    ids = rng.choice([num_pages, num_pages + 7, -1, 2**31 - 1], (BATCH, case.kv_heads, width))
    tokens = rng.integers(0, size + 1, ids.shape)
    for head in range(case.kv_heads):
        free = list(rng.permutation(num_pages))
        for row in range(BATCH):
            # One row lists nothing at all, one list is empty, one is full, the others have holes.
            listed = rng.random(width) < {0: 1.0, 1: 0.0}.get(row, 0.6)
            listed &= (row, head) != (2, 0)
            for entry in np.flatnonzero(listed):
                page = free.pop()
                count = rng.choice([size, rng.integers(1, size), 0], p=[0.6, 0.3, 0.1])
                ids[row, head, entry], tokens[row, head, entry] = page, count
                k_pages[page, head, :count] = rng.normal(size=(count, case.head_dim))
                v_pages[page, head, :count] = rng.normal(size=(count, v_pages.shape[3]))
    arrays = {
        "q": jnp.asarray(
            rng.normal(size=(BATCH, heads, case.head_dim)), case.q_dtype or case.dtype
        ),
        "k_pages": jnp.asarray(k_pages, case.dtype),
        "v_pages": jnp.asarray(v_pages, case.dtype),
        "page_ids": jnp.asarray(ids, jnp.int32),
        "page_tokens": jnp.asarray(tokens, jnp.int32),
    }
    options = {
        "scale": case.scale,
        "sink_logits": None,
        "soft_cap": case.soft_cap,
        "page_stats": case.page_stats,
    }
    if case.sink_logits:
        options["sink_logits"] = jnp.asarray(rng.normal(size=heads), jnp.float32)
    return arrays, options


def listed_tokens(arrays, row, head):
    """(entry, page, tokens) of everything that one list counts."""
    num_pages = len(arrays["k_pages"])
    ids, tokens = np.asarray(arrays["page_ids"]), np.asarray(arrays["page_tokens"])
    return [
        (entry, page, count)
        for entry, (page, count) in enumerate(zip(ids[row, head], tokens[row, head], strict=True))
        if 0 <= page < num_pages and count > 0
    ]


def expected(arrays, options):
    """What the definition says in float64, in the order of `AttentionOutput`."""
    q, k_pages, v_pages = (np.asarray(arrays[n], np.float64) for n in ("q", "k_pages", "v_pages"))
    _, kv_heads, size, _ = k_pages.shape
    group, width = q.shape[1] // kv_heads, arrays["page_ids"].shape[2]
    scale = options["scale"] or 1 / math.sqrt(q.shape[2])
    rows = []
    for row in range(len(q)):
        heads = []
        for head in range(q.shape[1]):
            listed = listed_tokens(arrays, row, head // group)
            pages = np.zeros(width, int)
            pages[[entry for entry, _, _ in listed]] = [page for _, page, _ in listed]
            slots = [entry * size + slot for entry, _, count in listed for slot in range(count)]
            keys, values = (
                pool[pages, head // group].reshape(width * size, -1) for pool in (k_pages, v_pages)
            )
            sinks = options["sink_logits"]
            sink = None if sinks is None else float(sinks[head])
            cap = options["soft_cap"]
            heads.append(
                oracle.attend(q[row, head], keys, values, slots, scale, cap, sink, size, width)
            )
        rows.append([np.stack(part) for part in zip(*heads, strict=True)])
    return tuple(np.stack(part) for part in zip(*rows, strict=True))


@functools.cache
def batch_and_answer(case):
    """A case's batch and what the definition says of it, made once for all implementations."""
    arrays, options = build(case)
    return arrays, options, expected(arrays, options)


def run(implementation, arrays, options, interpret=None):
    """Call an implementation: through the public function, or the Pallas kernel interpreted."""
    arrays, options = dict(arrays), dict(options)
    if implementation in ("tpu", "gpu"):
        # The public function refuses them here; what it resolves is resolved here too.
        if options["scale"] is None:
            options["scale"] = 1 / math.sqrt(arrays["q"].shape[2])
        names = ("page_ids", "page_tokens")
        num_pages, _, page_size, _ = arrays["k_pages"].shape
        lists = bounded_lists(*(arrays[name] for name in names), num_pages, page_size)
        arrays |= dict(zip(names, lists, strict=True))
    sinks = options.pop("sink_logits")
    interpret = INTERPRET.get(implementation) if interpret is None else interpret
    return _compiled(implementation, tuple(options.items()), interpret)(sink_logits=sinks, **arrays)


@functools.cache
def _compiled(implementation, options, interpret):
    if implementation in ("reference", "xla"):
        function = functools.partial(sparse_paged_attention, implementation=implementation)
    else:
        module = import_module(f"kvjax.pallas_kernels.sparse_paged_attention.{implementation}")
        function = getattr(module, f"sparse_paged_attention_{implementation}")
        function = functools.partial(function, interpret=interpret)
    level = None if implementation == "xla" else {"xla_backend_optimization_level": 0}
    return jax.jit(functools.partial(function, **dict(options)), compiler_options=level)


def check(implementation, case):
    """The body: the implementation equals the definition, and damage stays in its own list."""
    arrays, options, wanted = batch_and_answer(case)
    result = run(implementation, arrays, options)
    assert result.out.dtype == arrays["q"].dtype
    assert_close(result, wanted, TOLERANCE[case.dtype], case.page_stats)
    blind = ~wanted[0].any(axis=2)  # sees no key: not nearly nothing, nothing
    assert blind[1].all()
    assert not np.asarray(result.out, np.float32)[blind].any()
    check_that_damage_stays_alone(implementation, case)


def check_that_damage_stays_alone(implementation, case):
    """NaN among the values of one list, or the keys of another, is seen by their heads alone."""
    arrays, options, wanted = batch_and_answer(case)
    arrays = dict(arrays)
    sound = np.ones(arrays["q"].shape[:2], bool)
    hit = []
    for name, row, head in (("v_pages", 0, 0), ("k_pages", 3, case.kv_heads - 1)):
        listed = listed_tokens(arrays, row, head)
        entry, page, count = listed[len(listed) // 2]
        arrays[name] = arrays[name].at[page, head, count - 1].set(jnp.nan)
        heads = slice(head * case.group, (head + 1) * case.group)
        sound[row, heads] = False
        hit.append((name, row, heads, entry))
    result = run(implementation, arrays, options)
    held = [None if part is None else np.asarray(part) for part in result]
    result = type(result)(*held)
    others = [None if part is None else part[sound] for part in held]
    tolerance = TOLERANCE[case.dtype]
    assert_close(type(result)(*others), [x[sound] for x in wanted], tolerance, case.page_stats)
    for name, row, heads, entry in hit:
        assert np.isnan(result.out[row, heads].astype(np.float32)).all()
        if name == "k_pages":
            assert np.isnan(result.lse[row, heads]).all()
            assert not case.page_stats or np.isnan(result.page_sum[row, heads, entry]).all()
