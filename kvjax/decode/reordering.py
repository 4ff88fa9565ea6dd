"""IMPRESS's reordering (FAST'25): tokens that requests choose are packed into the same chunks.

Keys are stored with their positions applied, so attention does not ask in which order tokens lie.
A reordered prefix is a second segment whose tokens each layer permutes; it is used where the whole
of it is wanted. The segment in the tokens' own order stays, for prompts that share its beginning.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Float, Int32, Integer

from kvjax.storage.errors import SegmentError
from kvjax.storage.keys import Identity
from kvjax.storage.manifest import segment_key
from kvjax.storage.page_store import Match, PageStore
from kvjax.storage.segment import Segment, SegmentInfo
from kvjax.storage.unit_read import units_in_time

ORDER = "order"
"""Name of the array that keeps where each layer's tokens came from, int32 [L, N * P]."""

USES = "uses"
"""Name of the array that keeps how often each token was chosen, int64 [L, N * P]; not reordered."""

COUNTED_PREFIXES = 8
"""Prefixes whose chosen tokens are counted; of more, the longest unused are forgotten."""

_MARK = "; tokens reordered"
_watching: dict[int, Callable[[int, np.ndarray], None]] = {}


class TokenUses:
    """How often requests chose each token of stored prefixes since they were last reordered."""

    def __init__(self) -> None:
        self._counts: dict[str, np.ndarray] = {}  # [L, T] by the key of the plain segment
        self._orders: dict[str, tuple[float, np.ndarray | None]] = {}  # by key: when made, order

    @contextlib.contextmanager
    def counting(self, handle: int, segment: Segment) -> Iterator[None]:
        """Count what a program notes under a handle with `note`.

        Args:
          handle: of the program's reads.
          segment: that it reads.
        """
        counts, order = self._counts_of(segment), self._order_of(segment)

        def add(layer: int, slots: np.ndarray) -> None:
            tokens = slots[slots < counts.shape[1]]
            counts[layer, tokens if order is None else order[layer, tokens]] += 1

        _watching[handle] = add
        try:
            yield
        finally:
            del _watching[handle]

    def reorder(self, store: PageStore) -> list[SegmentInfo]:
        """Write a reordered segment of every prefix that was chosen from, in place of an older one.

        The uses that made the older one count on. Then counting begins anew.

        Args:
          store: that holds the prefixes; those that it lost are forgotten.

        Returns:
          What was written.

        Raises:
          SegmentError: a prefix cannot be opened.
          UnitError: it cannot be read.
          StoreError: the store cannot be written.
        """
        written = []
        there = {info.key: info for info in store.segments()}
        for key, counts in list(self._counts.items()):
            info = there.get(key)
            if info is None:
                del self._counts[key]
            elif counts.any():
                written.append(_write(store, info, counts))
                del self._counts[key]
        return written

    def _counts_of(self, segment: Segment) -> np.ndarray:
        info = segment.info
        plain = dataclasses.replace(
            info.identity, numerics=info.identity.numerics.removesuffix(_MARK)
        )
        key = segment_key(plain, segment.grid, segment.tokens)
        counts = self._counts.pop(key, None)
        if counts is None:
            layers, pages, _, size, _ = info.shape
            counts = np.zeros((layers, pages * size), np.int64)
        self._counts[key] = counts
        while len(self._counts) > COUNTED_PREFIXES:
            del self._counts[next(iter(self._counts))]
        return counts

    def _order_of(self, segment: Segment) -> np.ndarray | None:
        info = segment.info
        made, order = self._orders.get(info.key, (None, None))
        if made != info.created:
            order = order_of(segment)
            self._orders.pop(info.key, None)
            self._orders[info.key] = info.created, order
            while len(self._orders) > COUNTED_PREFIXES:
                del self._orders[next(iter(self._orders))]
        return order


def note(handle: Int32[Array, ""], layer: int, slots: Int32[Array, " K"]) -> None:
    """Tell who counts under a handle, inside a program, what a layer chose.

    Args:
      handle: of the program's reads.
      layer: that chose.
      slots: tokens as they are stored; those past the last are none.
    """
    io_callback(functools.partial(_note, layer), None, handle, slots)


def _note(layer: int, handle: Any, slots: Any) -> None:
    add = _watching.get(int(handle))
    if add is not None:
        add(layer, np.asarray(slots))


def find_reordered(
    store: PageStore, identity: Identity, tokens: list[int], page_size: int
) -> Match | None:
    """What a prompt has in the store, reordered if the whole reordered prefix is wanted.

    Args:
      store: to search.
      identity: of the prefix in its own order.
      tokens: of the prompt.
      page_size: tokens a page.

    Raises:
      StoreError: the store cannot be listed.
    """
    plain = store.find(identity, tokens, page_size)
    packed = store.find(_marked(identity), tokens, page_size) if plain is not None else None
    if plain is None or packed is None:
        return plain
    whole = packed.pages == packed.segment.info.shape[1]
    kept, other = (packed, plain) if whole and packed.pages >= plain.pages else (plain, packed)
    other.segment.close()
    return kept


def order_of(segment: Segment) -> Integer[np.ndarray, "L T"] | None:
    """Which token of its prefix each slot of a layer holds; None if they lie in their own order.

    Raises:
      SegmentError: the array that says so is damaged.
    """
    return (
        segment.sketches(ORDER)[ORDER] if segment.info.identity.numerics.endswith(_MARK) else None
    )


def pages_of(
    segment: Segment,
    timeout_s: float = 30.0,
) -> tuple[Float[np.ndarray, "L N H P D"], Float[np.ndarray, "L N H P D"]]:
    """All keys and values of a segment.

    Args:
      segment: open for reading.
      timeout_s: the longest wait for one group of layers, in seconds.

    Raises:
      UnitError: one of them cannot be read, or not in time.
    """
    units = np.array(list(np.ndindex(segment.grid.units)), np.int32)
    reads = (segment.read(group) for group in np.split(units, segment.grid.units[0]))
    both = np.stack([unit for group in reads for unit in units_in_time(group, timeout_s)])
    both = both.reshape(*segment.grid.units, *segment.unit_shape)
    # [layer group, head group, kind, page, layer, head, kind, token, channel]
    both = both.transpose(2, 6, 0, 4, 3, 1, 5, 7, 8)
    keys, values = both.reshape(2, *segment.info.shape)
    return keys, values


def _marked(identity: Identity) -> Identity:
    return dataclasses.replace(identity, numerics=identity.numerics + _MARK)


def _write(store: PageStore, info: SegmentInfo, counts: np.ndarray) -> SegmentInfo:
    with store.open_segment(info.key) as segment:
        # What stands for pages stands for other pages now, and is left out.
        small = {name: array for name, array in segment.sketches().items() if array.ndim < 2}
        tokens = segment.tokens
        old = segment_key(_marked(info.identity), segment.grid, tokens)
        uses = counts + _uses_before(store, old)
        order = np.argsort(-uses, axis=1, kind="stable")
        keys, values = (_permuted(pages, order) for pages in pages_of(segment, store.timeout_s))
        if any(other.key == old for other in store.segments()):
            store.remove(old)
        return store.put(
            _marked(info.identity),
            tokens,
            keys,
            values,
            layout=info.layout,
            sketches={**small, ORDER: order.astype(np.int32), USES: uses},
            label=f"{info.label}, reordered",
            codec=info.codec,
        )


def _uses_before(store: PageStore, key: str) -> Any:
    """The uses that a reordered segment was made by; 0 if there is none that tells."""
    try:
        with store.open_segment(key) as segment:
            return segment.sketches(USES).get(USES, 0)
    except SegmentError:
        return 0


def _permuted(pages: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Pages [L, N, H, P, D] of which slot t of layer l holds token order[l, t]."""
    layers, count, heads, size, dim = pages.shape
    rows = pages.swapaxes(2, 3).reshape(layers, count * size, heads, dim)
    rows = np.take_along_axis(rows, order[:, :, None, None], axis=1)
    return rows.reshape(layers, count, size, heads, dim).swapaxes(2, 3)
