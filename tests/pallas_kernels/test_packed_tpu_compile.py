"""The Mosaic kernels over packed pools, compiled for real TPU generations that are not here."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from kvjax.formats import named_format
from kvjax.formats.format import abstract_pages
from kvjax.pallas_kernels.mosaic.layout import pool_format
from kvjax.pallas_kernels.paged_attention.tpu import paged_attention_tpu
from kvjax.pallas_kernels.ragged_paged_attention.tpu import ragged_paged_attention_tpu
from kvjax.pallas_kernels.sparse_paged_attention.tpu import sparse_paged_attention_tpu

LLAMA, SMOLLM2 = (32, 8, 128), (9, 3, 64)
BATCH, WIDTH, CHUNK = 8, 256, 256
OPTIONS = {"scale": 0.1, "soft_cap": None, "page_stats": False, "sink_logits": None}


def compile_for(device, function, keys, values, shape, page_size, dtype):
    """Compile a call over pools that hold 2**29 elements each; returns them too."""
    sharding = SingleDeviceSharding(device)
    heads, kv_heads, dim = shape
    # More than any VMEM holds, so that nothing of a pool is there by chance.
    num_pages = 2**29 // (kv_heads * page_size * dim)

    def array(shape, dtype, sharding=sharding):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def pool(packing):
        pages = abstract_pages(packing, num_pages, kv_heads, page_size, dim)
        pages = jax.tree.map(lambda leaf: array(leaf.shape, leaf.dtype), pages)
        at = pool_format(sharding)
        return pages.with_stored(
            {"planes": {n: array(x.shape, x.dtype, at) for n, x in pages.planes.items()}}
        )

    int32 = functools.partial(array, dtype=jnp.int32)
    tables, lengths = int32((BATCH, WIDTH)), int32((BATCH,))
    rows, more, options = BATCH, {}, OPTIONS | {"window": None, "sink_tokens": 0}
    if function is sparse_paged_attention_tpu:
        lists, options = int32((BATCH, kv_heads, 61)), OPTIONS
        lists = (lists, lists)
    elif function is paged_attention_tpu:
        lists, more = (tables, lengths), {"query_positions": lengths}
    else:
        rows, lists = BATCH + CHUNK, (tables, lengths, int32((BATCH + 1,)))
        options = options | {"residual": 128, "window": 1024, "sink_tokens": 4}
    pools = pool(keys), pool(values)
    queries = array((rows, heads, dim), dtype)
    function = jax.jit(functools.partial(function, **options))
    return pools, function.lower(queries, *pools, *lists, **more).compile()


def program_text(compiled):
    """The compiled program's text; skips where this jaxlib is too old to read what libtpu wrote."""
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        if jax.version.__version_info__ >= (0, 12) or "async-update" not in str(error):
            raise
        pytest.skip("temporaries are small; jaxlib cannot read this libtpu's asynchronous copies")


DECODE, RAGGED, SPARSE = (
    paged_attention_tpu,
    ragged_paged_attention_tpu,
    sparse_paged_attention_tpu,
)
CASES = (
    (DECODE, "int8", LLAMA, 16, jnp.bfloat16, "v5e:2x2"),
    (DECODE, "int8", SMOLLM2, 16, jnp.bfloat16, "v5e:2x2"),
    (DECODE, "fp8", LLAMA, 16, jnp.bfloat16, "v5e:2x2"),
    (DECODE, "fp8-e5m2", SMOLLM2, 16, jnp.bfloat16, "v6e:2x4"),
    (DECODE, "int4", LLAMA, 16, jnp.bfloat16, "v5e:2x2"),
    (SPARSE, "int4-int2", SMOLLM2, 16, jnp.bfloat16, "v5e:2x2"),
    (RAGGED, "int2", LLAMA, 16, jnp.bfloat16, "v5e:2x2"),
    (RAGGED, "int4", SMOLLM2, 16, jnp.bfloat16, "v5e:2x2"),
    (DECODE, "int3", LLAMA, 8, jnp.float32, "v5p:2x2x1"),
    (RAGGED, "kivi2", LLAMA, 64, jnp.bfloat16, "v6e:2x4"),
)


@pytest.mark.parametrize(
    ("function", "name", "shape", "page_size", "dtype", "topology"),
    CASES,
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_compiles_without_unpacking_or_copying_the_pool(
    device, function, name, shape, page_size, dtype, topology
):
    keys, values = named_format(name).keys, named_format(name).values
    pools, compiled = compile_for(device(topology), function, keys, values, shape, page_size, dtype)
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < sum(pool.nbytes for pool in pools)
    text = program_text(compiled)
    assert "tpu_custom_call" in text
    for plane in jax.tree.leaves([pool.planes for pool in pools]):
        shape = ",".join(map(str, plane.shape))
        assert set(re.findall(rf"= \w+\[{shape}\]\S* ([\w-]+)\(", text)) == {"parameter"}
