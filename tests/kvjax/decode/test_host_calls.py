"""Host functions inside programs: what they are given, where they write, how often they run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kvjax.decode import host_calls
from kvjax.decode.host_calls import call_host

PAGE = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
NUMBER = jax.ShapeDtypeStruct((), jnp.int32)


@pytest.fixture(params=["in place", "copied"], autouse=True)
def way(request, monkeypatch):
    """As on a CPU, and as on other platforms."""
    monkeypatch.setattr(host_calls, "writes_in_place", lambda: request.param == "in place")


def test_fills_what_the_program_reads():
    def double(page, number, given, scalar):
        page[...] = given * 2
        number[...] = scalar + 1

    given = jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)
    call = jax.jit(lambda *x: call_host(double, (PAGE, NUMBER), *x))
    page, number = call(given, jnp.int32(7))
    assert (page.dtype, number.dtype) == (jnp.bfloat16, jnp.int32)
    np.testing.assert_array_equal(np.asarray(page, np.float32), 2 * np.arange(6).reshape(2, 3))
    assert number == 8


def test_runs_whenever_it_is_reached():
    """Twice with equal arguments, in a loop, in a branch that is taken; not in one that is not."""
    seen = []

    def note(number, given):
        seen.append(int(given))
        number[...] = given + 1

    @jax.jit
    def program(value):
        first = call_host(note, (NUMBER,), value)[0]
        again = call_host(note, (NUMBER,), value)[0]
        total = lax.fori_loop(
            0, 3, lambda _, x: call_host(note, (NUMBER,), x)[0], first + 0 * again
        )
        return lax.cond(total > 0, lambda: total, lambda: call_host(note, (NUMBER,), total)[0])

    assert program(jnp.int32(4)) == 8
    assert sorted(seen) == [4, 4, 5, 6, 7]


def test_arguments_may_be_kept():
    """The program's memory is used for something else once the function has returned."""
    kept = []

    def keep(number, given):
        kept.append(given)
        number[...] = 0

    @jax.jit
    def program(x):
        def step(i, x):
            zero = call_host(keep, (NUMBER,), x)[0]
            return x + 1 + zero.astype(x.dtype)

        return lax.fori_loop(0, 4, step, x)

    jax.block_until_ready(program(jnp.zeros((64, 64))))
    assert [float(x.min()) for x in kept] == [float(x.max()) for x in kept] == [0, 1, 2, 3]
