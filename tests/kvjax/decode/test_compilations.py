"""How many programs are compiled, and that a caller hears of it."""

import itertools

import jax
import numpy as np
import pytest

from kvjax.config import CacheConfig
from kvjax.decode import Sampling, generate, score, stream
from kvjax.decode.program import KEPT_PROGRAMS, compilations
from kvjax.decode.shapes import plan
from kvjax.model import from_checkpoint, kv_spec
from kvjax.models import random_checkpoint
from tests.kvjax.decode.tiny import CONFIGS, config, model, prompt

LONG = config(max_context=1 << 20)
SPEC = kv_spec(LONG, "float32")


def planned(lengths, new_tokens=64, most=512, **cache):
    return plan(
        LONG, SPEC, lengths, new_tokens=new_tokens, prefill_chunk=most, cache=CacheConfig(**cache)
    )


@pytest.mark.slow
def test_few_programs_serve_every_length():
    """Of one prompt and of batches: what the module says, and what fits the kept programs."""
    assert len({planned([n]) for n in range(1, 8193)}) <= 40
    assert len({planned([n], new_tokens=0) for n in range(2, 8193)}) <= 40
    assert len({planned([n]) for n in range(1, 131_073, 37)}) <= 48
    rng = np.random.default_rng(0)
    batches = [rng.integers(1, 2049, rng.integers(1, 9)).tolist() for _ in range(3000)]
    assert len({planned(batch) for batch in batches}) <= 160 < KEPT_PROGRAMS


@pytest.mark.parametrize("most", [16, 48, 512, 4096])
@pytest.mark.parametrize("size", [8, 16, 128])
def test_shapes_have_room_and_little_too_much(most, size):
    for lengths in ([1], [16], [17], [600], [5, 300, 1], [1024] * 3, [4097, 1]):
        for new in (0, 1, 16, 17, 100):
            shapes = planned(lengths, new, most, page_size=size)
            total = sum(lengths)
            pages = [-(-(n + max(new - 1, 0)) // size) for n in lengths]
            assert shapes.batch >= len(lengths) > shapes.batch // 2
            assert shapes.chunk <= most
            assert shapes.chunk % 16 == 0
            assert shapes.chunk * shapes.chunks >= total
            chunks = -(-total // shapes.chunk)  # those that are run
            assert chunks == -(-total // most)
            assert shapes.num_pages >= sum(pages) > shapes.num_pages * 2 // 3 - 1
            assert shapes.max_pages >= max(pages) > shapes.max_pages // 2
            assert shapes.room >= new


def compiles(call):
    before = compilations()
    call()
    return compilations() - before


@pytest.mark.slow
def test_one_bucket_is_compiled_once():
    """Other lengths, limits, seeds, sampling numbers, stop tokens, and even other weights of the
    same architecture run what was compiled first; the statistics say how many were new."""
    tiny, new = model(), {"max_new_tokens": 6}
    result = generate(tiny, prompt(9), **new)
    assert result.stats.compilations in (0, 1)  # another test may have asked for the same
    other = from_checkpoint(random_checkpoint(CONFIGS["llama"], seed=99), name="other")

    def all_greedy():
        for n in (1, 5, 8):
            found = generate(tiny, prompt(n), max_new_tokens=n, stop_tokens=[n])
            assert (found.stats.compilations, found.stats.compile_seconds) == (0, 0.0)
        generate(other, prompt(3), **new)

    def all_drawn():
        for heat, seed in ((0.5, 1), (1.5, 2)):
            generate(tiny, prompt(7), sampling=Sampling(temperature=heat), key=seed, **new)

    def streamed():
        for n in (2, 8):
            list(stream(tiny, prompt(n), **new))

    def scored():
        for n in (2, 9):
            score(tiny, prompt(n))

    assert compiles(all_greedy) == 0
    assert compiles(all_drawn) <= 1
    assert compiles(streamed) <= 4  # the empty pools, a chunk, the opening draw, a step
    assert compiles(scored) <= 1
    assert compiles(lambda: (all_greedy(), all_drawn(), streamed(), scored())) == 0


def test_jax_compiles_nothing_behind_the_scenes():
    """The second call with the same shapes must not compile at all, not even a helper."""
    tiny = model()
    events = []

    def hear(name, *_, **__):
        events.append(name)

    jax.monitoring.register_event_duration_secs_listener(hear)
    try:
        for _ in range(2):
            events.clear()
            generate(tiny, prompt(6), max_new_tokens=5)
            list(stream(tiny, prompt(6), max_new_tokens=5))
    finally:
        jax.monitoring.unregister_event_duration_listener(hear)
    assert not [name for name in events if "backend_compile" in name]


def test_progress():
    """Phases come in order and each ends at 1."""
    tiny = model()
    calls = {
        "generate": lambda report: generate(tiny, prompt(9), max_new_tokens=6, progress=report),
        "stream": lambda report: list(
            stream(tiny, prompt(40), max_new_tokens=2, prefill_chunk=16, progress=report)
        ),
        "score": lambda report: score(tiny, prompt(9), progress=report),
    }
    for name, call in calls.items():
        heard = []
        call(lambda phase, share, heard=heard: heard.append((phase, share)))
        phases = [phase for phase, _ in itertools.groupby(heard, key=lambda pair: pair[0])]
        assert (
            phases
            == {
                "generate": ["compile", "decode"],
                "stream": ["compile", "prefill"],
                "score": ["compile", "prefill"],
            }[name]
        )
        for phase in phases:
            shares = [share for what, share in heard if what == phase]
            assert shares == sorted(shares)
            assert shares[-1] == 1
