"""Packed pools for the shared test bodies: their batches, encoded, and as hostile as plain ones.

What no query may see is damaged after it was encoded: scales, middles and units of groups that hold
nothing else, and codes where a float can say NaN. The answer is that of the elements, in float64.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from kvjax.formats import Packing
from kvjax.pallas_kernels.packed_pages import PackedPages, plain
from tests.pallas_kernels import conformance, sparse_conformance

INT8 = Packing(bits=8, tokens=1, symmetric=True)
FLOAT8 = Packing("float8_e4m3fn", 8, symmetric=True)
FLOAT8_STATIC = Packing("float8_e5m2", 8, symmetric=True, scale=0.5)
KEYS_4 = Packing(bits=4, channels=1, scale_dtype="float8_e4m3fn")
VALUES_4 = Packing(bits=4, tokens=1, channels=32, scale_dtype="float8_e4m3fn")
KEYS_2 = Packing(bits=2, tokens=8, channels=1, scale_dtype="float16")
VALUES_3 = Packing(bits=3, tokens=4, symmetric=True, scale_dtype="float32")
BY_CHANNEL = "a scale a head and channel, for all pages"
PACKINGS = {
    "int8": (INT8, INT8),
    "float8": (FLOAT8, FLOAT8_STATIC),
    "int4": (KEYS_4, VALUES_4),
    "int2-int3": (KEYS_2, VALUES_3),
    "by-channel": (BY_CHANNEL, INT8),
}


def packed(arrays, name):
    """A batch with its pools packed, and the batch of what they stand for."""
    both = {pool: arrays[pool] for pool in ("k_pages", "v_pages")}
    both, elements = _packed(both, name)
    return arrays | both, arrays | elements


@functools.partial(
    jax.jit, static_argnums=1, compiler_options={"xla_backend_optimization_level": 0}
)
def _packed(pools, name):
    both = {
        pool: damaged(encode(pages, packing), pages)
        for (pool, pages), packing in zip(sorted(pools.items()), PACKINGS[name], strict=True)
    }
    return both, {pool: plain(pages) for pool, pages in both.items()}


def encode(pages, packing):
    """Encode pages; integers with a scale for each channel of a head are made by hand."""
    if packing != BY_CHANNEL:
        return packing.encode(pages)
    _, heads, _, dim = pages.shape
    scale = jnp.linspace(0.02, 0.04, heads * dim, dtype=jnp.float32).reshape(1, heads, 1, dim)
    codes = jnp.clip(jnp.round(jnp.nan_to_num(pages / scale)), -127, 127).astype(jnp.int8)
    encoded = INT8.encode(pages)
    return dataclasses.replace(
        encoded, planes={"codes": codes}, scale=scale, shared=("scale",), unit=None
    )


def damaged(pages: PackedPages, elements):
    """Put NaN wherever only slots that were never finite are concerned."""
    dead = ~jnp.isfinite(elements).all(axis=3)[..., None]  # [N, Hkv, P, 1]
    changed = {}
    for name in ("scale", "middle", "unit"):
        array = getattr(pages, name)
        if array is not None and name not in pages.shared:
            groups = array.shape[2]
            alone = dead.reshape(*dead.shape[:2], groups, -1).all(axis=3)[..., None]
            changed[name] = jnp.where(alone, jnp.asarray(jnp.nan, array.dtype), array)
    codes = pages.planes["codes"]
    if jnp.issubdtype(codes.dtype, jnp.floating):
        changed["planes"] = {"codes": jnp.where(dead, jnp.asarray(jnp.nan, codes.dtype), codes)}
    return pages.with_stored(changed)


@functools.cache
def batch_and_answer(op, case, name):
    """A case's batch, packed, and what the definition says of its elements."""
    shared = sparse_conformance if op == "sparse_paged_attention" else conformance
    op = () if op == "sparse_paged_attention" else (op,)
    arrays, options = shared.build(*op, case)
    arrays, elements = packed(arrays, name)
    return arrays, options, shared.expected(*op, elements, options)


def check(op, implementation, case, name):
    """The implementation over packed pools equals attention over what they stand for."""
    arrays, options, wanted = batch_and_answer(op, case, name)
    if op == "sparse_paged_attention":
        result = sparse_conformance.run(implementation, arrays, options)
    else:
        result = conformance.run(op, implementation, arrays, options)
    assert result.out.dtype == arrays["q"].dtype
    tolerance = conformance.TOLERANCE[case.q_dtype or case.dtype]
    conformance.assert_close(result, wanted, tolerance, case.page_stats)
