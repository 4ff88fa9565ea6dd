"""Layers with a window that keep their last pages, beside layers that keep all or store nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import advance, append, init, pool_bytes, reserve, token_slots, write
from kvjax.errors import KvjaxError
from kvjax.formats import named_format
from kvjax.spec import KVSpec, LayerSpec
from tests.kvjax.cache.plain import do_fork, do_gather, do_release, rows_of, scattered, stacked

LAYERS = (LayerSpec.gqa(2, 4, window=6), LayerSpec.gqa(1, 6), LayerSpec.shared_with(1))
SPEC = KVSpec(LAYERS, "float32")
SIZE, CHUNK = 4, 5
RING = 4  # pages that 6 + 5 - 1 tokens can be in


@jax.jit
def put(cache, rows, tokens):
    """Append one token to each of some sequences, as a model's layers do."""
    counts = jnp.zeros((cache.batch,), jnp.int32).at[rows].set(1)
    cache, reservation = reserve(cache, counts, max_count=1)
    for layer in range(2):
        slots = token_slots(cache, rows, cache.lengths[rows], layer)
        cache = write(cache, layer, *tokens[layer], slots)
    return advance(cache, counts), reservation.ok


def added(cache, held, more):
    """The cache with tokens added to sequences, {row: number of tokens}."""
    for row, count in more.items():
        for _ in range(count):
            token = 1 + sum(map(len, held))
            held[row].append(token)
            rows = tuple(stacked([token], layer, SPEC) for layer in range(2))
            cache, ok = put(cache, jnp.asarray([row], jnp.int32), rows)
            assert bool(ok)
    return cache


def assert_kept(cache, held):
    """Each layer gathers what it must keep: of a ring, at least what a chunk's window reaches."""
    for layer in range(3):
        keys, values, valid = map(np.asarray, do_gather(cache, layer))
        of = SPEC.source(layer)
        for row, tokens in enumerate(held):
            first = 0 if layer else max(0, (len(tokens) - 1) // SIZE + 1 - RING) * SIZE
            assert np.flatnonzero(valid[row]).tolist() == [*range(first, len(tokens))]
            for slot in range(first, len(tokens)):
                key, value = rows_of(tokens[slot], of, SPEC)
                np.testing.assert_array_equal(keys[row, slot], key)
                np.testing.assert_array_equal(values[row, slot], value)


def test_rings_go_round_and_branches_have_their_own():
    cache = scattered(40, 4, 10, SIZE, blocked=[0, 3, 4, 7], spec=SPEC, window_chunk=CHUNK)
    assert [cache.ring(layer) for layer in range(3)] == [RING, 0, 0]
    assert [pool is None for pool in cache.v_pages] == [False, False, True]
    assert pool_bytes(cache)["float32"] == 4 * RING * SIZE * 64 + 40 * SIZE * 48
    held = [[] for _ in range(4)]
    cache = added(cache, held, {0: 27, 1: 3})
    assert_kept(cache, held)
    cache, reservation = do_fork(cache, jnp.int32(0), jnp.int32(2))
    assert bool(reservation.ok)
    held[2] = [*held[0]]
    assert_kept(cache, held)
    cache, reservation = do_fork(cache, jnp.int32(1), jnp.int32(1))
    assert not bool(reservation.ok)
    assert_kept(cache, held)
    cache = added(cache, held, {2: 6, 0: 3})
    assert_kept(cache, held)
    cache = do_release(cache, jnp.asarray([True, False, False, True]))
    held[0] = []
    cache = added(cache, held, {0: 2})
    assert_kept(cache, held)


def test_small_pools_have_no_rings():
    sizes = {"batch": 2, "max_pages": 4, "page_size": SIZE, "window_chunk": CHUNK}
    cache = init(SPEC, num_pages=8, **sizes)
    assert [cache.ring(layer) for layer in range(3)] == [0, 0, 0]
    assert cache.k_pages[0].shape[0] == 8


def test_more_at_once_than_rings_have_room_for_is_refused():
    """As many as fit are let in, though `window_chunk` was less: a ring is of whole pages."""
    window, most = LAYERS[0].window, 8
    for chunk, fits in ((most, True), (most + 1, False)):
        spans = [(n + chunk - 1) // SIZE - max(n - window + 1, 0) // SIZE for n in range(60)]
        assert (max(spans) < RING) == fits  # of pages that a chunk reads or writes
    cache = init(SPEC, num_pages=40, batch=2, max_pages=12, page_size=SIZE, window_chunk=CHUNK)
    assert cache.most_at_once == most
    for counts, bound in (([most, 0], None), ([0, most], most)):
        assert bool(reserve(cache, counts, max_count=bound)[1].ok)
    says = "must be (0|1) to 8 .* rings, or .* overwritten"
    with pytest.raises(KvjaxError, match=rf"max_count is 9: {says}; .* window_chunk=9"):
        jax.eval_shape(lambda cache: reserve(cache, [1, 1], max_count=9), cache)
    same, reservation = reserve(cache, [2, most + 1])
    assert not bool(reservation.ok)
    np.testing.assert_array_equal(same.block_tables, cache.block_tables)
    with pytest.raises(KvjaxError, match=f"counts {says}"):
        reservation.check(same)
    whole = init(SPEC, num_pages=40, batch=2, max_pages=12, page_size=SIZE)
    assert whole.most_at_once is None
    assert bool(reserve(whole, [most + 1, 0], max_count=48)[1].ok)


def test_what_has_no_rings_or_shared_layers_is_refused():
    sizes = {"num_pages": 40, "batch": 2, "max_pages": 10, "page_size": 8}
    windows = KVSpec(LAYERS[:2], "float32")
    for spec, options, message in (
        (SPEC, {}, "layers that share another's pages"),
        (windows, {"window_chunk": 5}, "layers that keep the last pages only"),
    ):
        rows = [jnp.zeros((2, *shape)) for shape in ((2, 4), (1, 6), (1, 6))]
        with pytest.raises(KvjaxError, match=message):
            append(init(spec, **sizes, **options), rows, rows)
    int8 = named_format("int8")
    with pytest.raises(KvjaxError, match="format is given and layer 2 is shared"):
        init(SPEC, **sizes, format=int8)
    with pytest.raises(KvjaxError, match="format is given and window_chunk is 5"):
        init(windows, **sizes, format=int8, window_chunk=5)
    with pytest.raises(KvjaxError, match="window_chunk is 0"):
        init(windows, **sizes, window_chunk=0)
