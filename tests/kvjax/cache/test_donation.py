"""Compiled programs update donated pools in place: they hold one pool, and copy none."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from kvjax.cache import advance, init, reserve, token_slots, write
from kvjax.decode import Sampling, inputs
from kvjax.decode.generate import _generate
from kvjax.decode.opening import _prefill_chunk
from kvjax.decode.sampling import make_sampler
from kvjax.decode.score import _score
from kvjax.decode.shapes import Shapes
from kvjax.decode.step import Rules, start
from kvjax.decode.stream import _draw, _step
from tests.kvjax.cache.plain import SPEC
from tests.kvjax.decode.tiny import model

PAGES = (96, 192)
BATCH = 2
any_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def pool_sizes(cache):
    pools = (*cache.k_pages, *cache.v_pages)
    return sum(pool.nbytes for pool in pools), {pool.shape for pool in pools}


def copies(text, shapes):
    """Instructions that copy a whole pool, and the computation each is in."""
    found, computation = [], ""
    for line in text.splitlines():
        if line.endswith("{"):
            computation = line.split("(")[0].strip()
        for shape in shapes:
            listed = ",".join(map(str, shape))
            if re.search(rf"= \w+\[{listed}\]\S* (copy|copy-start)\(", line):
                found.append((computation, line.strip()))
    return found


def assert_in_place(programs, caches):
    """Two programs that differ in the number of pages alone: all pool bytes are aliased, what
    else is needed does not grow with the pool, and no pool is copied."""
    temporary = set()
    for program, cache in zip(programs, caches, strict=True):
        total, shapes = pool_sizes(cache)
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes >= total
        assert not copies(program.as_text(), shapes)
        temporary.add(memory.temp_size_in_bytes)
    small, large = min(temporary), max(temporary)
    growth = (PAGES[1] - PAGES[0]) * 4 * 8  # a few vectors over pages: who is free, ranks
    assert large - small <= growth


def shapes_of(tiny, num_pages, dtype):
    return Shapes(
        spec=dataclasses.replace(tiny.spec, dtype=dtype),
        batch=BATCH,
        chunk=32,
        chunks=4,
        num_pages=num_pages,
        max_pages=8,
        page_size=16,
        room=16,
        attention=None,
    )


@pytest.fixture(scope="module")
def tiny():
    return model("mistral")


def setting(tiny, num_pages, dtype="float32"):
    shapes = shapes_of(tiny, num_pages, dtype)
    rules = Rules(
        sampler=make_sampler(Sampling(), tiny.config.vocab_size),
        key=jax.random.key(0),
        stop_tokens=inputs.padded_stops([]),
        limits=inputs.row_limits(BATCH, 8, BATCH),
    )
    prompts = inputs.flat_prompts([[1] * 40, [2] * 30], shapes)
    state = start(inputs.empty_cache(shapes), tiny.config.hidden_size, rules.limits)
    return (tiny.graphdef, shapes), state, prompts, rules


def compiled(function, static, *args, donate=()):
    def program(*args):
        return function(static, *args)

    return jax.jit(program, donate_argnums=donate).lower(*args).compile()


def extend(cache, keys, values, cu):
    """What a layer's attention does around its kernel, for all layers."""
    counts = jnp.diff(cu)
    cache, _ = reserve(cache, counts, max_count=1)
    rows = jnp.arange(BATCH, dtype=jnp.int32)
    slots = token_slots(cache, rows, cache.lengths)
    for layer in range(len(cache.spec.layers)):
        cache = write(cache, layer, keys[layer], values[layer], slots)
    return advance(cache, counts)


@any_dtype
def test_reserve_write_advance(dtype):
    """And the cache that was given away cannot be used again: it would be the new one's memory."""
    keys = [jnp.ones((BATCH, s.kv_heads, s.head_dim)) for s in SPEC.layers]
    values = [jnp.ones((BATCH, s.kv_heads, s.value_dim)) for s in SPEC.layers]
    cu = jnp.arange(BATCH + 1, dtype=jnp.int32)
    spec = dataclasses.replace(SPEC, dtype=dtype)
    caches = [init(spec, num_pages=n, batch=BATCH, max_pages=8, page_size=16) for n in PAGES]
    programs = [
        jax.jit(extend, donate_argnums=0).lower(cache, keys, values, cu).compile()
        for cache in caches
    ]
    assert_in_place(programs, caches)
    updated = programs[0](caches[0], keys, values, cu)
    assert updated.lengths.tolist() == [1, 1]
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        programs[0](caches[0], keys, values, cu)


@any_dtype
def test_a_decode_step(tiny, dtype):
    """Attention reads the pages before the token is written; XLA must not keep the old pool."""
    programs, caches = [], []
    for num_pages in PAGES:
        static, state, _, rules = setting(tiny, num_pages, dtype)
        programs.append(compiled(_step, static, tiny.params, state, rules, donate=(1,)))
        caches.append(state.cache)
    assert_in_place(programs, caches)


@pytest.mark.slow
@any_dtype
def test_a_prefill_chunk(tiny, dtype):
    programs, caches = [], []
    for num_pages in PAGES:
        static, state, prompts, _ = setting(tiny, num_pages, dtype)
        program = compiled(
            _prefill_chunk, static, tiny.params, state, prompts, jnp.int32(0), donate=(1,)
        )
        programs.append(program)
        caches.append(state.cache)
    assert_in_place(programs, caches)


def test_the_opening_draw_moves_nothing(tiny):
    static, state, _, rules = setting(tiny, PAGES[0])
    program = compiled(_draw, static, tiny.params, state, rules, donate=(1,))
    assert_in_place([program, program], [state.cache] * 2)


@pytest.mark.slow
@any_dtype
@pytest.mark.parametrize("entry", [_generate, _score], ids=["generate", "score"])
def test_whole_programs_hold_one_pool(tiny, entry, dtype):
    """The pool is made inside, so it is a temporary: once, however often the loops turn. The loops
    copy nothing; only making the empty pools may."""
    temporary, totals = [], []
    for num_pages in PAGES:
        static, state, prompts, rules = setting(tiny, num_pages, dtype)
        args = (prompts, rules) if entry is _generate else (prompts,)
        program = compiled(entry, static, tiny.params, *args)
        total, shapes = pool_sizes(state.cache)
        totals.append(total)
        temporary.append(program.memory_analysis().temp_size_in_bytes)
        for computation, line in copies(program.as_text(), shapes):
            assert computation.startswith("ENTRY"), line
            assert "broadcast" in line, line
    growth = (PAGES[1] - PAGES[0]) * 4 * 8
    assert temporary[1] - temporary[0] <= totals[1] - totals[0] + growth
    assert temporary[0] >= totals[0]
