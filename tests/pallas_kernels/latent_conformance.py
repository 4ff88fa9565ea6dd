"""The test body that every implementation of attention over latents runs.

What is expected is the expanded form in float64: each head's keys and values are made from the
latents, and attended to in plain loops. Queries that took W_UK in go to the implementation, and
W_UV is applied to what it returns. Batches are hostile: pages shuffled, some shared, table entries
out of range or stale, lists with holes; what no query sees is NaN or infinite. `check` runs the
batch again with NaN where one query sees it.
"""

import dataclasses
import functools
import math
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.formats import Packing
from kvjax.pallas_kernels import (
    encoded_before,
    latent_attention,
    ragged_latent_attention,
    sparse_latent_attention,
)
from kvjax.pallas_kernels.packed_pages import PackedPages
from kvjax.pallas_kernels.sparse_paged_attention.lists import bounded_lists
from tests.pallas_kernels import oracle
from tests.pallas_kernels.conformance import INTERPRET, POISON, TOLERANCE
from tests.pallas_kernels.float8_batches import packed

API = {
    "decode": latent_attention,
    "ragged": ragged_latent_attention,
    "sparse": sparse_latent_attention,
    "tokens": sparse_latent_attention,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape; "sparse" lists first tokens of pages, "tokens" chosen ones.

    `packed` latents are int8 codes with a scale a token, NaN where the token is poison; in int4
    position keys are packed too, with a scale and a middle a page's channel, NaN where a token of
    the page is poison. `residual` is of ragged batches only.
    """

    form: str = "decode"
    page_size: int = 16
    latent: int = 48
    rope: int = 16
    heads: int = 3
    nope: int = 8
    value: int = 12
    dtype: str = "float32"
    q_dtype: str | None = None
    page_stats: bool = False
    long: bool = False
    packed: str | None = None
    residual: int | None = None

    @property
    def name(self):
        """What differs from the plain case."""
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return ",".join(changed) or "plain"

    @property
    def scale(self):
        """Of the model's own heads."""
        return 1 / math.sqrt(self.nope + self.rope)


CASES = (
    Case(page_size=8, latent=96, rope=32, heads=128, dtype="bfloat16", page_stats=True),
    Case("ragged", page_size=8, heads=16, dtype="bfloat16", long=True),
    Case("tokens", long=True, packed="int8"),
    Case("ragged", heads=4, long=True, packed="int4", residual=16),
)
# In XLA alone: kernels refuse some of these, and interpreting them for others shows nothing new.
XLA_CASES = (
    Case(page_stats=True, long=True),
    Case(page_size=12, rope=6, heads=1, dtype="float16", q_dtype="float32"),
    Case("ragged", page_size=17, latent=10, rope=2, page_stats=True),
    Case("sparse", page_size=24, latent=128, rope=64, heads=20, page_stats=True),
)
# Compiling an interpreted Triton kernel takes seconds, so it runs the cases that differ most.
GPU_CASES = (
    Case(page_size=24, latent=128, rope=64, heads=20, page_stats=True),
    Case("tokens", dtype="bfloat16"),
)


def filled(rng, case, tables, lengths, num_pages):
    """Pools in which the first tokens of some pages are a sequence's, and all else is poison."""
    latents, ropes = (
        rng.choice(POISON, (num_pages, case.page_size, dim)) for dim in (case.latent, case.rope)
    )
    for table, length in zip(tables, lengths, strict=True):
        for slot in range(length):
            at = table[slot // case.page_size], slot % case.page_size
            latents[at], ropes[at] = rng.normal(size=case.latent), rng.normal(size=case.rope)
    return latents, ropes


def tables_of(rng, lengths, size):
    """Tables of shuffled pages: (tables, pages of the pool); the first two full rows share one."""
    needed = [-(-length // size) for length in lengths]
    num_pages, width = sum(needed) + 5, max(needed) + 1
    free = list(rng.permutation(num_pages))
    tables = rng.choice([num_pages, num_pages + 7, free.pop()], (len(lengths), width))
    for row, count in enumerate(needed):
        tables[row, :count] = [free.pop() for _ in range(count)]
    one, other = [row for row, length in enumerate(lengths) if length >= 2 * size][:2]
    tables[one, 0] = tables[other, 0]
    return tables, num_pages


def build(case, seed=0):
    """A batch: (arrays by argument name, projections, what each query sees).

    What a query sees is the ids of its list's or table's pages and slots of them, entry * P + slot.
    """
    rng = np.random.default_rng(seed)
    size, arrays = case.page_size, {}
    long = [33 * size + 3] * case.long
    if case.form == "decode":
        lengths = rng.permutation([0, 1, size - 1, size, size + 1, 2 * size, 2 * size + 1, *long])
        tables, num_pages = tables_of(rng, lengths, size)
        pools = filled(rng, case, tables, lengths, num_pages)
        arrays |= {"block_tables": tables, "lengths": lengths}
        sees = [(tables[row], range(length)) for row, length in enumerate(lengths)]
    elif case.form == "ragged":
        # (cached tokens, queries): prefill chunks, a whole prompt, decodes, a row with neither.
        batch = [(2 * size + 1, size + 3), (0, 0), (5, 5), (size, 0), (2 * size, 1)]
        batch += [(tokens, 9) for tokens in long]
        lengths, queries = rng.permutation(batch).T
        tables, num_pages = tables_of(rng, lengths, size)
        pools = filled(rng, case, tables, lengths, num_pages)
        starts = np.concatenate([[0], np.cumsum(queries)])
        arrays |= {"block_tables": tables, "kv_lengths": lengths, "cu_q_lengths": starts}
        places = [
            (row, int(length - count + query))
            for row, (length, count) in enumerate(zip(lengths, queries, strict=True))
            for query in range(count)
        ]
        sees = [
            (
                tables[row],
                range(
                    place + 1
                    if case.residual is None
                    else encoded_before(place, case.residual, size)
                ),
            )
            for row, place in places
        ]
        sees += [(tables[0], range(0))] * 3  # padding
    else:
        pools, sees, lists = listed(rng, case)
        arrays |= lists
    latents, ropes = pools
    q_nope = rng.normal(size=(len(sees), case.heads, case.nope))
    w_uk = rng.normal(size=(case.heads, case.nope, case.latent)) / math.sqrt(case.latent)
    w_uv = rng.normal(size=(case.heads, case.value, case.latent)) / math.sqrt(case.latent)
    q_rope = rng.normal(size=(len(sees), case.heads, case.rope))
    q_dtype = case.q_dtype or case.dtype
    arrays = {
        name: jnp.asarray(x, bool if x.dtype == bool else "int32") for name, x in arrays.items()
    }
    arrays |= {
        "q_latent": jnp.asarray(np.einsum("thn,hnc->thc", q_nope, w_uk), q_dtype),
        "q_rope": jnp.asarray(q_rope, q_dtype),
        "latents": jnp.asarray(latents, case.dtype),
        "ropes": jnp.asarray(ropes, case.dtype),
    }
    if case.packed == "int8":
        arrays["latents"] = packed_latents(rng, latents)
    elif case.packed == "int4":
        arrays |= {"latents": by_channel(latents), "ropes": by_channel(ropes)}
    return arrays, (q_nope, w_uk, w_uv), sees


def packed_latents(rng, latents):
    """Codes of latents, and the scale of each token."""
    scale = np.where(np.isfinite(latents[..., :1]), rng.uniform(0.02, 0.03), np.nan)
    codes = np.nan_to_num(np.clip(latents / scale, -127, 127)).astype(np.int8)
    return packed(codes[:, None], scale[:, None].astype(np.float32))


def by_channel(elements):
    """Int4 codes of each page's channels, damaged where a page is not finite as a whole."""
    pages = jnp.asarray(elements, jnp.float32)[:, None]
    encoded = Packing(bits=4, channels=1, scale_dtype="float8_e4m3fn").encode(pages)
    dead = ~jnp.isfinite(pages).all(axis=(2, 3), keepdims=True)
    names = ("scale", "middle", "unit")
    return encoded.with_stored(
        {
            name: jnp.where(dead, jnp.asarray(jnp.nan, x.dtype), x)
            for name in names
            if (x := getattr(encoded, name)) is not None
        }
    )


def unpacked(pages):
    """float64 [N, P, D]: what packed pages of one head stand for, in NumPy alone."""
    codes = np.asarray(pages.planes["codes"])[:, 0]
    count, rows, dim = codes.shape
    if pages.bits == 4:  # the low halves of bytes are of the first tokens
        codes = np.concatenate([codes & 15, codes >> 4], axis=1) - 7.5
        rows *= 2
    parts = np.zeros((2, count, rows, dim))
    for part, factor in enumerate((pages.scale, pages.middle)):
        if factor is None:
            continue
        factor = np.asarray(factor).astype(np.float64)[:, 0]
        if pages.unit is not None:
            factor = factor * np.asarray(pages.unit).astype(np.float64)[:, 0, :, part : part + 1]
        factor = np.repeat(factor, rows // factor.shape[1], axis=1)
        parts[part] = np.repeat(factor, dim // factor.shape[2], axis=2)
    return codes * parts[0] + parts[1]


def listed(rng, case):
    """Pools, what each query sees, and its list: full, empty, or with holes and parts of pages."""
    size, batch = case.page_size, 4
    width = 560 // size + 3 if case.long else 5
    num_pages = batch * width + 5
    free = rng.permutation(num_pages)[: batch * width].reshape(batch, width)
    free[3, 0] = free[0, 0]  # shared by two lists
    seen = np.arange(size) < rng.choice([size, size, 0, size // 2], (batch, width, 1))
    if case.form == "tokens":
        seen = rng.random((batch, width, size)) < rng.choice([0.0, 0.1, 0.9], (batch, width, 1))
    seen[0], seen[1] = True, False
    seen[3, 0] = True
    counted = np.zeros((num_pages, size), bool)
    for row in range(batch):
        counted[free[row]] |= seen[row]
    pools = [
        np.where(counted[..., None], rng.normal(size=shape), rng.choice(POISON, shape))
        for shape in ((num_pages, size, dim) for dim in (case.latent, case.rope))
    ]
    nowhere = ~seen.any(axis=2) & (rng.random((batch, width)) < 0.7)
    stray = rng.choice([num_pages, num_pages + 7, -1, 2**31 - 1], free.shape)
    tokens = seen if case.form == "tokens" else seen.sum(axis=2)
    lists = {"page_ids": np.where(nowhere, stray, free), "page_tokens": tokens}
    sees = [(free[row], np.flatnonzero(seen[row])) for row in range(batch)]
    return pools, sees, lists


def expected(case, arrays, projections, sees):
    """The expanded form in float64, as numpy arrays in the order of `AttentionOutput`."""
    q_nope, w_uk, w_uv = projections
    latents, ropes = (
        unpacked(pool) if isinstance(pool, PackedPages) else np.asarray(pool, np.float64)
        for pool in (arrays["latents"], arrays["ropes"])
    )
    q_rope = np.asarray(arrays["q_rope"], np.float64)
    rows = []
    for row, (pages, slots) in enumerate(sees):
        used = np.minimum(np.maximum(pages, 0), len(latents) - 1)
        c, r = (pool[used].reshape(len(pages) * case.page_size, -1) for pool in (latents, ropes))
        heads = []
        for head in range(case.heads):
            with np.errstate(invalid="ignore"):
                keys, values = np.concatenate([c @ w_uk[head].T, r], axis=1), c @ w_uv[head].T
            q = np.concatenate([q_nope[row, head], q_rope[row, head]])
            size, width = case.page_size, len(pages)
            heads.append(oracle.attend(q, keys, values, slots, case.scale, None, None, size, width))
        rows.append([np.stack(part) for part in zip(*heads, strict=True)])
    return tuple(np.stack(part) for part in zip(*rows, strict=True))


@functools.cache
def batch_and_answer(case):
    """A case's batch and what the definition says of it, made once for all implementations."""
    arrays, projections, sees = build(case)
    return arrays, projections, sees, expected(case, arrays, projections, sees)


def run(implementation, case, arrays, interpret=None):
    """Call an implementation: through the public function, or the Pallas kernel interpreted."""
    interpret = INTERPRET.get(implementation) if interpret is None else interpret
    return compiled(implementation, case, interpret)(**arrays)


@functools.cache
def compiled(implementation, case, interpret):
    options = {"scale": case.scale, "page_stats": case.page_stats}
    if case.residual is not None:
        options["residual"] = case.residual
    if implementation in ("reference", "xla"):
        function = functools.partial(API[case.form], implementation=implementation, **options)
    else:
        module = import_module(f"kvjax.pallas_kernels.latent_attention.{implementation}")
        kernel = getattr(module, f"{API[case.form].__name__}_{implementation}")

        def function(latents, ropes, page_ids=None, page_tokens=None, **arrays):
            # The public function refuses kernels here; what it resolves is resolved here too.
            if page_ids is not None:
                chosen = page_tokens[:, None] if page_tokens.ndim == 3 else None
                if chosen is not None:
                    page_tokens = jnp.where(page_tokens.any(axis=2), case.page_size, 0)
                lists = page_ids[:, None], page_tokens[:, None]
                ids, tokens = bounded_lists(*lists, latents.shape[0], case.page_size)
                arrays |= {"page_ids": ids, "page_tokens": tokens, "chosen": chosen}
            pools = {
                name: pool if isinstance(pool, PackedPages) else pool[:, None]
                for name, pool in (("latents", latents), ("ropes", ropes))
            }
            return kernel(**pools, **arrays, **options, interpret=interpret)

    return quick(function)


def quick(function, **options):
    """A jitted function that compiles fast and need not run fast."""
    level = {"xla_backend_optimization_level": 0}
    return jax.jit(functools.partial(function, **options), compiler_options=level)


def assert_close(case, result, wanted, w_uv, rows):
    """Hold some rows of a result against the definition; infinities must match exactly."""
    tolerance = TOLERANCE[case.dtype]
    out = np.einsum("thc,hvc->thv", np.asarray(result.out, np.float64)[rows], w_uv)
    np.testing.assert_allclose(out, wanted[0][rows], tolerance, tolerance, err_msg="out")
    for name, want in zip(result._fields[1:], wanted[1:], strict=True):
        got = getattr(result, name)
        if name != "lse" and not case.page_stats:
            assert got is None
            continue
        assert got.dtype == jnp.float32
        got = np.asarray(got, np.float64)[rows]
        np.testing.assert_allclose(got, want[rows], tolerance, tolerance, err_msg=name)


def check(implementation, case):
    """The body: the implementation equals the definition, and damage stays where it is seen."""
    arrays, (_, _, w_uv), sees, wanted = batch_and_answer(case)
    result = run(implementation, case, arrays)
    assert result.out.dtype == arrays["q_latent"].dtype
    assert result.out.shape == (len(sees), case.heads, case.latent)
    assert_close(case, result, wanted, w_uv, slice(None))
    blind = np.asarray([len(slots) == 0 for _, slots in sees])
    assert blind.any()
    assert not np.asarray(result.out, np.float32)[blind].any()  # not nearly nothing: nothing
    check_that_damage_stays_alone(implementation, case)


def check_that_damage_stays_alone(implementation, case):
    """NaN in a latent that one query sees, and in a position key that another does."""
    arrays, (_, _, w_uv), sees, wanted = batch_and_answer(case)
    size, arrays = case.page_size, dict(arrays)
    victims = sorted(range(len(sees)), key=lambda row: -len(sees[row][1]))
    other = next(row for row in victims if (sees[row][0] != sees[victims[0]][0]).any())
    hit, near = np.zeros((2, len(sees)), bool)
    for name, victim in (("ropes", victims[0]), ("latents", other)):
        slot = sees[victim][1][-1]
        page, place = sees[victim][0][slot // size], slot % size
        if isinstance(arrays[name], PackedPages):
            group = place * arrays[name].scale.shape[2] // size
            scale = arrays[name].scale.at[page, 0, group].set(jnp.nan)
            arrays[name] = dataclasses.replace(arrays[name], scale=scale)
        else:
            arrays[name] = arrays[name].at[page, place].set(jnp.nan)
        for row, (pages, slots) in enumerate(sees):
            slots = np.asarray(slots, int)
            hit[row] |= ((pages[slots // size] == page) & (slots % size == place)).any()
            # Queries of one sequence are computed together, and may be hit together.
            near[row] |= (pages == sees[victim][0]).all()
    result = run(implementation, case, arrays)
    assert np.isnan(np.asarray(result.out, np.float32)[hit]).all()
    assert np.isnan(np.asarray(result.lse)[hit]).all()
    assert_close(case, result, wanted, w_uv, ~(hit | near))
