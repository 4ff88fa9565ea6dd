"""The pages of sequences that are being decoded, in host memory, for a compiled program."""

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]


class SequencePages:
    """Every full page of a few sequences, written once and read by (row, KV head, page).

    Callbacks must not raise: what fails is kept in `failure`, and read as zeros.

    Args:
      rows: B, sequences.
      layers: of the model.
      heads: KV heads of a layer.
      pages: N, most pages of a sequence.
      page_shape: (P, D).
      dtype: of keys and values.

    Attributes:
      failure: the first error; None while all is well.
      bytes_moved: keys and values that were handed out.
      bytes_held: of the arrays.
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
        shape = (2, rows, heads, pages, *page_shape)
        self._layers = [np.zeros(shape, dtype) for _ in range(layers)]
        self._page_bytes = 2 * page_shape[0] * page_shape[1] * dtype.itemsize
        self._tickets = itertools.count(1)
        self.failure: BaseException | None = None
        self.bytes_moved = 0

    @property
    def bytes_held(self) -> int:
        """Of all pages there is room for; what was never written takes no memory."""
        return sum(array.nbytes for array in self._layers)

    def put(self, layer: int, row: int, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Write a sequence's first pages.

        Args:
          layer: 0 to layers - 1.
          row: 0 to B - 1.
          keys: [n, Hkv, P, D]; what is past a sequence's last full page is never read.
          values: as keys.
        """
        try:
            for kind, pages in enumerate((keys, values)):
                self._layers[layer][kind, row, :, : len(pages)] = pages.swapaxes(0, 1)
        except Exception as error:  # noqa: BLE001  a callback must not raise; the boundary does
            self.failure = self.failure or error

    def append(self, layer: int, page: Ids, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Write the page that each sequence has filled.

        Args:
          layer: 0 to layers - 1.
          page: int32 [B], its number; N or more for sequences that have filled none.
          keys: [B, Hkv, P, D].
          values: as keys.
        """
        try:
            rows = np.flatnonzero(page < self._layers[layer].shape[3])
            for kind, pages in enumerate((keys, values)):
                self._layers[layer][kind, rows, :, page[rows]] = pages[rows]
        except Exception as error:  # noqa: BLE001  a callback must not raise; the boundary does
            self.failure = self.failure or error

    def issue(self, layer: int, ids: Ids) -> int:
        """Nothing to start: pages in host memory are there.

        Args:
          layer: 0 to layers - 1.
          ids: int32 [B, Hkv, K], pages wanted; N or more is none.

        Returns:
          A ticket.
        """
        del layer, ids
        return next(self._tickets)

    def collect(self, ticket: int, layer: int, ids: Ids) -> NDArray[Any]:
        """Pages, for each KV head its own.

        Args:
          ticket: as `issue` returned it.
          layer: as `issue` was given it.
          ids: int32 [B, Hkv, k], the first k of what `issue` was given; the rest was no page.

        Returns:
          [2, B, k, Hkv, P, D], keys and values; zero where `ids` names no page.
        """
        del ticket
        held = self._layers[layer]
        _, rows, heads, total, *page = held.shape
        out = np.zeros((2, rows, ids.shape[2], heads, *page), held.dtype)
        try:
            row, head, column = np.nonzero(ids < total)
            for kind in range(2):
                out[kind, row, column, head] = held[kind, row, head, ids[row, head, column]]
            self.bytes_moved += len(row) * self._page_bytes
        except Exception as error:  # noqa: BLE001  a callback must not raise; the boundary does
            self.failure = self.failure or error
        return out
