"""Pages of sequences that are being decoded: against NumPy, and failures that do not raise."""

import numpy as np
import pytest

from kvjax.storage.sequence_pages import SequencePages

B, L, H, N, P, D = 3, 2, 2, 7, 4, 6
PAGE_BYTES = 2 * P * D * 4


def make(dtype=np.float32):
    return SequencePages(
        rows=B, layers=L, heads=H, pages=N, page_shape=(P, D), dtype=np.dtype(dtype)
    )


def ids_of(random, count):
    """[B, Hkv, count]: for each head some pages in any order; what is no page in between."""
    ids = random.permuted(np.tile(np.arange(N, dtype=np.int32), (B, H, 1)), axis=2)[..., :count]
    nothing = random.choice(np.array([N, N + 1, 2**31 - 1, -1], np.int32), ids.shape)
    return np.where(random.random(ids.shape) < 0.3, nothing, ids).astype(np.int32)


def worth_of(ids):
    return np.zeros(ids.shape, np.float32)


def collected(pages, ticket, layer, ids, before=0):
    """[2, B, k, Hkv, P, D], of which what is not handed out is as before."""
    out = np.full((2, len(ids), ids.shape[2], H, P, D), before, pages.in_memory(0, 0)[0].dtype)
    pages.collect(ticket, layer, ids, out=tuple(out))
    return out


def assert_collects(pages, held, layer, ids):
    """`held` is [2, B, N, Hkv, P, D]."""
    before = pages.bytes_moved
    got = collected(pages, pages.issue(layer, ids, worth_of(ids)), layer, ids, before=7)
    moved = 0
    for b, h, k in np.ndindex(ids.shape):
        page, is_page = ids[b, h, k], 0 <= ids[b, h, k] < N
        want = held[:, b, page, h] if is_page else np.full((2, P, D), 7, held.dtype)
        np.testing.assert_array_equal(got[:, b, k, h], want)
        moved += is_page
    assert pages.bytes_moved - before == moved * 2 * P * D * held.dtype.itemsize
    assert not pages.failures


def test_pages_in_memory_are_not_copied():
    pages = make()
    for layer in range(L):
        pages.put(layer, 1, *np.random.default_rng(layer).normal(size=(2, 3, H, P, D)))
    keys, values = pages.in_memory(1, 3)
    assert keys.shape == values.shape == (L, 3, H, P, D)
    again = pages.in_memory(1, 2)
    assert np.shares_memory(keys, again[0])
    assert np.shares_memory(values, again[1])
    for layer in range(L):
        want = np.random.default_rng(layer).normal(size=(2, 3, H, P, D)).astype(np.float32)
        np.testing.assert_array_equal(keys[layer], want[0])
        np.testing.assert_array_equal(values[layer], want[1])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_equals_numpy(seed, dtype):
    """Prompts of any length, then pages as rows fill them, one at a time, none, or all at once."""
    random = np.random.default_rng(seed)
    pages = make(dtype)
    held = np.zeros((L, 2, B, N, H, P, D), dtype)
    filled = np.zeros(B, int)
    for row in random.permutation(B):
        filled[row] = random.integers(0, 4)
        for layer in range(L):
            both = random.normal(size=(2, filled[row], H, P, D)).astype(dtype)
            pages.put(layer, int(row), *both)
            held[layer, :, row, : filled[row]] = both
    for step in range(4):
        fills = random.random(B) < (1.0 if step == 1 else 0.5)
        nothing = random.choice(np.array([N, N + 3, -1], np.int32), B)
        number = np.where(fills & (filled < N), filled, nothing).astype(np.int32)
        for layer in range(L):
            both = random.normal(size=(2, B, H, P, D)).astype(dtype)
            pages.append(layer, number, *both)
            for row in np.flatnonzero((number >= 0) & (number < N)):
                held[layer, :, row, number[row]] = both[:, row]
        filled += (number >= 0) & (number < N)
        for layer in range(L):
            assert_collects(pages, held[layer], layer, ids_of(random, int(random.integers(1, N))))


def test_what_was_handed_out_does_not_change():
    """A program may still read what it was given while the next page is written."""
    pages = make()
    ids = np.zeros((B, H, 1), np.int32)
    pages.put(0, 0, *np.ones((2, 1, H, P, D), np.float32))
    got = collected(pages, 1, 0, ids)
    pages.append(0, np.zeros(B, np.int32), *np.full((2, B, H, P, D), 9, np.float32))
    assert (got[:, 0] == 1).all()
    assert (collected(pages, 2, 0, ids) == 9).all()


def test_what_was_given_may_change_afterwards():
    """A program's buffers are its own again when the callback has returned."""
    pages = make()
    given = np.ones((2, 1, H, P, D), np.float32)
    pages.put(0, 1, *given)
    given[:] = 5
    assert (collected(pages, 1, 0, np.zeros((B, H, 1), np.int32))[:, 1] == 1).all()


def test_tickets_differ():
    pages, ids = make(), np.zeros((B, H, 1), np.int32)
    assert (
        len({pages.issue(layer, ids, worth_of(ids)) for layer in range(L) for _ in range(3)})
        == 3 * L
    )


def test_no_page_moves_nothing():
    pages = make()
    got = collected(pages, 1, 0, np.full((B, H, 2), N, np.int32), before=7)
    assert (got == 7).all()
    collected(pages, 1, 0, np.zeros((B, H, 0), np.int32))
    assert pages.bytes_moved == 0


def test_bytes_held_are_of_all_there_is_room_for():
    assert make().bytes_held == L * B * H * N * PAGE_BYTES


class Broken:
    """An array of pages that cannot be reached, or whose values cannot."""

    def __init__(self, array, what, kinds=(0, 1)):
        self._array, self.what, self._kinds = array, what, kinds
        self.shape, self.dtype = array.shape, array.dtype

    def __getitem__(self, at):
        if at[0] in self._kinds:
            raise OSError(self.what)
        return self._array[at]

    def __setitem__(self, at, value):
        raise OSError(self.what)


def break_layer(pages, layer, what="disk on fire", **options):
    """All rows' pages of a layer."""
    for row in pages._rows:
        row.layers[layer] = Broken(row.layers[layer], what, **options)


@pytest.mark.parametrize("call", ["put", "append", "collect"])
def test_a_failure_is_kept_and_read_as_nan(call):
    """The first error stays; every later call still returns, of the right shape."""
    pages = make()
    ids = np.zeros((B, H, 2), np.int32)
    both = np.ones((2, B, H, P, D), np.float32)
    pages.append(0, np.zeros(B, np.int32), *both)
    pages.append(1, np.zeros(B, np.int32), *both)
    break_layer(pages, 1)
    calls = {
        "put": lambda: pages.put(1, 0, *both),
        "append": lambda: pages.append(1, np.zeros(B, np.int32), *both),
        "collect": lambda: collected(pages, 1, 1, ids),
    }
    calls[call]()
    assert isinstance(pages.failures[0], OSError)
    first = pages.failures[0]
    break_layer(pages, 1, "another")
    pages.put(1, 0, *both)
    got = collected(pages, 1, 1, ids)
    assert got.shape == (2, B, 2, H, P, D)
    assert np.isnan(got).all()
    assert pages.failures[0] is first
    assert pages.bytes_moved == 0


def test_values_that_fail_after_keys_read_as_nan_too():
    """Keys of a page without its values would be attended to, at a value of 0."""
    pages = make()
    pages.put(0, 0, *np.ones((2, 1, H, P, D), np.float32))
    break_layer(pages, 0, kinds=(1,))
    assert np.isnan(collected(pages, 1, 0, np.zeros((B, H, 1), np.int32))).all()
    assert isinstance(pages.failures[0], OSError)


@pytest.mark.parametrize("layer", [L, 99])
def test_a_layer_that_is_not_there_does_not_raise(layer):
    pages, ids = make(), np.zeros((B, H, 2), np.int32)
    both = np.ones((2, B, H, P, D), np.float32)
    pages.put(layer, 0, *both)
    pages.append(layer, np.zeros(B, np.int32), *both)
    assert np.isnan(collected(pages, 1, layer, ids)).all()
    assert all(isinstance(pages.failures[row], IndexError) for row in range(B))


class Memory:
    """A reader of stored pages: [L, Hkv, N, 2, P, D]."""

    def __init__(self, units):
        self.units, self.asked, self.touched = units, {}, []

    def rows_near(self, units):
        raise AssertionError("pages near the program are not the reader's")

    took_near = rows_near

    def touch(self, units, mass, important):
        self.touched.append((units, mass))

    def issue(self, units, *, demand):
        assert demand
        ticket = len(self.touched)
        self.asked[ticket] = units
        return ticket

    def collect(self, ticket):
        layer, head, _, page = self.asked.pop(ticket).T
        return self.units[layer, head, page][:, None, None]


@pytest.fixture
def stored():
    """Rows 0 and 2 have 4 and 2 pages in a store; row 1 has 3 in memory. Page 5 follows in all."""
    random = np.random.default_rng(0)
    pages = make()
    held = np.zeros((L, 2, B, N, H, P, D), np.float32)
    readers = {}
    for row, count in enumerate((4, 3, 2)):
        held[:, :, row, :count] = random.normal(size=(L, 2, count, H, P, D))
        for layer in range(L):
            pages.put(layer, row, *held[layer, :, row, :count])
        if row != 1:
            keys, values = pages.in_memory(row, count)
            units = np.stack([keys, values]).transpose(1, 3, 2, 0, 4, 5)
            readers[row] = Memory(np.ascontiguousarray(units))
            before = pages.bytes_held
            pages.read_from(row, readers[row], count)
            assert before - pages.bytes_held == L * count * H * PAGE_BYTES
    held[:, :, :, 5] = random.normal(size=(L, 2, B, H, P, D))
    for layer in range(L):
        pages.append(layer, np.full(B, 5, np.int32), *held[layer, :, :, 5])
    return pages, held, readers


def test_pages_that_a_reader_has_are_not_kept_when_they_come():
    pages = make()
    before = pages.bytes_held
    pages.read_from(2, Memory(np.zeros((L, H, N, 2, P, D))), 4)
    assert pages.bytes_held == before - L * H * 4 * PAGE_BYTES
    both = np.random.default_rng(0).normal(size=(2, 6, H, P, D)).astype(np.float32)
    pages.put(1, 2, *both)
    assert not pages.failures
    keys, values = pages.in_memory(2, 6)
    np.testing.assert_array_equal(keys[1], both[0, 4:])
    np.testing.assert_array_equal(values[1], both[1, 4:])
    pages.put(0, 2, *both[:, :3])  # all of which the reader has
    assert not pages.failures
    assert not pages.in_memory(2, 6)[0][0].any()


@pytest.mark.parametrize("seed", range(3))
def test_stored_pages_and_those_in_memory_come_together(stored, seed):
    pages, held, readers = stored
    random = np.random.default_rng(seed)
    for layer in (0, 1, 0):
        ids = ids_of(random, 5)
        assert_collects(pages, held[layer], layer, ids)
        for reader in readers.values():
            assert not reader.asked
    assert all(reader.touched for reader in readers.values())


def test_only_as_many_columns_are_collected_as_hold_pages(stored):
    """What is no page comes last, and is cut off; several steps may be under way."""
    pages, held, _ = stored
    ids = np.full((B, H, 4), N, np.int32)
    ids[:, :, 0], ids[0, 1, 1] = 1, 3
    tickets = [pages.issue(layer, ids, worth_of(ids)) for layer in (0, 1)]
    for layer, ticket in reversed(list(enumerate(tickets))):
        got = collected(pages, ticket, layer, ids[:, :, :2])
        np.testing.assert_array_equal(got[:, :, 0], held[layer, :, :, 1])
        np.testing.assert_array_equal(got[:, 0, 1, 1], held[layer, :, 0, 3, 1])
    assert not pages.failures


def test_what_nobody_collects_is_not_kept(stored):
    """A step that finds all its pages near never collects."""
    pages, _, readers = stored
    ids = np.full((B, H, 2), N, np.int32)
    for _ in range(10):
        pages.issue(0, ids, worth_of(ids))
    assert not pages._tickets
    assert not any(reader.asked for reader in readers.values())


@pytest.mark.parametrize("call", ["issue", "collect"])
def test_a_reader_that_fails_is_one_row_less(stored, monkeypatch, call):
    """No page of that row is handed out after that; the others' are what they were."""
    pages, held, readers = stored

    def broken(*args, **options):
        raise TimeoutError("no answer")

    ids = np.zeros((B, H, 1), np.int32)
    with monkeypatch.context() as patch:
        patch.setattr(readers[2], call, broken)
        first = collected(pages, pages.issue(0, ids, worth_of(ids)), 0, ids)
    asked = len(readers[2].touched)
    second = collected(pages, pages.issue(0, ids, worth_of(ids)), 0, ids)
    for got in (first, second):
        assert np.isnan(got[:, 2]).all()
        np.testing.assert_array_equal(got[:, :2, 0], held[0, :, :2, 0])
    assert list(pages.failures) == [2]
    assert isinstance(pages.failures[2], TimeoutError)
    assert len(readers[2].touched) == asked


def test_a_read_that_fails_once_is_made_again(stored, monkeypatch):
    """The very pages, as if nothing had been."""
    pages, held, readers = stored
    whole, faults = readers[0].collect, [TimeoutError("no answer")]

    def collect(ticket):
        if faults:
            raise faults.pop()
        return whole(ticket)

    monkeypatch.setattr(readers[0], "collect", collect)
    assert_collects(pages, held[1], 1, ids_of(np.random.default_rng(0), 5))
    assert not faults


def test_a_row_that_cannot_be_written_is_one_row_less():
    pages = make()
    both = np.ones((2, B, H, P, D), np.float32)
    pages._rows[1].layers[0] = Broken(pages._rows[1].layers[0], "disk on fire")
    pages.append(0, np.zeros(B, np.int32), *both)
    got = collected(pages, 1, 0, np.zeros((B, H, 1), np.int32))
    assert np.isnan(got[:, 1]).all()
    assert (got[:, [0, 2]] == 1).all()
    assert list(pages.failures) == [1]
