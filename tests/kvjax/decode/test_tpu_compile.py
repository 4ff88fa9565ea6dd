"""`generate` and `stream` compiled whole for a TPU, on a machine that has none."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

from kvjax.config import CacheConfig
from kvjax.decode import Sampling, inputs
from kvjax.decode.choosing import ByPages, StoredPrefix
from kvjax.decode.generate import _generate
from kvjax.decode.near_memory import Near, _with_pinned_rows
from kvjax.decode.opening import IN_PLACE, _prefill_chunk
from kvjax.decode.prefix_call import _reprefill
from kvjax.decode.program import compiled
from kvjax.decode.sampling import make_sampler
from kvjax.decode.shapes import plan
from kvjax.decode.step import Rules, start
from kvjax.decode.stream import _draw, _step
from kvjax.model import from_checkpoint
from kvjax.models import LayerConfig, ModelConfig, random_checkpoint
from kvjax.policies import LowBitKeys

PAGES = 512
ABSTRACT_MESH = AbstractMesh(
    (1,),
    ("x",),
    axis_types=(AxisType.Auto,),
    abstract_device=AbstractDevice("TPU v5 lite", 1, "tpu"),
)


@pytest.fixture
def there(monkeypatch):
    """A TPU, as a sharding."""
    pytest.importorskip("libtpu", reason="no libtpu: `pip install libtpu` compiles without a TPU")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # there is no metadata server to ask
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # test workers load it side by side
    device = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]
    return SingleDeviceSharding(device)


class Call:
    """The static and dynamic arguments of a call with two prompts."""

    def __init__(self, head_dim, window=None):
        layers = (LayerConfig(4, 2, head_dim, window), LayerConfig(4, 2, head_dim))
        config = ModelConfig("llama", 512, 256, 512, layers, max_context=4096)
        model = from_checkpoint(random_checkpoint(config), name="random", dtype="bfloat16")
        self.model = model
        self.shapes = plan(
            config,
            model.spec,
            [600, 3],
            new_tokens=32,
            prefill_chunk=256,
            cache=CacheConfig(num_pages=PAGES),
        )
        self.static = (model.graphdef, self.shapes)
        self.hidden_size = config.hidden_size
        self.params = model.params
        self.prompts = inputs.flat_prompts([[1] * 600, [2] * 3], self.shapes)
        self.rules = Rules(
            sampler=make_sampler(Sampling(temperature=0.8, top_p=0.9), config.vocab_size),
            key=jax.random.key(0),
            stop_tokens=inputs.padded_stops([2]),
            limits=inputs.row_limits(2, 32, self.shapes.batch),
        )
        self.pool = f"bf16\\[{PAGES},2,16,{head_dim}\\]"

    def copies_of_a_pool(self, program):
        return re.findall(rf"{self.pool}\S* (?:copy|copy-start|transpose)\(", program)


def on(place, tree):
    """The tree's arrays as they would lie there."""
    if not isinstance(place, SingleDeviceSharding):
        formats = place
    else:
        formats = jax.tree.map(lambda _: place, tree)
    return jax.tree.map(
        lambda x, f: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=f), tree, formats
    )


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_prefill_and_loop_use_the_mosaic_kernels_and_copy_no_pool(there, head_dim):
    call = Call(head_dim)
    arguments = on(there, (call.params, call.prompts, call.rules))
    with jax.sharding.use_abstract_mesh(ABSTRACT_MESH):
        program, _ = compiled(_generate, call.static, *arguments)
    text = program.as_text()
    assert text.count("tpu_custom_call") >= 2  # one in prefill, one in the decode loop
    assert not call.copies_of_a_pool(text)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["prefill_chunk", "draw", "step"])
def test_the_programs_of_a_stream_hand_pools_on_without_a_copy(there, head_dim, name):
    call = Call(head_dim)
    cache = jax.eval_shape(lambda: inputs.empty_cache(call.shapes))
    state = jax.eval_shape(lambda cache: start(cache, call.hidden_size, call.rules.limits), cache)
    state = on(inputs.formats_between(state, there), state)
    rest = (call.prompts, jnp.int32(0)) if name == "prefill_chunk" else (call.rules,)
    function = {"prefill_chunk": _prefill_chunk, "draw": _draw, "step": _step}[name]
    with jax.sharding.use_abstract_mesh(ABSTRACT_MESH):
        program, _ = compiled(
            function,
            call.static,
            on(there, call.params),
            state,
            *on(there, rest),
            donate=(1,),
            result_as=1,
        )
    text = program.as_text()
    assert ("tpu_custom_call" in text) == (name != "draw")
    assert not call.copies_of_a_pool(text)
    pool_bytes = sum(x.size * x.dtype.itemsize for x in (*cache.k_pages, *cache.v_pages))
    assert program.memory_analysis().alias_size_in_bytes >= pool_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("device_rows", "pinned_rows"), [(0, 0), (64, 0), (64, 96)])
def test_re_prefill_is_a_program_for_a_tpu(there, device_rows, pinned_rows):
    """With callbacks in it, packed reads in branches, and the pool written in place."""
    call, room, head_dim = Call(128), 8, 128
    config = call.model.config
    layers, kv_heads = len(config.layers), config.layers[0].num_kv_heads
    shapes = plan(
        config,
        call.model.spec,
        [room * 16 + 40],
        new_tokens=8,
        prefill_chunk=64,
        cache=CacheConfig(num_pages=PAGES),
    )
    sketch = LowBitKeys(3)
    keys = jax.ShapeDtypeStruct((32, kv_heads, 16, head_dim), jnp.bfloat16)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    host = there.with_memory_kind("pinned_host")
    near = Near(
        *(
            jax.ShapeDtypeStruct((rows, 1, 1, 2, 16, head_dim), jnp.bfloat16, sharding=place)
            if rows
            else None
            for rows, place in ((device_rows, there), (pinned_rows, host))
        )
    )
    prefix = StoredPrefix(
        (jax.eval_shape(sketch.build, keys),) * layers,
        number,
        number,
        number,
        Near(None, None),
    )
    limits = jax.ShapeDtypeStruct((1,), jnp.int32)
    cache = jax.eval_shape(lambda: inputs.empty_cache(shapes))
    state = jax.eval_shape(lambda c, n: start(c, config.hidden_size, n), cache, limits)
    state = on(inputs.formats_between(state, there), state)
    suffix = inputs.flat_prompts([[1] * 40], shapes)
    with jax.sharding.use_abstract_mesh(ABSTRACT_MESH):
        program, _ = compiled(
            _reprefill,
            (call.model.graphdef, shapes, room, ByPages(sketch), None),
            on(there, call.params),
            state,
            dataclasses.replace(on(there, prefix), near=near),
            on(there, suffix),
            **IN_PLACE,
        )
    text = program.as_text()
    assert text.count("tpu_custom_call") >= layers
    assert not call.copies_of_a_pool(text)
    assert ("conditional(" in text) == bool(device_rows)
    assert ("dynamic-slice-start" in text) == bool(pinned_rows)  # straight from the host's memory


@pytest.mark.slow
def test_page_locked_rows_are_written_in_place_by_a_tpu(there):
    host = there.with_memory_kind("pinned_host")
    unit = (1, 1, 2, 16, 128)
    pinned = jax.ShapeDtypeStruct((256, *unit), jnp.bfloat16, sharding=host)
    rows, count = on(there, (jnp.zeros((8,), jnp.int32), jnp.int32(0)))
    data = jax.ShapeDtypeStruct((8, *unit), jnp.bfloat16, sharding=there)
    write = jax.jit(_with_pinned_rows, donate_argnums=0, out_shardings=host)
    program = write.lower(pinned, rows, data, count).compile()
    assert "input_output_alias={ {}: (0, {}" in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < 256 * 2 * 16 * 128 * 2
