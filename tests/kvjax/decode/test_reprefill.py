"""Re-prefill over stored pages against plain prefill, with the pages in memory."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.cache import init
from kvjax.decode.choosing import ByPages, ByTokens, StoredPrefix
from kvjax.decode.near_memory import Near
from kvjax.decode.reprefill import reprefill
from kvjax.decode.step import Prompts, prefill_chunk, start
from kvjax.policies import Choice, ExactKeys, LowBitKeys, MeanKeys, QuestBounds
from kvjax.storage.handles import opened
from kvjax.storage.sessions import PageReads
from tests.kvjax.decode import tiny

PAGE = 8
PREFIX_PAGES, SUFFIX = 6, 11
SKETCHES = [MeanKeys(), QuestBounds(), LowBitKeys(2), LowBitKeys(3), LowBitKeys(4), ExactKeys()]


class Memory:
    """Units from arrays, as a prefetcher would bring them; keeps what was asked."""

    def __init__(self, keys, values, layers=1, heads=1, split=False, fail_at=None):
        self.both = np.stack([keys, values], axis=2)  # [L, H, 2, N, P, D]
        self.layers, self.heads, self.split = layers, heads, split
        self.tickets, self.numbers = {}, itertools.count()
        self.demanded, self.guessed, self.touched = [], [], []
        self.taken, self.on_device = [], {}
        self.fail_at = fail_at

    @property
    def unit_shape(self):
        return (self.layers, self.heads, 1 if self.split else 2, *self.both.shape[-2:])

    def issue(self, units, *, demand):
        (self.demanded if demand else self.guessed).append(units.copy())
        ticket = next(self.numbers)
        if demand:
            self.tickets[ticket] = units
        return ticket

    def rows_near(self, units):
        return np.array([self.on_device.get(tuple(unit), -1) for unit in units.tolist()], np.int32)

    def took_near(self, units):
        self.taken.append(units.tolist())

    def touch(self, units, mass, important):
        self.touched.append((units.tolist(), mass, important))

    def collect(self, ticket):
        if self.fail_at is not None and len(self.demanded) > self.fail_at:
            raise OSError("a disk that failed")
        found = []
        for layer, head, kind, page in self.tickets.pop(ticket):
            block = self.both[
                layer * self.layers : (layer + 1) * self.layers,
                head * self.heads : (head + 1) * self.heads,
                :,
                page,
            ]
            found.append(block[:, :, kind : kind + 1] if self.split else block)
        return np.stack(found)


@pytest.fixture(scope="module")
def model():
    return tiny.model()


@pytest.fixture(scope="module")
def tokens():
    return tiny.prompt(PREFIX_PAGES * PAGE + SUFFIX)


def prefilled(model, ids, room=None):
    """The state after plain prefill, and every token's keys and values a layer."""
    pages = -(-(room or len(ids)) // PAGE)
    cache = init(model.spec, num_pages=pages, batch=1, max_pages=pages, page_size=PAGE)
    state = start(cache, model.config.hidden_size, jnp.ones((1,), jnp.int32))
    prompts = Prompts(jnp.asarray(ids, jnp.int32), jnp.asarray([0, len(ids)], jnp.int32))
    return prefill_chunk(
        nnx.merge(model.graphdef, model.params), state, prompts, jnp.int32(0), chunk=len(ids)
    )[0]


@pytest.fixture(scope="module")
def stored(model, tokens):
    """Keys and values of the prefix, [L, H, N, P, D]."""
    cache = prefilled(model, tokens[: PREFIX_PAGES * PAGE]).cache
    table = np.asarray(cache.block_tables)[0, :PREFIX_PAGES]
    return tuple(
        np.stack([np.asarray(pool)[table].swapaxes(0, 1) for pool in pools])
        for pools in (cache.k_pages, cache.v_pages)
    )


def run(
    model,
    tokens,
    stored,
    selection,
    count,
    reader=None,
    room=PREFIX_PAGES,
    speculate=True,
    near=Near(None, None),  # noqa: B008  it is never changed
):
    keys, values = stored
    reader = reader or Memory(keys, values)
    layers, heads = keys.shape[:2]
    reads = PageReads(
        reader,
        unit_shape=reader.unit_shape,
        dtype=keys.dtype,
        layers=layers,
        heads=heads,
        pages=PREFIX_PAGES,
        period=2,
        near_rows=near.rows,
        speculate=speculate,
    )
    sketches = ({"pages": jnp.zeros((PREFIX_PAGES,), jnp.int32)},) * layers
    by = getattr(selection, "by", None)
    if by is not None and not isinstance(by, ExactKeys):
        sketches = tuple(by.build(jnp.asarray(k).swapaxes(0, 1)) for k in keys)
    num_pages = room + -(-SUFFIX // PAGE) + 1
    cache = init(model.spec, num_pages=num_pages, batch=1, max_pages=num_pages, page_size=PAGE)
    state = start(cache, model.config.hidden_size, jnp.ones((1,), jnp.int32))
    suffix = np.zeros(16, np.int32)
    suffix[:SUFFIX] = tokens[PREFIX_PAGES * PAGE :]
    prompts = Prompts(jnp.asarray(suffix), jnp.asarray([0, SUFFIX], jnp.int32))

    @jax.jit
    def program(state, handle):
        prefix = StoredPrefix(sketches, jnp.int32(PREFIX_PAGES), jnp.int32(count), handle, near)
        decoder = nnx.merge(model.graphdef, model.params)
        return reprefill(decoder, state, prefix, prompts, room=room, selection=selection)

    with opened(reads) as handle:
        state = jax.block_until_ready(program(state, jnp.int32(handle)))
    return state, reads.failure is None, reads, reader


@pytest.mark.parametrize(
    ("by", "who"),
    [
        (None, "head"),
        *((by, "head") for by in SKETCHES),
        (LowBitKeys(3), "layer"),
        (MeanKeys(), "period"),
    ],
    ids=repr,
)
def test_every_page_equals_plain_prefill(model, tokens, stored, by, who):
    exact = prefilled(model, tokens)
    state, ok, reads, _ = run(
        model, tokens, stored, ByPages(by, Choice(who=who, period=2)), PREFIX_PAGES
    )
    assert ok
    assert reads.failure is None
    np.testing.assert_allclose(state.hidden, exact.hidden, rtol=1e-5, atol=1e-5)
    assert int(state.cache.next_positions[0]) == len(tokens)
    assert int(state.cache.skipped[0]) == 0


@pytest.mark.parametrize("layout", [(1, 1, True), (2, 1, False), (1, 2, False), (2, 2, True)])
def test_every_layout_of_units_gives_the_same(model, tokens, stored, layout):
    layers, heads, split = layout
    selection = ByPages(LowBitKeys(3))
    plain, *_ = run(model, tokens, stored, selection, 3)
    reader = Memory(*stored, layers=layers, heads=heads, split=split)
    other, ok, reads, _ = run(model, tokens, stored, selection, 3, reader)
    assert ok
    np.testing.assert_array_equal(other.hidden, plain.hidden)
    item = stored[0].dtype.itemsize
    layers, heads, _, page, dim = stored[0].shape
    assert reads.bytes_used == 3 * 2 * layers * heads * page * dim * item


def test_a_part_is_what_attention_over_those_pages_gives(model, tokens, stored):
    """The cache holds the chosen pages, head by head, then the suffix at its own positions."""
    state, ok, _, reader = run(model, tokens, stored, ByPages(LowBitKeys(4)), 3)
    assert ok
    keys, _ = stored
    cache = state.cache
    assert int(cache.lengths[0]) == 3 * PAGE + SUFFIX
    assert int(cache.skipped[0]) == 3 * PAGE
    for layer, units in enumerate(reader.demanded):
        pool = np.asarray(cache.k_pages[layer])
        for head in range(keys.shape[1]):
            pages = units[units[:, 1] == head][:, 3]
            assert {0, PREFIX_PAGES - 1} <= set(pages.tolist())
            np.testing.assert_array_equal(pool[:3, head], keys[layer, head, pages])


def test_the_attention_that_pages_get_is_told_before_they_are_read(model, tokens, stored):
    """All pages' mass sums to the queries, as many as query heads read through a KV head."""
    *_, reader = run(model, tokens, stored, ByPages(LowBitKeys(4)), PREFIX_PAGES)
    layers, heads = stored[0].shape[:2]
    assert len(reader.touched) == layers
    group = model.config.layers[0].num_heads // heads
    for units, mass, important in reader.touched:
        assert mass.sum() == pytest.approx(heads * group * SUFFIX, rel=1e-3)
        assert (important == 1).all()
        assert len(units) == heads * PREFIX_PAGES


def test_tokens_tell_which_share_of_a_page_was_wanted(model, tokens, stored):
    *_, reader = run(model, tokens, stored, ByTokens(chunk=PAGE), 2, room=2)
    assert len(reader.touched) == stored[0].shape[0]
    heads = stored[0].shape[1]
    for units, mass, important in reader.touched:
        assert important.sum() * PAGE == pytest.approx(heads * 2 * PAGE)
        assert ((important > 0) & (important <= 1)).all()
        assert (mass > 0).all()
        assert len(units) >= 2 * heads


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.4, 1])
@pytest.mark.parametrize("layout", [(1, 1, False), (2, 2, False), (1, 2, True)])
def test_pages_that_are_near_are_not_transferred(model, tokens, stored, layout, share):
    """Some are in device memory, some in page-locked host memory."""
    layers, heads, split = layout
    plain, *_ = run(model, tokens, stored, ByPages(LowBitKeys(3)), 4)
    reader = Memory(*stored, layers=layers, heads=heads, split=split)
    grid = (len(stored[0]) // layers, stored[0].shape[1] // heads, 1 + split, PREFIX_PAGES)
    units = np.array(list(np.ndindex(grid)), np.int32)
    chosen = np.random.default_rng(3).permutation(len(units))[: round(share * len(units))]
    reader.on_device = {tuple(units[i].tolist()): row for row, i in enumerate(chosen)}
    pool = np.full((len(units) + 3, *reader.unit_shape), np.nan, stored[0].dtype)
    if len(chosen):
        reader.tickets[-5] = units[chosen]
        pool[: len(chosen)] = reader.collect(-5)
    half = len(pool) // 2
    pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    near = Near(jnp.asarray(pool[:half]), jax.device_put(pool[half:], pinned))
    state, ok, reads, _ = run(model, tokens, stored, ByPages(LowBitKeys(3)), 4, reader, near=near)
    assert ok
    np.testing.assert_array_equal(state.hidden, plain.hidden)
    asked = {tuple(unit) for units in reader.demanded for unit in units.tolist()}
    taken = {tuple(unit) for units in reader.taken for unit in units}
    if not split:
        assert not asked & set(reader.on_device)
    assert asked if share < 1 else not asked
    assert taken <= set(reader.on_device)
    item, (n_layers, n_heads, _, page, dim) = stored[0].dtype.itemsize, stored[0].shape
    assert reads.bytes_used == 4 * 2 * n_layers * n_heads * page * dim * item


def test_guesses_change_nothing(model, tokens, stored):
    selection = ByPages(LowBitKeys(2))
    on, _, _, reader = run(model, tokens, stored, selection, 2)
    off, _, _, silent = run(model, tokens, stored, selection, 2, speculate=False)
    np.testing.assert_array_equal(on.hidden, off.hidden)
    assert reader.guessed
    assert not silent.guessed


def test_a_failed_read_is_a_value(model, tokens, stored):
    reader = Memory(*stored, fail_at=0)
    _, ok, reads, _ = run(model, tokens, stored, ByPages(None), PREFIX_PAGES, reader)
    assert not ok
    assert "a disk that failed" in str(reads.failure)


def test_room_may_be_larger_than_the_choice(model, tokens, stored):
    selection = ByPages(LowBitKeys(3))
    tight, *_ = run(model, tokens, stored, selection, 3, room=3)
    loose, *_ = run(model, tokens, stored, selection, 3, room=PREFIX_PAGES)
    np.testing.assert_allclose(loose.hidden, tight.hidden, rtol=1e-5, atol=1e-5)
