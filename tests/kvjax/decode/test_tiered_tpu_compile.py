"""Prefill and the decode loop over tiers, compiled whole for a TPU on a machine that has none."""

import re

import jax
import jax.numpy as jnp
import pytest

from kvjax.config import CacheConfig
from kvjax.decode import inputs
from kvjax.decode.opening import IN_PLACE
from kvjax.decode.program import compiled
from kvjax.decode.step import start
from kvjax.decode.stream import _tiered_step
from kvjax.decode.tiered import TieredCall, _decode, _prefill
from kvjax.decode.tiered_state import empty_tiers
from kvjax.policies import Place, Select, Window
from tests.kvjax.decode.test_tpu_compile import ABSTRACT_MESH, Call, on, there

__all__ = ["there"]  # a fixture


def tiered(call, **cache):
    """Shapes of two prompts over tiers, and an abstract state."""
    prompts = [[1] * 600, [2] * 3]
    cache = CacheConfig(select=Select("25%", **cache), window=Window(1), place=Place())
    shapes = TieredCall(call.model, prompts, new_tokens=32, cache=cache).shapes
    tiers = jax.eval_shape(lambda: empty_tiers(shapes, ()))
    state = jax.eval_shape(lambda cache, n: start(cache, call.hidden_size, n), tiers, limits(call))
    return shapes, state


def limits(call):
    return jax.ShapeDtypeStruct(call.rules.limits.shape, jnp.int32)


def pool_bytes(state):
    return sum(x.size * x.dtype.itemsize for x in (*state.cache.keys, *state.cache.values))


def copies_of_a_pool(shapes, program):
    pool = f"bf16\\[{shapes.batch * sum(shapes.slots[0])},1,16,128\\]"
    return re.findall(rf"{pool}\S* (?:copy|copy-start|transpose)\(", program)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["low-bit", "quest"])
def test_a_step_is_a_program_that_hands_its_slots_on(there, by):
    call = Call(128)
    shapes, state = tiered(call, by=by)
    state = on(inputs.formats_between(state, there), state)
    with jax.sharding.use_abstract_mesh(ABSTRACT_MESH):
        program, _ = compiled(
            _tiered_step,
            (call.model.graphdef, shapes),
            on(there, call.params),
            state,
            on(there, call.rules),
            **IN_PLACE,
        )
    text = program.as_text()
    layers = len(call.model.config.layers)
    assert text.count("tpu_custom_call") >= 2 * layers  # what is near, and what was fetched
    assert not copies_of_a_pool(shapes, text)
    assert program.memory_analysis().alias_size_in_bytes >= pool_bytes(state)


@pytest.mark.slow
def test_the_whole_loop_is_one_program(there):
    call = Call(128)
    shapes, state = tiered(call)
    with jax.sharding.use_abstract_mesh(ABSTRACT_MESH):
        program, _ = compiled(
            _decode,
            (call.model.graphdef, shapes),
            *on(there, (call.params, state, call.rules)),
            donate=(1,),
        )
    assert "while(" in program.as_text()
    assert "tpu_custom_call" in program.as_text()


@pytest.mark.slow
def test_a_ring_of_pages_is_part_of_the_loop(there):
    """A layer with a window of 100 tokens keeps eight pages a row, and others choose."""
    call = Call(128, window=100)
    shapes, state = tiered(call)
    with jax.sharding.use_abstract_mesh(ABSTRACT_MESH):
        program, _ = compiled(
            _decode,
            (call.model.graphdef, shapes),
            *on(there, (call.params, state, call.rules)),
            donate=(1,),
        )
    text = program.as_text()
    ring = state.cache.keys[0]
    assert ring.shape == (shapes.batch * 8, 2, 16, 128)
    assert "while(" in text
    assert text.count("tpu_custom_call") >= 2
    of_ring = rf"bf16\[{ring.shape[0]},2,16,128\]"
    assert re.findall(of_ring, text)
    assert not re.findall(rf"{of_ring}\S* (?:copy|copy-start|transpose)\(", text)


@pytest.mark.slow
def test_prefill_is_a_program_that_writes_its_slots_in_place(there):
    call = Call(128)
    shapes, state = tiered(call)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    tokens = jax.ShapeDtypeStruct((shapes.tokens,), jnp.int32)
    state = on(inputs.formats_between(state, there), state)
    with jax.sharding.use_abstract_mesh(ABSTRACT_MESH):
        program, _ = compiled(
            _prefill,
            (call.model.graphdef, shapes),
            on(there, call.params),
            state,
            *on(there, (tokens, number, number, number)),
            **IN_PLACE,
        )
    assert "tpu_custom_call" in program.as_text()
    assert program.memory_analysis().alias_size_in_bytes >= pool_bytes(state)
