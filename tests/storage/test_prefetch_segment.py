"""The prefetcher over segments of a real page store."""

import threading
import time

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts

from kvjax.storage.errors import ReadFailedError
from kvjax.storage.keys import Identity
from kvjax.storage.layout import Layout
from kvjax.storage.page_store import PageStore
from kvjax.storage.placement import AttentionFrequency
from kvjax.storage.prefetch import Prefetcher
from kvjax.storage.tiers import Tiers
from tests.storage.test_prefetch import check_sums

L, N, H, P, D = 4, 30, 2, 4, 8


@pytest.fixture
def kv():
    dice = np.random.default_rng(0)
    return [dice.normal(size=(L, N, H, P, D)).astype(ml_dtypes.bfloat16) for _ in range(2)]


def stored(url, kv, layout):
    store = PageStore.open(url)
    info = store.put(Identity("a" * 64, "bfloat16"), range(N * P), *kv, layout=layout)
    return store, store.open_segment(info.key)


def expected(kv, layout, units):
    """What a unit holds, cut from the arrays that were stored."""
    pieces = []
    for layer, head, kind, page in units.tolist():
        of_layers = slice(layer * layout.layers, (layer + 1) * layout.layers)
        of_heads = slice(head * layout.heads, (head + 1) * layout.heads)
        both = np.stack([part[of_layers, page, of_heads] for part in kv], axis=2)
        pieces.append(both[:, :, kind : kind + 1] if layout.split_kv else both)
    return np.stack(pieces)


@pytest.mark.parametrize(
    "layout", [Layout(P), Layout(P, layers=2, heads=2), Layout(P, layers=4, split_kv=True)]
)
@pytest.mark.parametrize("host_bytes", [0, 4096, 1 << 20])
def test_units_are_what_was_stored(tmp_path, kv, layout, host_bytes):
    _, segment = stored(tmp_path / "store", kv, layout)
    tiers = Tiers(host_bytes, segment.unit_shape, kv[0].dtype, policy=AttentionFrequency())
    dice = np.random.default_rng(1)
    extents = (L // layout.layers, H // layout.heads, 1 + layout.split_kv, N)
    total = 0
    with segment:
        with Prefetcher(segment.read, tiers, segment=segment.info.key) as prefetcher:
            for _ in range(20):
                guess, units = dice.integers(0, extents, (2, 25, 4)).astype(np.int32)
                units[:10] = guess[:10]
                prefetcher.issue(guess, demand=False)
                prefetcher.touch(units, dice.random(25))
                result = prefetcher.collect(prefetcher.issue(units, demand=True))
                np.testing.assert_array_equal(result, expected(kv, layout, units))
                counts = prefetcher.finish_request()
                check_sums(counts)
                total += counts.read_bytes
        # Not before it is closed: a read counts when a thread takes it, and is made after that.
        assert total <= segment.bytes_read().payload  # that also counts gaps


def test_a_flipped_bit_is_an_error_of_its_units_only(tmp_path, kv):
    _, segment = stored(tmp_path / "store", kv, Layout(P))
    (shard,) = (tmp_path / "store" / "data").glob("*/c/1/0/0/0/0")
    damaged = bytearray(shard.read_bytes())
    damaged[5] ^= 1
    shard.write_bytes(damaged)
    tiers = Tiers(1 << 20, segment.unit_shape, kv[0].dtype)
    units = np.array(
        [(layer, head, 0, page) for layer in range(L) for head in range(H) for page in range(N)],
        np.int32,
    )
    with segment, Prefetcher(segment.read, tiers, segment=segment.info.key) as prefetcher:
        prefetcher.issue(units, demand=False)
        with pytest.raises(ReadFailedError) as caught:
            prefetcher.collect(prefetcher.issue(units, demand=True))
        assert len(caught.value.units) == 1
        good = units[(units != caught.value.units[0]).any(axis=1)]
        result = prefetcher.collect(prefetcher.issue(good, demand=True))
        np.testing.assert_array_equal(result, expected(kv, Layout(P), good))
        check_sums(prefetcher.finish_request())


def test_units_that_are_read_again_and_never_return_are_waited_for_within_the_timeout(
    tmp_path, kv, monkeypatch
):
    """Every batch fails when most of the time is over; what is read one by one stays away."""
    _, segment = stored(tmp_path / "store", kv, Layout(P))
    promises, timeout_s = [], 1.5

    def read_places(array, grid, where):
        promise, future = ts.Promise.new()
        promises.append(promise)
        if len(where) > 1:
            error = ValueError("DATA_LOSS: of the batch")
            threading.Timer(0.8 * timeout_s, promise.set_exception, [error]).start()
        return future

    monkeypatch.setattr("kvjax.storage.stored_array.read_places", read_places)
    units = np.array([(0, 0, 0, page) for page in range(N)], np.int32)
    tiers = Tiers(0, segment.unit_shape, kv[0].dtype)
    with segment, Prefetcher(segment.read, tiers, timeout_s=timeout_s) as prefetcher:
        for demand in (True, False):
            begun = time.monotonic()
            with pytest.raises(ReadFailedError, match="timeout") as caught:
                prefetcher.collect(prefetcher.issue(units, demand=demand))
            assert time.monotonic() - begun < timeout_s + 0.5
            assert len(caught.value.units) == N
