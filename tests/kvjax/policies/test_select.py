"""Choosing pages: against plain Python, with ties, forced pages, padding and every way to share."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.policies import Choice, select

REDUCE = {"sum": np.sum, "max": np.max, "mean": np.mean}


jitted = functools.partial(jax.jit, static_argnames=("room", "kv_heads", "choice"))(select)


def chosen(mass, pages, kv_heads, room, count=None, choice=None):
    """The choice under jit, from what NumPy holds."""
    options = {} if count is None else {"count": jnp.int32(count)}
    mass = jnp.asarray(mass, jnp.float32)
    ids = jitted(mass, jnp.int32(pages), room=room, kv_heads=kv_heads, choice=choice, **options)
    return np.asarray(ids)


def plainly(mass, pages, kv_heads, room, count, choice):
    """The same in plain Python: sort by (forced, mass, page) and take the first."""
    num_pages = mass.shape[1]
    rows = kv_heads if choice.who == "head" else 1
    if choice.aggregate == "query":
        groups = mass.reshape(rows, -1, num_pages)[:, :, :pages]
        lists = [by_turns(group, pages, count, choice) for group in groups]
        lists = [ids + [num_pages] * (room - len(ids)) for ids in lists]
        return np.array(lists if rows == kv_heads else lists * kv_heads)
    score = REDUCE[choice.aggregate](mass.reshape(rows, -1, num_pages), axis=1)
    result = []
    for row in score:
        row = pooled(row[:pages], choice.pooling)
        order = sorted(
            range(pages),
            key=lambda page: (
                not (page < choice.first or page >= pages - choice.last), -row[page], page
            ),
        )  # fmt: skip
        ids = sorted(order[:count])
        result.append(ids + [num_pages] * (room - len(ids)))
    return np.array(result if rows == kv_heads else result * kv_heads)


def by_turns(group, pages, count, choice):
    """Each head of a group in turn names its best page that it has not named, until it is full."""
    group = [pooled(row, choice.pooling) for row in group]
    chosen = {page for page in range(pages) if page < choice.first or page >= pages - choice.last}
    wishes = [
        sorted(set(range(pages)) - chosen, key=lambda page, row=row: (-row[page], page))
        for row in group
    ]
    for turn in zip(*wishes, strict=True):
        fresh = sorted(set(turn) - chosen, key=lambda page: (-max(r[page] for r in group), page))
        chosen |= set(fresh[: max(count - len(chosen), 0)])
    return sorted(chosen)


def pooled(row, share):
    """Each page's own mass or a share of a neighbour's, by hand."""
    near = [[row[i] for i in (page - 1, page + 1) if 0 <= i < len(row)] for page in range(len(row))]
    return [
        max([own, *(share * other for other in others)])
        for own, others in zip(row, near, strict=True)
    ]


WHO = ("head", "layer", "period")


@pytest.mark.parametrize(
    "choice", [*itertools.starmap(Choice, itertools.product(WHO, [4], [*REDUCE, "query"]))]
)
@pytest.mark.parametrize(("pages", "count"), [(12, 6), (12, 2), (9, 5), (4, 6), (1, 6), (0, 6)])
def test_the_greatest_are_chosen(choice, pages, count):
    mass = np.random.default_rng(0).integers(0, 6, size=(6, 12)).astype(np.float32)  # many ties
    ids = chosen(mass, pages, 2, 6, count, choice)
    np.testing.assert_array_equal(ids, plainly(mass, pages, 2, 6, count, choice))
    assert ids.dtype == np.int32


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("aggregate", ["sum", "query"])
@pytest.mark.parametrize("pooling", [0.25, 0.5, 1.0])
@pytest.mark.parametrize(("pages", "count"), [(12, 6), (9, 5), (4, 6), (1, 6), (0, 6)])
def test_what_begins_in_a_page_may_go_on_in_the_next(who, aggregate, pooling, pages, count):
    """Pages past the last live one hold anything, and lend nothing."""
    choice = Choice(who, aggregate=aggregate, pooling=pooling)
    mass = np.random.default_rng(1).integers(0, 9, size=(6, 12)).astype(np.float32)
    mass[:, pages:] = 1e9
    ids = chosen(mass, pages, 2, 6, count, choice)
    np.testing.assert_array_equal(ids, plainly(mass, pages, 2, 6, count, choice))


@pytest.mark.parametrize("pooling", [-0.1, 1.5, float("nan")])
def test_a_share_is_between_nothing_and_all(pooling):
    with pytest.raises(KvjaxError, match="pooling is"):
        Choice(pooling=pooling)


@pytest.mark.parametrize(("first", "last"), [(0, 0), (1, 0), (0, 1), (2, 3)])
def test_the_first_and_last_live_pages_are_in_whatever_their_mass(first, last):
    mass = np.ones((2, 10))
    mass[:, 4:6] = 5
    choice = Choice(first=first, last=last)
    ids = chosen(mass, 8, 2, first + last + 1, choice=choice)
    wanted = sorted({*range(first), 4, *range(8 - last, 8)})
    np.testing.assert_array_equal(ids, [wanted, wanted])


def test_of_equal_pages_the_earlier_ones_are_chosen():
    ids = chosen(np.zeros((3, 9)), 9, 3, 5)
    np.testing.assert_array_equal(ids, [[0, 1, 2, 3, 8]] * 3)


def test_every_page_can_be_chosen():
    mass = np.random.default_rng(1).random((4, 7))
    np.testing.assert_array_equal(chosen(mass, 7, 2, 7), [range(7)] * 2)
    np.testing.assert_array_equal(chosen(mass, 5, 2, 7), [[0, 1, 2, 3, 4, 7, 7]] * 2)


def test_where_the_first_page_is_the_last_it_is_chosen_once():
    np.testing.assert_array_equal(chosen(np.ones((1, 4)), 1, 1, 3), [[0, 4, 4]])


def test_a_count_out_of_range_is_brought_into_it():
    mass = np.arange(8, dtype=np.float32)[None]
    np.testing.assert_array_equal(chosen(mass, 8, 1, 4, count=0), [[0, 7, 8, 8]])
    np.testing.assert_array_equal(chosen(mass, 8, 1, 4, count=99), [[0, 5, 6, 7]])


def test_mass_past_the_live_pages_and_nan_have_no_effect():
    mass = np.array([[1, np.nan, 3, 2, 0, np.inf, np.nan, 9]], np.float32)
    np.testing.assert_array_equal(chosen(mass, 5, 1, 4), [[0, 2, 3, 4]])


def test_how_heads_are_aggregated_matters():
    mass = np.array([[0, 9, 5, 0], [0, 0, 5, 0]], np.float32)
    bare = functools.partial(Choice, first=0, last=0)
    np.testing.assert_array_equal(chosen(mass, 4, 1, 1, choice=bare(aggregate="sum")), [[2]])
    np.testing.assert_array_equal(chosen(mass, 4, 1, 1, choice=bare(aggregate="mean")), [[2]])
    np.testing.assert_array_equal(chosen(mass, 4, 1, 1, choice=bare(aggregate="max")), [[1]])
    mass = np.array([[9, 8, 7, 0, 0], [0, 0, 1, 3, 2]], np.float32)
    np.testing.assert_array_equal(chosen(mass, 5, 1, 3, choice=bare(aggregate="max")), [[0, 1, 2]])
    by_query = bare(aggregate="query")
    for room, wanted in ((1, [0]), (2, [0, 3]), (3, [0, 1, 3]), (4, [0, 1, 3, 4])):
        np.testing.assert_array_equal(chosen(mass, 5, 1, room, choice=by_query), [wanted])
        few = chosen(mass, 5, 1, 5, room, choice=by_query)
        np.testing.assert_array_equal(few, [wanted + [5] * (5 - room)])


@pytest.mark.parametrize("pages", [40, 23, 3])
def test_a_query_head_alone_chooses_by_its_mass(pages):
    mass = np.random.default_rng(3).random((4, 40), np.float32)
    own, summed = (chosen(mass, pages, 4, 9, choice=Choice(aggregate=a)) for a in ("query", "sum"))
    np.testing.assert_array_equal(own, summed)


def test_no_head_is_outvoted():
    """The best page of each head is in, however little mass it has next to the others'."""
    rng = np.random.default_rng(4)
    mass = rng.random((8, 40), np.float32) * np.repeat([1e-6, 1, 1, 1], 2)[:, None]
    ids = chosen(mass, 40, 2, 8, choice=Choice(aggregate="query"))
    for head, row in enumerate(mass):
        assert 1 + np.argmax(row[1:-1]) in ids[head // 4]


def test_heads_of_nan_name_the_earliest_pages():
    mass = np.array([[np.nan] * 8, [0, 1, 2, 3, 4, 5, 6, 7]], np.float32)
    ids = chosen(mass, 8, 1, 6, choice=Choice(aggregate="query"))
    np.testing.assert_array_equal(ids, [[0, 1, 2, 5, 6, 7]])


def test_who_decides():
    assert [Choice("period", period=3).decider(layer) for layer in range(7)] == [
        0,
        0,
        0,
        3,
        3,
        3,
        6,
    ]
    assert [Choice("layer").decider(layer) for layer in range(3)] == [0, 1, 2]
    assert [Choice("head").decider(layer) for layer in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"who": "token"}, "who is 'token': must be one of head, layer, period"),
        ({"aggregate": "median"}, "aggregate is 'median': must be one of sum, max, mean, query"),
        ({"period": 0}, "period is 0: must be an integer of at least 1"),
        ({"first": -1}, "first is -1: must be an integer of at least 0"),
        ({"last": True}, "last is True: must be an integer of at least 0"),
    ],
)
def test_wrong_choices_are_refused(options, message):
    with pytest.raises(KvjaxError, match=message):
        Choice(**options)


@pytest.mark.parametrize("room", [1, 0, -3, 11, 2.5, True])
def test_room_that_cannot_be_is_refused(room):
    with pytest.raises(KvjaxError, match=r"room is .*: must be an integer from 2 .* to 10"):
        select(jnp.ones((4, 10)), jnp.int32(10), room=room, kv_heads=2)


def test_no_room_is_refused_where_nothing_is_forced():
    with pytest.raises(KvjaxError, match="room is 0: must be an integer from 1"):
        select(jnp.ones((4, 10)), jnp.int32(1), room=0, kv_heads=2, choice=Choice(first=0, last=0))


@pytest.mark.parametrize("kv_heads", [3, 0, 8])
def test_heads_that_do_not_divide_are_refused(kv_heads):
    with pytest.raises(KvjaxError, match=f"kv_heads is {kv_heads}: must divide the 4 query heads"):
        select(jnp.ones((4, 10)), jnp.int32(10), room=3, kv_heads=kv_heads)
