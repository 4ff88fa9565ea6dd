"""The choice of pages: both implementations against the definition, and hostile scores."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import Selection, select_pages

BATCH, HEADS = 5, 3
WIDTH = 40
COUNTS = (0, 1, 7, 39, 40)
both = pytest.mark.parametrize("implementation", ["reference", "xla"])


def scores_of(kind, seed=0):
    """Scores [B, Hkv, M]; those of pages that do not exist are higher than any other, or NaN."""
    rng = np.random.default_rng(seed)
    shape = (BATCH, HEADS, WIDTH)
    scores = {
        "normal": lambda: rng.normal(size=shape),
        "few values": lambda: rng.integers(0, 3, shape).astype(float),
        "equal": lambda: np.full(shape, 3.0),
        "zero": lambda: rng.choice([0.0, -0.0], shape),
        "broken": lambda: rng.choice([np.nan, np.inf, -np.inf, 1.0], shape),
        "lost": lambda: np.full(shape, np.nan),
    }[kind]()
    for row, count in enumerate(COUNTS):
        scores[row, :, count:] = rng.choice([np.inf, np.nan, 1e9])
    return scores.astype(np.float32)


def expected(scores, sinks, recent, tail, budgets, room):
    """One list after the other, by a sort of tuples."""
    pages = np.full((BATCH, HEADS, room), WIDTH)
    counts = np.zeros((BATCH, HEADS), int)
    for row, head in np.ndindex(BATCH, HEADS):
        live, last = COUNTS[row], recent + int(tail[row])
        most = min(max(budgets[row, head], sinks + last), room)

        def rank(page, row=row, head=head, live=live, last=last):
            score = scores[row, head, page]
            forced = page < sinks or page >= live - last
            return (not forced, -(-np.inf if np.isnan(score) else score), page)

        chosen = sorted(sorted(range(live), key=rank)[:most])
        pages[row, head, : len(chosen)] = chosen
        counts[row, head] = len(chosen)
    return pages, counts


@pytest.mark.parametrize("kind", ["normal", "few values", "equal", "zero", "broken", "lost"])
@both
def test_equals_the_definition(implementation, kind):
    rng = np.random.default_rng(1)
    scores = scores_of(kind)
    for room, sinks, recent in ((6, 1, 1), (17, 2, 3), (3, 0, 0), (50, 1, 2), (1, 0, 0)):
        tail = rng.random(BATCH) < 0.5 if room > sinks + recent else np.zeros(BATCH, bool)
        budgets = rng.integers(0, room + 5, (BATCH, HEADS))
        function = functools.partial(
            select_pages,
            room=room,
            sink_pages=sinks,
            recent_pages=recent,
            implementation=implementation,
        )
        chosen = jax.jit(function)(
            jnp.asarray(scores),
            jnp.asarray(COUNTS, jnp.int32),
            open_tail=jnp.asarray(tail) if room > sinks + recent else None,
            budgets=jnp.asarray(budgets, jnp.int32),
        )
        wanted = expected(scores, sinks, recent, tail, budgets, room)
        for got, want in zip(chosen, wanted, strict=True):
            assert got.dtype == jnp.int32
            np.testing.assert_array_equal(got, want)


@both
def test_room_for_all_chooses_all_that_exist(implementation):
    scores = jnp.asarray(scores_of("broken"))
    counts = jnp.asarray(COUNTS, jnp.int32)
    for room in (WIDTH, WIDTH + 9):
        chosen = select_pages(scores, counts, room=room, implementation=implementation)
        assert isinstance(chosen, Selection)
        for row, count in enumerate(COUNTS):
            assert (np.asarray(chosen.counts[row]) == count).all()
            np.testing.assert_array_equal(chosen.pages[row, 0, :count], np.arange(count))
            assert (np.asarray(chosen.pages[row, 0, count:]) == WIDTH).all()


def test_an_infinite_score_does_not_push_out_what_is_always_in():
    scores = jnp.full((1, 1, 9), jnp.inf)
    chosen = select_pages(
        scores, jnp.asarray([9], jnp.int32), room=3, open_tail=jnp.asarray([True])
    )
    np.testing.assert_array_equal(chosen.pages[0, 0], [0, 7, 8])


def test_counts_past_the_table_are_taken_as_the_table():
    scores = jnp.zeros((1, 1, 4))
    chosen = select_pages(scores, jnp.asarray([9], jnp.int32), room=2)
    np.testing.assert_array_equal(chosen.pages[0, 0], [0, 3])
    none = select_pages(scores, jnp.asarray([-1], jnp.int32), room=2)
    assert not none.counts.any()


def test_new_scores_counts_and_budgets_do_not_compile_again():
    function = jax.jit(functools.partial(select_pages, room=5))
    for seed in range(3):
        function(
            jnp.asarray(scores_of("normal", seed)),
            jnp.asarray(np.roll(COUNTS, seed), jnp.int32),
            budgets=jnp.full((BATCH, HEADS), seed, jnp.int32),
        )
    assert function._cache_size() == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scores": jnp.zeros((5, 40))}, r"it must be \[B, Hkv, M\]"),
        ({"scores": jnp.zeros((5, 3, 0))}, "every axis needs at least one entry"),
        ({"scores": jnp.zeros((5, 3, 40), jnp.bfloat16)}, "scores is bfloat16; it must be float32"),
        ({"page_counts": jnp.zeros(4, jnp.int32)}, r"so it must be \(5,\)"),
        ({"page_counts": np.zeros(5, np.int64)}, "page_counts is int64; it must be int32"),
        ({"open_tail": jnp.zeros(5, jnp.int32)}, "open_tail is int32; it must be bool"),
        ({"budgets": jnp.zeros(5, jnp.int32)}, r"budgets has shape .*it must be \[B, Hkv\]"),
        ({"budgets": jnp.zeros((5, 2), jnp.int32)}, r"so it must be \(5, 3\)"),
        ({"room": 0}, "room is 0; it must be an integer, at least 1"),
        ({"room": 2.0}, "room is 2.0; it must be an integer"),
        ({"room": 1}, r"room is 1; it must be from 2, the pages that are always in"),
        ({"room": 2, "open_tail": jnp.zeros(5, bool)}, "and the open one"),
        ({"sink_pages": -1}, "sink_pages is -1"),
        ({"recent_pages": True}, "recent_pages is True"),
        ({"implementation": "tpu"}, "implementation is 'tpu'; select_pages has no kernel"),
    ],
)
def test_bad_arguments_are_refused_by_name(changed, message):
    arguments = {
        "scores": jnp.zeros((BATCH, HEADS, WIDTH)),
        "page_counts": jnp.asarray(COUNTS, jnp.int32),
        "room": 4,
    }
    with pytest.raises(ValueError, match=message):
        select_pages(**arguments | changed)
