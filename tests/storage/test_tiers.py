"""Who lives where: checked against a slow model, and no slot changes under a reader."""

import random

import jax
import numpy as np
import pytest

from kvjax.storage.placement import AttentionFrequency, ImpressScore, Lfu, Lru
from kvjax.storage.tiers import Tiers
from kvjax.storage.units import pack_units, unpack_units
from tests.storage.fake_reader import DTYPE, SHAPE, UNIT_BYTES, contents, pages, rows

POLICIES = [Lru, Lfu, ImpressScore, AttentionFrequency]


def tiers_of(host=0, device=0, policy=None):
    return Tiers(host * UNIT_BYTES, SHAPE, DTYPE, device_bytes=device * UNIT_BYTES, policy=policy)


def admit(tiers, *numbers):
    units = pages(*numbers)
    tiers.admit(pack_units(0, units).tolist(), contents(units), range(len(units)))


def use(tiers, *numbers):
    """A request takes units that are here; gives their contents."""
    ids = pack_units(0, pages(*numbers)).tolist()
    slots = tiers.pin(ids)
    assert min(slots) >= 0
    out = np.zeros((len(ids), *SHAPE), DTYPE)
    tiers.copy(np.array(slots), out, np.arange(len(ids)))
    tiers.unpin(ids, used=True)
    return out


def places(tiers, *numbers):
    """ "d", "h" or "-" for each page."""
    where = [tiers.where(unit) for unit in pack_units(0, pages(*numbers)).tolist()]
    return "".join("-" if place is None else place[0] for place in where)


def test_units_pack_and_unpack():
    units = np.array([[0, 0, 0, 0], [1023, 1023, 1, (1 << 22) - 1], [3, 2, 1, 0]], np.int32)
    for segment in (0, 1, (1 << 20) - 1):
        packed = pack_units(segment, units)
        assert (packed >= 0).all()
        np.testing.assert_array_equal(unpack_units(packed), units)
    ids = [*pack_units(0, units), *pack_units(1, units)]
    assert len(set(ids)) == 6


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (np.zeros((2, 3), np.int32), r"units is int32\[2, 3\]"),
        (np.zeros((2, 4), np.float32), r"units is float32\[2, 4\]"),
        (np.array([[0, 0, 0, 0], [0, 0, 2, 0]]), r"units\[1\] names kind 2; allowed: 0 to 1"),
        (np.array([[0, 0, 0, -1]]), r"units\[0\] names page -1"),
        (np.array([[1024, 0, 0, 0]]), r"layer group 1024"),
    ],
)
def test_units_that_name_nothing_are_refused(units, message):
    with pytest.raises(ValueError, match=message):
        pack_units(0, units)


def test_lru_keeps_the_last_used():
    tiers = tiers_of(host=3)
    admit(tiers, 1, 2, 3)
    use(tiers, 1)
    admit(tiers, 4)
    assert places(tiers, 1, 2, 3, 4) == "h-hh"
    assert tiers.counts().dropped == 1


def test_lfu_lets_no_scan_push_out_what_is_used_often():
    tiers = tiers_of(host=2, policy=Lfu())
    admit(tiers, 1, 2)
    use(tiers, 1, 2)
    admit(tiers, 3, 4, 5)
    assert places(tiers, 1, 2, 3, 4, 5) == "hh---"
    assert tiers.counts().refused == 3
    for _ in range(2):  # the third use outranks two, though each came after an eviction
        admit(tiers, 5)
    assert places(tiers, 1, 2, 5) == "-hh"


def test_attention_decides_before_frequency_alone():
    tiers = tiers_of(host=2, policy=AttentionFrequency())
    ids = pack_units(0, pages(1, 2, 3)).tolist()
    tiers.touch(ids, np.array([5.0, 1.0, 3.0]))
    admit(tiers, 1, 2, 3)
    assert places(tiers, 1, 2, 3) == "h-h"
    use(tiers, 3)  # 3 x 2 against 5 x 1
    tiers.touch(pack_units(0, pages(4)).tolist(), np.array([5.5]))
    admit(tiers, 4)
    assert places(tiers, 1, 2, 3, 4) == "--hh"


def test_a_device_victim_sinks_only_if_it_outranks_the_least_on_the_host():
    tiers = tiers_of(host=1, device=1, policy=AttentionFrequency())
    for page, mass in ((1, 4.0), (2, 2.0)):
        tiers.touch(pack_units(0, pages(page)).tolist(), np.array([mass]))
        admit(tiers, page)
    assert places(tiers, 1, 2) == "dh"
    tiers.touch(pack_units(0, pages(3)).tolist(), np.array([6.0]))
    admit(tiers, 3)  # drives 1 out, which outranks 2
    assert places(tiers, 1, 2, 3) == "h-d"
    tiers.touch(pack_units(0, pages(1)).tolist(), np.array([100.0]))
    use(tiers, 1)  # rises, and 3 takes its slot
    assert places(tiers, 1, 2, 3) == "d-h"
    tiers.touch(pack_units(0, pages(4)).tolist(), np.array([5.0]))
    admit(tiers, 4)  # outranks nobody
    assert places(tiers, 1, 3, 4) == "dh-"
    counts = tiers.counts()
    assert (counts.raised, counts.sunk, counts.dropped, counts.refused) == (1, 2, 1, 1)


def test_equal_scores_leave_in_order_of_use():
    tiers = tiers_of(host=3, policy=AttentionFrequency())
    admit(tiers, 1, 2, 3)
    use(tiers, 1)
    admit(tiers, 4, 5)
    assert places(tiers, 1, 2, 3, 4, 5) == "h--hh"


class Model:
    """Both tiers as dictionaries of ranks, searched from end to end."""

    def __init__(self, device, host, policy):
        self.size = (device, host)
        self.tiers = ({}, {})
        self.policy = policy
        self.stamp = 0

    def rank(self, unit):
        self.stamp += 1
        return self.policy.score(unit), self.stamp

    def take(self, unit):
        self.policy.loaded(unit)
        rank = self.rank(unit)
        device, host = self.tiers
        if unit in device:
            device[unit] = rank
        elif unit in host and not (
            len(device) < self.size[0] or any(other < rank for other in device.values())
        ):
            host[unit] = rank
        else:
            host.pop(unit, None)
            self.place(unit, rank)

    def place(self, unit, rank):
        for tier, size in zip(self.tiers, self.size, strict=True):
            if len(tier) < size:
                tier[unit] = rank
                return
            least = min(tier, key=tier.get, default=None)
            if least is not None and tier[least] < rank:
                tier[unit] = rank
                unit, rank = least, tier.pop(least)
        self.policy.evict(unit)

    def touch(self, unit, mass, important):
        self.policy.touch(unit, mass, important)
        for tier in self.tiers:
            if unit in tier:
                tier[unit] = self.rank(unit)


@pytest.mark.parametrize("sizes", [(0, 0), (0, 5), (4, 0), (3, 5), (1, 1)])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_places_as_the_slow_model_does(policy, sizes):
    device, host = sizes
    tiers, model = tiers_of(host, device, policy()), Model(device, host, policy())
    dice = random.Random(f"{policy.__name__} {sizes}")
    for _ in range(800):
        page = min(int(dice.expovariate(0.15)), 29)
        (unit,) = pack_units(0, pages(page)).tolist()
        if dice.random() < 0.4:
            attention = dice.choice([0.0, 0.5, dice.random()]), dice.random()
            tiers.touch([unit], *(np.array([number]) for number in attention))
            model.touch(unit, *attention)
        else:
            if tiers.where(unit) is None:
                admit(tiers, page)
            else:
                np.testing.assert_array_equal(use(tiers, page), contents(pages(page)))
            model.take(unit)
        for name, kept in zip(("device", "host"), model.tiers, strict=True):
            assert {unit for unit in kept if tiers.where(unit) != name} == set()
        counts = tiers.counts()
        assert (counts.device_units, counts.host_units) == tuple(map(len, model.tiers))


def test_contents_follow_their_unit_through_a_hundred_moves():
    """A slot's number is not the unit's: units swap between tiers and keep their bytes."""
    tiers = tiers_of(host=1, device=1)
    admit(tiers, 1, 2)
    for _ in range(100):
        for page in (1, 2):
            np.testing.assert_array_equal(use(tiers, page), contents(pages(page)))
            assert places(tiers, page) == "d"


def test_a_unit_used_where_a_copy_is_rises_and_leaves_no_rank_behind():
    tiers = tiers_of(host=3, device=2, policy=Lfu())
    admit(tiers, 1, 2, 3, 4, 5)
    assert places(tiers, 1, 2, 3, 4, 5).count("h") == 3
    low = next(page for page in range(1, 6) if places(tiers, page) == "h")
    for _ in range(3):
        tiers.used(pack_units(0, pages(low)).tolist())
    assert places(tiers, low) == "d"
    for _ in range(3):
        admit(tiers, *range(10, 20))  # each more often used than the last: all ranks are visited
    for page in range(20):
        if places(tiers, page) != "-":
            np.testing.assert_array_equal(use(tiers, page), contents(pages(page)))


@pytest.mark.parametrize("device", [0, 2])
def test_a_pinned_unit_neither_moves_nor_changes(device):
    tiers = tiers_of(host=2, device=device)
    admit(tiers, *range(2 + device))
    ids = pack_units(0, pages(*range(2 + device))).tolist()
    before = places(tiers, *range(2 + device))
    slots = tiers.pin(ids)
    tiers.pin(ids)
    admit(tiers, *range(10, 30))
    tiers.unpin(ids)  # still pinned once
    admit(tiers, *range(10, 30))
    assert places(tiers, *range(2 + device)) == before
    out = np.zeros((len(ids), *SHAPE), DTYPE)
    tiers.copy(np.array(slots), out, np.arange(len(ids)))
    np.testing.assert_array_equal(out, contents(pages(*range(2 + device))))
    tiers.unpin(ids)
    admit(tiers, *range(10, 14 + device))
    assert set(places(tiers, *range(2 + device))) == {"-"}


def test_unpinning_once_too_often_is_an_error():
    tiers = tiers_of(host=1)
    admit(tiers, 1)
    ids = pack_units(0, pages(1)).tolist()
    tiers.pin(ids)
    tiers.unpin(ids)
    with pytest.raises(KeyError):
        tiers.unpin(ids)


def test_what_was_copied_out_is_the_callers_own():
    """JAX may use an aligned array in place; no later change to the tiers may reach it."""
    tiers = tiers_of(host=4)
    admit(tiers, 0, 1, 2, 3)
    taken = use(tiers, 0, 1, 2, 3)
    on_device = jax.device_put(taken)
    source = contents(pages(4, 5, 6, 7))
    tiers.admit(pack_units(0, pages(4, 5, 6, 7)).tolist(), source, range(4))
    source[:] = -1  # nor does a caller's array reach the tiers
    np.testing.assert_array_equal(on_device, contents(pages(0, 1, 2, 3)))
    np.testing.assert_array_equal(use(tiers, 4, 5, 6, 7), contents(pages(4, 5, 6, 7)))


def test_room_is_made_for_no_more_than_comes():
    tiers = tiers_of(host=8)
    admit(tiers, *range(8))
    admit(tiers, 20)
    assert tiers.counts().dropped == 1
    assert tiers.counts().host_units == 8


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.zeros((3, 1, 1, 2, 4, 9), DTYPE), r"data is float32\[3, 1, 1, 2, 4, 9\]"),
        (np.zeros((3, *SHAPE), np.float64), "data is float64"),
    ],
)
def test_units_of_another_kind_change_nothing(data, message):
    tiers = tiers_of(host=2)
    admit(tiers, 1, 2)
    before = tiers.counts()
    with pytest.raises(ValueError, match=message):
        tiers.admit(pack_units(0, pages(3, 4, 5)).tolist(), data, range(3))
    assert tiers.counts() == before
    assert places(tiers, 1, 2) == "hh"


@pytest.mark.parametrize(
    ("mass", "important", "message"),
    [
        ([1.0, np.nan], None, r"mass\[1\] is nan"),
        ([np.inf, 1.0], None, r"mass\[0\] is inf"),
        ([1.0, -0.5], None, r"mass\[1\] is -0.5; allowed: 0 to inf"),
        ([1.0, 1.0], [0.5, 1.5], r"important\[1\] is 1.5; allowed: 0 to 1"),
        ([1.0], None, r"mass has shape \[1\]; allowed: \[2\]"),
        ([1.0, 1.0], [1.0], r"important has shape \[1\]"),
    ],
)
def test_attention_that_is_none_is_refused(mass, important, message):
    tiers = tiers_of(host=2)
    shares = None if important is None else np.array(important)
    with pytest.raises(ValueError, match=message):
        tiers.touch([1, 2], np.array(mass), shares)


@pytest.mark.parametrize(
    ("sizes", "shape", "message"),
    [
        ({"host_bytes": -1}, SHAPE, "host_bytes is -1"),
        ({"host_bytes": 0, "device_bytes": -5}, SHAPE, "device_bytes is -5"),
        ({"host_bytes": 0}, (2, 0), r"unit_shape is \[2, 0\]"),
    ],
)
def test_sizes_that_are_none_are_refused(sizes, shape, message):
    with pytest.raises(ValueError, match=message):
        Tiers(unit_shape=shape, dtype=DTYPE, **sizes)


def test_segments_are_told_apart():
    tiers = tiers_of(host=4)
    first, second = tiers.segment("one"), tiers.segment("two")
    assert tiers.segment("one") == first != second
    ids = [int(pack_units(number, pages(3))[0]) for number in (first, second)]
    tiers.admit(ids[:1], contents(pages(3)), [0])
    assert tiers.lookup(ids) == [True, False]


def test_units_of_bfloat16_and_many_axes():
    shape = (2, 3, 1, 4, 5)
    tiers = Tiers(1 << 16, shape, jax.numpy.bfloat16)
    data = np.arange(2 * 120).reshape(2, *shape).astype(jax.numpy.bfloat16)
    tiers.admit([7, 9], data, [1, 0])
    out = np.zeros((3, *shape), data.dtype)
    slots = tiers.pin([9, 7])
    tiers.copy(np.array(slots), out, np.array([2, 0]))
    np.testing.assert_array_equal(out[[2, 0]], data)
    assert (out[1] == 0).all()
    assert rows((1, 2, 3)).shape == (1, 4)
