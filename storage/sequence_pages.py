"""The pages of sequences that are being decoded, for a compiled program: in memory or stored."""

import itertools
import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvjax.storage.sessions import Reader

Ids = NDArray[np.int32]
Weights = NDArray[np.float32]


class _Row:
    """One sequence's pages: those before `first` are read, the others are in memory."""

    def __init__(self, layers: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.first = 0
        self.reader: Reader | None = None
        self.hold(np.zeros((layers, *shape), dtype))

    def hold(self, pages: NDArray[Any]) -> None:
        """Have these pages [L, 2, Hkv, n, P, D] in memory, and no others."""
        self.pages = pages
        self.layers = list(pages)


class SequencePages:
    """Every full page of a few sequences, written once and read by (row, KV head, page).

    Callbacks must not raise: what fails is kept in `failures`, and from then on the reads of that
    sequence are NaN, which ends it in a decode loop; where pages are bytes (uint8), they are 255,
    of which most scales and codes of values are NaN. The others go on.

    Args:
      rows: B, sequences.
      layers: of the model.
      heads: KV heads of a layer.
      pages: N, most pages of a sequence.
      page_shape: (P, D).
      dtype: of keys and values.

    Attributes:
      failures: by row, the first error of a sequence whose pages could not be written or read.
      bytes_moved: keys and values that were handed out.
      seconds: that `issue` and `collect` took.
    """

    def __init__(
        self,
        *,
        rows: int,
        layers: int,
        heads: int,
        pages: int,
        page_shape: tuple[int, int],
        dtype: np.dtype[Any],
    ) -> None:
        shape = (2, heads, pages, *page_shape)
        self._pages, self._page, self._dtype = pages, page_shape, dtype
        self._rows = [_Row(layers, shape, dtype) for _ in range(rows)]
        self._page_bytes = 2 * page_shape[0] * page_shape[1] * dtype.itemsize
        self._numbers = itertools.count(1)
        self._tickets: dict[int, dict[int, int]] = {}
        self.failures: dict[int, BaseException] = {}
        self.bytes_moved = 0
        self.seconds = 0.0
        self._lock = threading.Lock()

    @property
    def bytes_held(self) -> int:
        """Of the pages in memory that there is room for; what was never written takes none."""
        return sum(array.nbytes for row in self._rows for array in row.layers)

    def put(self, layer: int, row: int, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Write a sequence's first pages.

        Args:
          layer: 0 to layers - 1.
          row: 0 to B - 1.
          keys: [n, Hkv, P, D]; what is past a sequence's last full page is never read, what a
            reader has is left out.
          values: as keys.
        """
        held = self._rows[row]
        try:
            for kind, pages in enumerate((keys, values)):
                own = pages[held.first :]
                held.layers[layer][kind, :, : len(own)] = own.swapaxes(0, 1)
        except Exception as error:  # noqa: BLE001  a callback must not raise; the boundary does
            self.failures.setdefault(row, error)

    def in_memory(self, row: int, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values of those of a sequence's first pages that are not read from a store.

        Args:
          row: 0 to B - 1.
          count: how many first pages, the stored ones included.

        Returns:
          [L, n, Hkv, P, D] each, of all layers: the pages themselves, no copy.
        """
        held = self._rows[row]
        both = held.pages[:, :, :, : count - held.first].swapaxes(2, 3)
        return both[:, 0], both[:, 1]

    def read_from(self, row: int, reader: Reader, count: int) -> None:
        """Read a sequence's first pages through a reader from now on, and let go of them here.

        Where that is known before they are computed, they never come here.

        Args:
          row: 0 to B - 1, none of whose pages is stored.
          reader: of units of one layer and one KV head with both keys and values.
          count: pages.
        """
        held = self._rows[row]
        held.first, held.reader = count, reader
        held.hold(np.ascontiguousarray(held.pages[:, :, :, count:]))

    def append(self, layer: int, page: Ids, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Write the page that each sequence has filled.

        Args:
          layer: 0 to layers - 1.
          page: int32 [B], its number; N or more for sequences that have filled none.
          keys: [B, Hkv, P, D].
          values: as keys.
        """
        for row in np.flatnonzero((page >= 0) & (page < self._pages)).tolist():
            held = self._rows[row]
            try:
                for kind, pages in enumerate((keys, values)):
                    held.layers[layer][kind, :, page[row] - held.first] = pages[row]
            except Exception as error:  # noqa: BLE001  a callback must not raise; the boundary does
                self.failures.setdefault(row, error)

    def issue(self, layer: int, ids: Ids, worth: Weights, *, first_row: int = 0) -> int:
        """Start reading the pages that are stored; those in memory are there.

        Args:
          layer: 0 to layers - 1.
          ids: int32 [b, Hkv, K], pages wanted by b sequences; N or more is none.
          worth: float32 [b, Hkv, K], attention that each gets: what a reader keeps pages by.
          first_row: which sequence the first of them is.

        Returns:
          A ticket.
        """
        began = time.perf_counter()
        number = next(self._numbers)
        tickets: dict[int, int] = {}
        for row, (own, weights) in enumerate(zip(ids, worth, strict=True), first_row):
            held = self._rows[row]
            if held.reader is None or row in self.failures:
                continue
            head, column = np.nonzero((own >= 0) & (own < held.first))
            if not len(head):
                continue
            try:
                units = _units(layer, head, own[head, column])
                mass = np.nan_to_num(weights[head, column])
                held.reader.touch(units, mass, np.ones_like(mass))
                tickets[row] = held.reader.issue(units, demand=True)
            except Exception as error:  # noqa: BLE001  a callback must not raise; the boundary does
                self.failures[row] = error
        if tickets:  # where nothing is missing, nobody collects
            self._tickets[number] = tickets
        self._count(began)
        return number

    def collect(
        self,
        ticket: int,
        layer: int,
        ids: Ids,
        *,
        out: tuple[NDArray[Any], NDArray[Any]],
        first_row: int = 0,
    ) -> None:
        """Hand out pages, to each KV head its own.

        Args:
          ticket: as `issue` returned it; anything if no row has pages in a store.
          layer: as `issue` was given it.
          ids: int32 [b, Hkv, k], the first k of what `issue` was given; the rest was no page.
          out: where keys and values go, [b, k, Hkv, P, D] each. What `ids` names no page for stays
            as it is; all of a row is NaN once something of it has failed. A read that fails or is
            late is made once more first.
          first_row: as `issue` was given it.
        """
        began, moved = time.perf_counter(), 0
        tickets = self._tickets.pop(ticket, {})
        for row, own, *pages in zip(range(first_row, first_row + len(ids)), ids, *out, strict=True):
            if row not in self.failures:
                try:
                    moved += self._fill(pages, layer, row, own, tickets.get(row))
                except Exception as error:  # noqa: BLE001  a callback must not raise
                    self.failures[row] = error
            if row in self.failures:
                for each in pages:
                    each[...] = _nothing(self._dtype)
        self._count(began, moved)

    def _count(self, began: float, moved: int = 0) -> None:
        """Parts of a batch may be collected at the same time."""
        with self._lock:
            self.seconds += time.perf_counter() - began
            self.bytes_moved += moved * self._page_bytes

    def _fill(
        self, out: list[NDArray[Any]], layer: int, row: int, ids: Ids, ticket: int | None
    ) -> int:
        """Put a sequence's pages, ids [Hkv, k], where keys and values go; returns how many."""
        held = self._rows[row]
        head, column = np.nonzero((ids >= held.first) & (ids < self._pages))
        at = ids[head, column] - held.first
        for kind, pages in enumerate(out):
            pages[column, head] = held.layers[layer][kind, head, at]
        moved = len(head)
        if held.reader is not None and ticket is not None:
            head, column = np.nonzero((ids >= 0) & (ids < held.first))
            try:
                got = held.reader.collect(ticket)  # [n, 1, 1, 2, P, D]
            except Exception:  # noqa: BLE001  if it was not to be, the second read says so
                units = _units(layer, head, ids[head, column])
                got = held.reader.collect(held.reader.issue(units, demand=True))
            for kind, pages in enumerate(out):
                pages[column, head] = got[:, 0, 0, kind]
            moved += len(head)
        return moved


def _nothing(dtype: np.dtype[Any]) -> Any:
    """What a page that cannot be had reads as: NaN; all bits, where pages are bytes of numbers."""
    return 255 if dtype == np.uint8 else np.nan


def _units(layer: int, head: NDArray[Any], page: Ids) -> Ids:
    """Units [n, 4] of one layer: layer group, head group, kind and page of each."""
    units = np.zeros((len(page), 4), np.int32)
    units[:, 0], units[:, 1], units[:, 3] = layer, head, page
    return units
