"""Page reads under a handle: units named, pages put in their places, faults as flags."""

import itertools

import numpy as np
import pytest

from kvjax.storage.handles import held, opened
from kvjax.storage.sessions import PageReads

LAYERS, HEADS, PAGES, SIZE, DIM = 4, 2, 5, 3, 2


class Reader:
    """Units whose numbers say where they come from."""

    def __init__(self, layers, heads, kinds):
        self.shape = (layers, heads, kinds, SIZE, DIM)
        self.asked, self.guessed, self.tickets = [], [], {}
        self.touched, self.taken, self.on_device = [], [], {}
        self.numbers = itertools.count()
        self.broken = None

    def issue(self, units, *, demand):
        if self.broken == "issue":
            raise OSError("a cable was cut")
        (self.asked if demand else self.guessed).append(units.tolist())
        ticket = next(self.numbers)
        self.tickets[ticket] = units
        return ticket

    def rows_near(self, units):
        return np.array([self.on_device.get(tuple(unit), -1) for unit in units.tolist()], np.int32)

    def took_near(self, units):
        self.taken.append(units.tolist())

    def touch(self, units, mass, important):
        self.touched.append((units.tolist(), mass, important))

    def collect(self, ticket):
        if self.broken == "collect":
            raise OSError("a cable was cut")
        layers, heads, kinds = self.shape[:3]
        found = np.empty((len(self.tickets[ticket]), *self.shape), np.float32)
        for row, (layer, head, kind, page) in enumerate(self.tickets.pop(ticket)):
            for a, b, c in np.ndindex(layers, heads, kinds):
                found[row, a, b, c] = value(layer * layers + a, head * heads + b, kind + c, page)
        return found


def value(layer, head, kind, page):
    return layer * 1000 + head * 100 + kind * 10 + page


def reads(layers=1, heads=1, kinds=2, **options):
    reader = Reader(layers, heads, kinds)
    made = PageReads(
        reader,
        unit_shape=reader.shape,
        dtype=np.dtype(np.float32),
        layers=LAYERS,
        heads=HEADS,
        pages=PAGES,
        period=2,
        **options,
    )
    return made, reader


CHOSEN = np.array([[0, 3, PAGES], [1, 4, 4 + PAGES]], np.int32)


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (2, 1), (1, 2), (4, 2)])
@pytest.mark.parametrize("kinds", [1, 2])
def test_pages_arrive_where_they_were_chosen(layers, heads, kinds):
    made, _ = reads(layers, heads, kinds)
    for layer in range(LAYERS):
        both = made.collect(made.issue(layer, CHOSEN), layer, CHOSEN)
        assert both.shape == (2, 3, HEADS, SIZE, DIM)
        for kind, column, head in np.ndindex(2, 3, HEADS):
            page = CHOSEN[head, column]
            expected = value(layer, head, kind, page) if page < PAGES else 0
            assert (both[kind, column, head] == expected).all()
    assert made.bytes_used == LAYERS * 4 * 2 * SIZE * DIM * 4


@pytest.mark.parametrize("kinds", [1, 2])
def test_keys_alone_can_be_had_to_choose_by(kinds):
    made, reader = reads(kinds=kinds)
    ticket = made.issue(1, CHOSEN, to_choose=True)
    keys = made.collect(ticket, 1, CHOSEN, to_choose=True)
    assert keys.shape == (1, 3, HEADS, SIZE, DIM)
    assert (keys[0, 1, 0] == value(1, 0, 0, 3)).all()
    assert made.bytes_used == 0
    assert made.bytes_scored == 4 * SIZE * DIM * 4
    assert {unit[2] for unit in reader.asked[0]} == {0}


def test_a_unit_that_heads_share_is_asked_for_once():
    made, reader = reads(heads=2)
    same = np.array([[1, 2], [1, 2]], np.int32)
    made.issue(0, same)
    assert reader.asked == [[[0, 0, 0, 1], [0, 0, 0, 2]]]


def test_a_choice_is_guessed_for_its_period_then_for_the_next():
    made, reader = reads()
    for layer in range(LAYERS):
        made.issue(layer, CHOSEN)
    assert [units[0][0] for units in reader.guessed] == [1, 2, 3, 3]
    silent, reader = reads(speculate=False)
    silent.issue(0, CHOSEN)
    assert reader.guessed == []


def test_what_pages_are_worth_is_told_unit_by_unit():
    made, reader = reads(heads=2)
    ids = np.array([[1, 2, PAGES], [2, 3, PAGES]], np.int32)
    mass = np.array([[1, 2, 99], [4, np.nan, 99]], np.float32)
    share = np.array([[1, 0.5, 0], [1, 1, 0]], np.float32)
    made.issue(1, ids, mass=mass, important=share)
    (units, worth, important), *_ = reader.touched
    assert units == [[1, 0, 0, 1], [1, 0, 0, 2], [1, 0, 0, 3]]
    assert worth.tolist() == [1, 6, 0]  # summed over the heads; what is no number counts as nothing
    assert important.tolist() == [1, 0.75, 1]  # averaged


def test_keys_and_values_of_a_page_are_worth_the_same():
    made, reader = reads(kinds=1)
    made.issue(0, np.array([[3], [PAGES]], np.int32), mass=np.full((2, 1), 5, np.float32))
    units, worth, important = reader.touched[0]
    assert units == [[0, 0, 0, 3], [0, 0, 1, 3]]
    assert worth.tolist() == [5, 5]
    assert important.tolist() == [1, 1]


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("kinds", [1, 2])
def test_only_what_is_not_near_is_read(layers, heads, kinds):
    made, reader = reads(layers, heads, kinds, near_rows=50)
    group = 3 // layers
    for kind in range(3 - kinds):  # page 3 is there whole, page 4 has no values if these are apart
        for head in range(HEADS // heads):
            reader.on_device[group, head, kind, 3] = 10 * head + kind
    if kinds == 1:
        reader.on_device[group, 0, 0, 4] = 49
    ids = np.array([[0, 3, 4], [3, 4, PAGES]], np.int32)
    ones = np.ones(ids.shape, np.float32)
    ticket, rows, missing = made.issue_missing(3, ids, mass=ones, important=ones)
    assert missing.tolist() == [[True, False, True], [False, True, False]]
    second = 1 % (HEADS // heads) * 10  # the row of the second head's keys
    assert rows[0].tolist() == [[50, 0, 50], [second, 50, 50]]
    assert rows[1].tolist() == (rows[0] + (kinds == 1) * (rows[0] < 50)).tolist()
    assert all(unit[3] == 3 for unit in reader.taken[0])
    assert len(reader.taken[0]) == HEADS // heads * (3 - kinds)
    assert 3 not in {unit[3] for unit in reader.asked[0]}
    packed = np.array([[0, 4], [4, PAGES]], np.int32)  # as a program asks for what is missing
    both = made.collect(ticket, 3, packed)
    for kind, column, head in np.ndindex(2, 2, HEADS):
        page = packed[head, column]
        expected = value(3, head, kind, page) if page < PAGES else 0
        assert (both[kind, column, head] == expected).all()
    assert made.bytes_used == 5 * 2 * SIZE * DIM * 4


@pytest.mark.parametrize("broken", ["issue", "collect"])
def test_a_fault_is_a_flag_and_stays(broken):
    made, reader = reads()
    reader.broken = broken
    ticket = made.issue(0, CHOSEN)
    both = made.collect(ticket, 0, CHOSEN)
    assert made.failure is not None
    assert not both.any()
    assert "a cable was cut" in str(made.failure)
    reader.broken = None
    assert made.issue(1, CHOSEN) == -1  # nothing more is read for a run that is lost
    assert not made.collect(-1, 1, CHOSEN).any()


def test_nothing_chosen_reads_nothing():
    made, reader = reads()
    none = np.full((HEADS, 2), PAGES, np.int32)
    both = made.collect(made.issue(0, none), 0, none)
    assert not both.any()
    assert reader.asked == [[]]


def test_a_handle_is_valid_while_it_is_open():
    made, _ = reads()
    with opened(made) as handle:
        assert held(handle) is made
        with opened(made) as other:
            assert other != handle
    with pytest.raises(KeyError):
        held(handle)
