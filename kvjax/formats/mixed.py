"""Bits of each layer's keys and values, so that the loss is least within some bytes.

Layers differ in how much an error of their keys or values costs (KVTuner, arXiv:2502.04420,
section 4): one that hardly matters pays for one that does.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from kvjax.formats.format import (
    NAMED,
    LayerFormat,
    PagePacking,
    by_channel,
    packed_page_bytes,
)
from kvjax.spec import DEFAULT_PAGE_SIZE, LayerSpec

MIXED_BITS = (2, 3, 4, 8)
"""Of codes that are chosen from."""


class LayerLosses(NamedTuple):
    """What a layer's codes cost alone, all else exact: one entry for each of `MIXED_BITS`."""

    keys: tuple[float, ...]
    values: tuple[float, ...]


def key_packing(bits: int) -> PagePacking:
    """How keys are packed in so many bits: by channel, whose ranges differ most."""
    return by_channel(bits)


def value_packing(bits: int) -> PagePacking:
    """How values are packed in so many bits: by token."""
    return NAMED[f"int{bits}"].values


def mixed_layers(
    losses: Sequence[LayerLosses | None], shapes: Sequence[tuple[int, ...]], bits: int
) -> tuple[LayerFormat, ...]:
    """Layers' packings with the least sum of losses in at most the bytes of one number of bits.

    From the least bytes on, what is bought next saves most for its bytes: the greedy way of the
    multiple-choice knapsack problem, over the corners of each one's convex hull.

    Args:
      losses: of each layer; None of one that is not measured, which has those bits.
      shapes: KV heads and elements of a head's row, of each layer.
      bits: of `MIXED_BITS`, whose `int` format's bytes are the most that are taken, in pages of 16
        tokens.
    """
    packings = [[f(b) for b in MIXED_BITS] for f in (key_packing, value_packing)]
    curves: list[_Curve] = []
    left, at = 0, MIXED_BITS.index(bits)
    for layer, shape in zip(losses, shapes, strict=True):
        for part, row in zip(layer or (), packings, strict=False):
            costs = tuple(_page_bytes(packing, *shape) for packing in row)
            curves.append(_Curve(part, costs))
            left += costs[at] - min(costs)
    chosen = [curve.costs.index(min(curve.costs)) for curve in curves]
    while True:
        best = (0.0, 0, 0)
        for nth, (curve, now) in enumerate(zip(curves, chosen, strict=True)):
            for other, price in enumerate(curve.costs):
                price -= curve.costs[now]
                if 0 < price <= left:
                    saved = curve.losses[now] - curve.losses[other]
                    best = max(best, (saved / price, nth, other))
        rate, nth, other = best
        if rate <= 0:
            break
        left -= curves[nth].costs[other] - curves[nth].costs[chosen[nth]]
        chosen[nth] = other
    taken = iter(chosen)
    pairs = [(at, at) if layer is None else (next(taken), next(taken)) for layer in losses]
    return tuple(LayerFormat(packings[0][k], packings[1][v]) for k, v in pairs)


class _Curve(NamedTuple):
    """Of one layer's keys or values, for each of `MIXED_BITS`."""

    losses: tuple[float, ...]
    costs: tuple[int, ...]


@functools.cache
def _page_bytes(packing: PagePacking, heads: int, dim: int) -> int:
    """Bytes of one page of a layer's keys, or values."""
    both = LayerFormat(packing, packing)
    return packed_page_bytes(both, LayerSpec.gqa(heads, dim), DEFAULT_PAGE_SIZE) // 2
