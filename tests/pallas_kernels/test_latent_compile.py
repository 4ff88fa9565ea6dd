"""Attention over latents of DeepSeek-V3's own shapes, compiled for machines that are not here."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from kvjax.formats import abstract_pages, named_format
from kvjax.pallas_kernels import (
    PackedPages,
    latent_attention,
    ragged_latent_attention,
    sparse_latent_attention,
    token_latent_attention,
)
from kvjax.pallas_kernels.latent_attention.tpu import (
    latent_attention_tpu,
    ragged_latent_attention_tpu,
    sparse_latent_attention_tpu,
)
from kvjax.pallas_kernels.mosaic.layout import pool_format
from tests.pallas_kernels.test_packed_tpu_compile import program_text

HEADS, LATENT, ROPE, CONTEXT = 128, 512, 64, 131_072
TOP_TOKENS, BATCH, CHUNK = 2048, 4, 64
SCALE = 192**-0.5
API = {
    "decode": latent_attention,
    "ragged": ragged_latent_attention,
    "tokens": sparse_latent_attention,
}


def stored(pool):
    """Bytes of a pool's arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool))


def packed(name, num_pages, page_size, array, plane):
    """Both pools in a format, by name."""
    chosen = named_format(name).latents

    def pool(packing, dim):
        pages = abstract_pages(packing, num_pages, 1, page_size, dim)
        pages = jax.tree.map(lambda leaf: array(leaf.shape, leaf.dtype), pages)
        planes = {n: plane(x.shape, x.dtype) for n, x in pages.planes.items()}
        return pages.with_stored({"planes": planes})

    return {"latents": pool(chosen.values, LATENT), "ropes": pool(chosen.keys, ROPE)}


def shapes(form, page_size, array, pool):
    """A call's arguments by name: 8 contexts of 128k tokens fill the pools."""
    num_pages, width = 8 * CONTEXT // page_size, CONTEXT // page_size
    rows = BATCH + CHUNK if form == "ragged" else BATCH
    listed = min(TOP_TOKENS, width)
    lists = {
        "decode": {"block_tables": (BATCH, width), "lengths": (BATCH,)},
        "ragged": {
            "block_tables": (BATCH, width),
            "kv_lengths": (BATCH,),
            "cu_q_lengths": (BATCH + 1,),
        },
        "tokens": {"page_ids": (BATCH, listed)},
    }[form]
    arguments = {name: array(shape, jnp.int32) for name, shape in lists.items()}
    if form == "tokens":
        arguments["page_tokens"] = array((BATCH, listed, page_size), bool)
    return arguments | {
        "q_latent": array((rows, HEADS, LATENT), jnp.bfloat16),
        "q_rope": array((rows, HEADS, ROPE), jnp.bfloat16),
        "latents": pool((num_pages, page_size, LATENT), jnp.bfloat16),
        "ropes": pool((num_pages, page_size, ROPE), jnp.bfloat16),
    }


def on_tpu(latents, ropes, page_ids=None, page_tokens=None, **arguments):
    """What the public functions call on a TPU."""
    plain = not isinstance(latents, PackedPages)
    pools = {"latents": latents[:, None], "ropes": ropes[:, None]} if plain else {}
    pools = pools or {"latents": latents, "ropes": ropes}
    options = {"scale": SCALE, "page_stats": False}
    if page_ids is not None:
        counts = jnp.where(page_tokens.any(axis=2), latents.shape[1], 0)
        lists = {"page_ids": page_ids[:, None], "page_tokens": counts[:, None]}
        lists["chosen"] = page_tokens[:, None]
        return sparse_latent_attention_tpu(**pools, **arguments, **lists, **options)
    ragged = "cu_q_lengths" in arguments
    function = ragged_latent_attention_tpu if ragged else latent_attention_tpu
    return function(**pools, **arguments, **options)


@pytest.mark.parametrize(
    ("form", "page_size"),
    [("decode", 64), ("decode", 128), ("ragged", 64), ("tokens", 64), ("tokens", 128)],
)
def test_compiles_for_a_tpu_without_a_copy_of_a_pool(device, form, page_size):
    sharding = SingleDeviceSharding(device("v5e:2x2"))
    array = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    pool = functools.partial(jax.ShapeDtypeStruct, sharding=pool_format(sharding, axes=3))
    arguments = shapes(form, page_size, array, pool)
    compiled = jax.jit(on_tpu).lower(**arguments).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    # Less than a hundredth of the smaller pool: not even the narrow one is copied, or padded.
    ropes = arguments["ropes"]
    assert temporary < ropes.size * ropes.dtype.itemsize / 100
    text = program_text(compiled)
    assert "tpu_custom_call" in text
    for name in ("latents", "ropes"):
        pages, *page = arguments[name].shape
        for shape in ((pages, *page), (pages, 1, *page)):
            made = re.findall(rf"= \w+\[{','.join(map(str, shape))}\]\S* ([\w-]+)\(", text)
            assert set(made) <= {"parameter", "bitcast"}


@pytest.mark.parametrize(("form", "name"), [("decode", "int4"), ("ragged", "int8")])
def test_packed_pools_are_read_as_they_are_on_a_tpu(device, form, name):
    sharding = SingleDeviceSharding(device("v5e:2x2"))
    array = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    plane = functools.partial(jax.ShapeDtypeStruct, sharding=pool_format(sharding))
    arguments = shapes(form, 64, array, array)
    num_pages, page_size, _ = arguments["latents"].shape
    pools = packed(name, num_pages, page_size, array, plane)
    compiled = jax.jit(on_tpu).lower(**arguments | pools).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < stored(pools["ropes"]) / 10
    text = program_text(compiled)
    assert "tpu_custom_call" in text
    for plane in jax.tree.leaves([pool.planes for pool in pools.values()]):
        shape = ",".join(map(str, plane.shape))
        made = set(re.findall(rf"= \w+\[{shape}\]\S* ([\w-]+)\(", text))
        assert not made & {"copy", "copy-start", "transpose", "fusion", "convert"}


def test_parts_of_pages_are_read_without_a_copy_of_a_pool(device):
    """Of pages of 64 tokens a TPU reads the parts of 8 that hold a chosen one."""
    sharding = SingleDeviceSharding(device("v5e:2x2"))
    array = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    pool = functools.partial(jax.ShapeDtypeStruct, sharding=pool_format(sharding, axes=3))
    arguments = shapes("decode", 64, array, pool)
    del arguments["lengths"]
    arguments["block_tables"] = array((BATCH, 64), jnp.int32)  # a wide list takes long to compile
    arguments["token_ids"] = array((BATCH, TOP_TOKENS), jnp.int32)
    tpu = AbstractDevice("TPU v5 lite", 1, "tpu")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=tpu)):
        function = functools.partial(token_latent_attention, scale=SCALE)
        compiled = jax.jit(function).lower(**arguments).compile()
    assert "tpu_custom_call" in program_text(compiled)
    ropes = arguments["ropes"]
    stored = ropes.size * ropes.dtype.itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < stored / 10


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("form", API)
def test_lowers_for_cuda(form):
    arguments = shapes(form, 64, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct)
    function = functools.partial(API[form], scale=SCALE, implementation="gpu")
    gpu = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=gpu)):
        lowered = jax.jit(function).trace(**arguments).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize(
    ("form", "name"), [*((form, None) for form in API), ("decode", "int4"), ("ragged", "int4")]
)
def test_xla_copies_no_pool(form, name):
    """The pools' missing axis of one head must not cost a copy, nor outputs grow with contexts.

    Packed pools are unpacked block by block: elements would take eight times the codes' bytes.
    """
    arguments = shapes(form, 64, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct)
    if name is not None:
        array = jax.ShapeDtypeStruct
        arguments |= packed(name, *arguments["latents"].shape[:2], array, array)
    function = functools.partial(API[form], scale=SCALE, implementation="xla")
    level = {"xla_backend_optimization_level": 1}
    compiled = jax.jit(function).lower(**arguments).compile(compiler_options=level)
    ropes, queries = arguments["ropes"], arguments["q_latent"]
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < 8 * 4 * queries.size + stored(ropes) / 10
