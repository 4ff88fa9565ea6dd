"""Which bits layers get for some bytes: against every choice there is."""

import functools
import itertools

import numpy as np
import pytest

from kvjax.formats import NAMED, LayerFormat
from kvjax.formats.format import packed_page_bytes
from kvjax.formats.mixed import MIXED_BITS, LayerLosses, key_packing, mixed_layers, value_packing
from kvjax.spec import LayerSpec

SHAPE = (2, 64)
SPEC = LayerSpec.gqa(*SHAPE)


def losses(layers, seed):
    """Falling by a factor of about five a bit, of layers that matter unequally."""
    random = np.random.default_rng(seed)
    parts = np.exp(3 * random.standard_normal((layers, 2)))[..., None]
    curves = parts * 5.0 ** -np.array(MIXED_BITS) * random.uniform(0.7, 1.3, (layers, 2, 4))
    return [LayerLosses(*(tuple(map(float, row)) for row in layer)) for layer in curves]


@functools.cache
def cost(layer):
    return packed_page_bytes(layer, SPEC, 16)


def total(layers, of):
    found = 0.0
    for layer, loss in zip(layers, of, strict=True):
        found += loss.keys[MIXED_BITS.index(layer.keys.bits)]
        found += loss.values[MIXED_BITS.index(layer.values.bits)]
    return found


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_bits_cost_no_more_bytes_and_lose_little_more_than_the_best_choice(bits, seed):
    of = losses(3, seed)
    found = mixed_layers(of, [SHAPE] * 3, bits)
    room = 3 * cost(LayerFormat(NAMED[f"int{bits}"].keys, NAMED[f"int{bits}"].values))
    assert sum(map(cost, found)) <= room
    every = [
        LayerFormat(key_packing(k), value_packing(v))
        for k, v in itertools.product(MIXED_BITS, repeat=2)
    ]
    choices = [c for c in itertools.product(every, repeat=3) if sum(map(cost, c)) <= room]
    best = min(total(choice, of) for choice in choices)
    uniform = total([LayerFormat(key_packing(bits), value_packing(bits))] * 3, of)
    assert best <= total(found, of) <= uniform
    # What greed can miss is less than its last purchase: of six things to buy, a good part.
    assert total(found, of) <= best + 0.5 * (uniform - best)


def test_more_bits_than_help_are_not_bought():
    """Eight bits of these keys are worse than four: a channel so large that it takes all codes."""
    of = [LayerLosses((0.5, 0.1, 0.02, 0.7), (0.0, 0.0, 0.0, 0.0))] * 2
    found = mixed_layers(of, [SHAPE] * 2, 4)
    assert [layer.keys.bits for layer in found] == [4, 4]
    assert [layer.values.bits for layer in found] == [2, 2]


def test_a_layer_that_was_not_measured_neither_gives_nor_takes():
    one = losses(2, 0)
    found = mixed_layers([one[0], None, one[1]], [SHAPE] * 3, 3)
    assert (found[0], found[2]) == mixed_layers(one, [SHAPE] * 2, 3)
    assert (found[1].keys.bits, found[1].values.bits) == (3, 3)
