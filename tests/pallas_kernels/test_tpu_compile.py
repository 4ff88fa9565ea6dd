"""The Mosaic kernels compiled for real TPU generations, on a machine that has none."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import SingleDeviceSharding

from kvjax.pallas_kernels.mosaic.layout import pool_format
from kvjax.pallas_kernels.paged_attention.tpu import paged_attention_tpu
from kvjax.pallas_kernels.ragged_paged_attention.tpu import ragged_paged_attention_tpu

TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x4")
# Query heads, KV heads, head_dim: Llama-3 8B, SmolLM2 135M, Gemma-2 9B, Phi-2.
SHAPES = ((32, 8, 128), (9, 3, 64), (16, 8, 256), (32, 32, 80))
BATCH, WIDTH, CHUNK = 8, 256, 256
PLAIN = {"window": None, "sink_tokens": 0, "soft_cap": None, "page_stats": False}
EVERYTHING = {"window": 1024, "sink_tokens": 4, "soft_cap": 50.0, "page_stats": True}


class Arguments:
    """Shapes of a call's arguments, placed on a device that is not here."""

    def __init__(self, device, heads, kv_heads, head_dim, *, num_pages, page_size, dtype):
        self.sharding = SingleDeviceSharding(device)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.dtype = jnp.dtype(dtype)
        pool = (num_pages, kv_heads, page_size, head_dim)
        self.pool = jax.ShapeDtypeStruct(pool, dtype, sharding=pool_format(self.sharding))
        self.tables = self.int32(BATCH, WIDTH)
        self.lengths = self.int32(BATCH)

    def int32(self, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.sharding)

    def queries(self, rows):
        shape = (rows, self.heads, self.head_dim)
        return jax.ShapeDtypeStruct(shape, self.dtype, sharding=self.sharding)

    @property
    def sinks(self):
        return jax.ShapeDtypeStruct((self.heads,), jnp.float32, sharding=self.sharding)


def compile_decode(arguments, sinks=False, **options):
    options = {"scale": 0.1, **PLAIN, **options}
    function = jax.jit(functools.partial(paged_attention_tpu, **options))
    return function.lower(
        arguments.queries(BATCH),
        arguments.pool,
        arguments.pool,
        arguments.tables,
        arguments.lengths,
        query_positions=arguments.lengths,
        sink_logits=arguments.sinks if sinks else None,
    ).compile()


def compile_ragged(arguments, sinks=False, **options):
    options = {"scale": 0.1, **PLAIN, **options}
    function = jax.jit(functools.partial(ragged_paged_attention_tpu, **options))
    return function.lower(
        arguments.queries(BATCH + CHUNK),
        arguments.pool,
        arguments.pool,
        arguments.tables,
        arguments.lengths,
        arguments.int32(BATCH + 1),
        sink_logits=arguments.sinks if sinks else None,
    ).compile()


def assert_no_copy_of_the_pool(compiled, arguments):
    """Nothing as large as a pool is temporary, and nothing of its shape is computed."""
    pool = arguments.pool
    stored = pool.size * pool.dtype.itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < stored / 10
    text = compiled.as_text()
    assert "tpu_custom_call" in text
    shape = ",".join(map(str, pool.shape))
    made = re.findall(rf"= \w+\[{shape}\]\S* ([\w-]+)\(", text)
    assert set(made) == {"parameter"}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_decode_compiles_without_a_copy_of_the_pool(device, topology, shape):
    arguments = Arguments(
        device(topology), *shape, num_pages=8192, page_size=16, dtype=jnp.bfloat16
    )
    assert_no_copy_of_the_pool(compile_decode(arguments), arguments)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_ragged_compiles_without_a_copy_of_the_pool(device, topology, shape):
    arguments = Arguments(
        device(topology), *shape, num_pages=8192, page_size=16, dtype=jnp.bfloat16
    )
    assert_no_copy_of_the_pool(compile_ragged(arguments), arguments)


@pytest.mark.parametrize("shape", SHAPES[2:], ids=str)
def test_ragged_compiles_for_other_head_dims(device, shape):
    arguments = Arguments(
        device("v6e:2x4"), *shape, num_pages=8192, page_size=16, dtype=jnp.bfloat16
    )
    assert_no_copy_of_the_pool(compile_ragged(arguments), arguments)


@pytest.mark.parametrize("compile_it", [compile_decode, compile_ragged])
def test_every_option_at_once_compiles(device, compile_it):
    arguments = Arguments(
        device("v5e:2x2"), 32, 8, 128, num_pages=16384, page_size=16, dtype=jnp.bfloat16
    )
    assert_no_copy_of_the_pool(compile_it(arguments, sinks=True, **EVERYTHING), arguments)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [8, 24, 128])
def test_page_sizes_compile(device, page_size, dtype):
    arguments = Arguments(
        device("v5e:2x2"), 8, 2, 64, num_pages=65536 // page_size, page_size=page_size, dtype=dtype
    )
    assert_no_copy_of_the_pool(compile_decode(arguments, window=100, sink_tokens=3), arguments)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_temporaries_do_not_grow_with_the_pool(device, head_dim):
    temporaries = set()
    for num_pages in (4096, 8192):
        arguments = Arguments(
            device("v5e:2x2"),
            8,
            4,
            head_dim,
            num_pages=num_pages,
            page_size=16,
            dtype=jnp.bfloat16,
        )
        compiled = compile_decode(arguments)
        temporaries.add(compiled.memory_analysis().temp_size_in_bytes)
    assert len(temporaries) == 1


def test_a_decode_loop_writes_and_reads_one_donated_pool(device):
    arguments = Arguments(
        device("v5e:2x2"), 9, 3, 64, num_pages=8192, page_size=16, dtype=jnp.bfloat16
    )

    def loop(k_pages, v_pages, q, block_tables, lengths):
        def step(_, state):
            k_pages, v_pages, q, lengths = state
            page = jnp.take_along_axis(block_tables, (lengths // 16)[:, None], axis=1)
            at = (page, jnp.arange(3)[None, :], (lengths % 16)[:, None])
            lengths = lengths + 1
            out = paged_attention_tpu(
                q,
                k_pages,
                v_pages,
                block_tables,
                lengths,
                scale=0.1,
                sink_logits=None,
                query_positions=lengths,
                **PLAIN,
            ).out
            new = out[:, :3]
            return k_pages.at[at].set(new), v_pages.at[at].set(new), out, lengths

        return lax.fori_loop(0, 4, step, (k_pages, v_pages, q, lengths))

    in_place = pool_format(arguments.sharding)
    compiled = (
        jax.jit(
            loop,
            donate_argnums=(0, 1),
            out_shardings=(in_place, in_place, arguments.sharding, arguments.sharding),
        )
        .lower(
            arguments.pool,
            arguments.pool,
            arguments.queries(BATCH),
            arguments.tables,
            arguments.lengths,
        )
        .compile()
    )
    memory = compiled.memory_analysis()
    padded = 2 * arguments.pool.size * 2 * (128 // 64)
    assert memory.alias_size_in_bytes >= padded
    assert memory.temp_size_in_bytes < padded / 10
    shape = ",".join(map(str, arguments.pool.shape))
    assert not re.findall(rf"= \w+\[{shape}\]\S* copy\(", compiled.as_text())


def test_pages_last_is_what_a_small_head_dim_gets_without_a_format(device):
    arguments = Arguments(
        device("v5e:2x2"), 9, 3, 64, num_pages=8192, page_size=16, dtype=jnp.bfloat16
    )
    arguments.pool = jax.ShapeDtypeStruct(
        arguments.pool.shape, arguments.dtype, sharding=arguments.sharding
    )
    with pytest.raises(AssertionError):
        assert_no_copy_of_the_pool(compile_decode(arguments), arguments)
