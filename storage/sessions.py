"""Reads of a stored prefix on behalf of a compiled program.

Its callbacks find the session by a handle, touch NumPy only, and never raise: what fails is a flag.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Weights = NDArray[np.float32]


@runtime_checkable
class Reader(Protocol):
    """What a session reads through; `kvjax.storage.prefetch.Prefetcher` is one."""

    def issue(self, units: Ids, *, demand: bool) -> int:
        """Start reading; returns a ticket at once."""
        ...

    def collect(self, ticket: int) -> NDArray[Any]:
        """Wait for a ticket's units: [n, *unit shape], in the order asked."""
        ...

    def rows_near(self, units: Ids) -> Ids:
        """[n], the row of each unit in memory that the program reads, -1 where it is not."""
        ...

    def took_near(self, units: Ids) -> None:
        """Count units as used that were not issued because `rows_near` has them."""
        ...

    def touch(self, units: Ids, mass: NDArray[Any], important: NDArray[Any]) -> None:
        """Tell what attention units get, before they are collected."""
        ...


class PageReads:
    """The page reads of one program over one stored prefix.

    Args:
      reader: reads units.
      unit_shape: (layers, heads, kinds, P, D) of a unit.
      dtype: of keys and values.
      layers: of the model.
      heads: KV heads of a layer.
      pages: N, pages of the prefix; ids at or past it name no page.
      period: layers a period; a choice is guessed for the rest of its period, and the last
        layer's for the next period.
      near_rows: rows of memory that the program reads by itself, if any.
      key_stride: layers from one that reads keys to choose by to the next.
      windows: of each layer, if layers differ; a choice is guessed for layers of the same window.
      speculate: whether to guess at all.

    Attributes:
      failure: what the first failed read raised; None while all is well.
      bytes_used: keys and values that were handed out to attend to.
      bytes_scored: keys that were handed out to choose by.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        unit_shape: tuple[int, ...],
        dtype: np.dtype[Any],
        layers: int,
        heads: int,
        pages: int,
        period: int = 4,
        near_rows: int = 0,
        key_stride: int = 1,
        windows: Sequence[int | None] | None = None,
        speculate: bool = True,
    ) -> None:
        self._reader = reader
        self._layers_a_unit, self._heads_a_unit, self._kinds, self._page, self._dim = unit_shape
        self._dtype = dtype
        self._page_bytes = self._page * self._dim * dtype.itemsize  # keys or values of one head
        self._layers, self._heads, self._pages = layers, heads, pages
        self._period = period
        self._near_rows = near_rows
        self._speculate = speculate
        self._plans: dict[int, tuple[Ids, Ids]] = {}
        self.failure: BaseException | None = None
        self._key_stride = key_stride
        self._windows = [None] * layers if windows is None else windows
        self.bytes_used = 0
        self.bytes_scored = 0

    def issue(
        self,
        layer: int,
        ids: Ids,
        *,
        mass: Weights | None = None,
        important: Weights | None = None,
        to_choose: bool = False,
    ) -> int:
        """Start reading a layer's pages, and those guessed for layers to come.

        Args:
          layer: 0 to layers - 1.
          ids: int32 [H, K], pages each KV head wants; N or more is none.
          mass: float32 [H, K], attention each page gets; None if that is not known.
          important: float32 [H, K], the share of each page's tokens that are attended to; None
            means all of them.
          to_choose: only keys are wanted, to choose pages by.

        Returns:
          A ticket, or -1 once a read has failed.
        """
        if self.failure is not None:
            return -1
        try:
            if mass is not None:
                self._touch(layer, ids, mass, important)
            return self._start(layer, ids, ids, to_choose)
        except Exception as error:  # noqa: BLE001  a callback must not raise; the boundary does
            self.failure = error
            return -1

    def issue_missing(
        self, layer: int, ids: Ids, *, mass: Weights, important: Weights
    ) -> tuple[int, Ids, NDArray[np.bool_]]:
        """Start reading those of a layer's pages that are not near, and guess as `issue` does.

        Args:
          layer: 0 to layers - 1.
          ids: int32 [H, K], pages each KV head wants; N or more is none.
          mass: float32 [H, K], attention each page gets.
          important: float32 [H, K], the share of each page's tokens that are attended to.

        Returns:
          A ticket, or -1 once a read has failed; int32 [2, H, K], the rows of near memory with each
          page's keys and values, `near_rows` where it is not there; and bool [H, K], which pages
          are to be collected.
        """
        rows = np.full((2, *ids.shape), self._near_rows, np.int32)
        nothing = np.zeros(ids.shape, np.bool_)
        if self.failure is not None:
            return -1, rows, nothing
        try:
            self._touch(layer, ids, mass, important)
            units, where = self._units(layer, ids, to_choose=False)
            by_kind = units.reshape(3 - self._kinds, -1, 4)  # keys and values are apart, or not
            found = self._reader.rows_near(units).reshape(by_kind.shape[:2])
            whole = (found >= 0).all(axis=0)
            self._reader.took_near(by_kind[:, whole].reshape(-1, 4))
            rows[:, ids < self._pages] = np.where(whole, found, self._near_rows)[:, where]
            self.bytes_used += int(np.count_nonzero(rows < self._near_rows)) * self._page_bytes
            missing = (ids < self._pages) & (rows[0] == self._near_rows)
            rest = np.where(missing, ids, self._pages)
            return self._start(layer, rest, ids, to_choose=False), rows, missing
        except Exception as error:  # noqa: BLE001  a callback must not raise; the boundary does
            self.failure = error
            return -1, np.full_like(rows, self._near_rows), nothing

    def collect(
        self, ticket: int, layer: int, ids: Ids, *, to_choose: bool = False
    ) -> NDArray[Any]:
        """Wait for what a ticket reads.

        Args:
          ticket: as `issue` returned it.
          layer: as `issue` was given it.
          ids: as `issue` was given them.
          to_choose: as `issue` was given it.

        Returns:
          Keys and values [2, K, H, P, D], or keys [1, K, H, P, D]; zero where no page is wanted,
          and everywhere once a read has failed.
        """
        heads, count = ids.shape
        shape = (1 if to_choose else 2, count, heads, self._page, self._dim)
        out = np.zeros(shape, self._dtype)
        if self.failure is None:
            try:
                units, where = self._plans.pop(ticket)
                if len(units):
                    self._scatter(out, self._reader.collect(ticket), where, layer, ids)
            except Exception as error:  # noqa: BLE001  a callback must not raise; the boundary does
                self.failure = error
                out[:] = 0
        return out

    def _start(self, layer: int, missing: Ids, ids: Ids, to_choose: bool) -> int:
        units, where = self._units(layer, missing, to_choose)
        ticket = self._reader.issue(units, demand=True)
        self._plans[ticket] = (units, where)
        if self._speculate:
            for ahead in self._guessed(layer, to_choose):
                self._reader.issue(self._units(ahead, ids, to_choose)[0], demand=False)
        return ticket

    def _touch(self, layer: int, ids: Ids, mass: Weights, important: Weights | None) -> None:
        """Tell the reader what the units' pages are worth: mass is summed, shares are averaged."""
        units, where = self._units(layer, ids, to_choose=False)
        wanted = ids < self._pages
        times = np.bincount(where)
        # A query that is not finite ends the call elsewhere; it must not spoil the ranks.
        weights = np.clip(np.nan_to_num(mass[wanted], posinf=0.0), 0.0, None)
        worth = np.bincount(where, weights)
        share = np.ones(len(times))
        if important is not None:
            share = np.clip(np.bincount(where, important[wanted]) / times, 0.0, 1.0)
        kinds = len(units) // max(len(times), 1)
        self._reader.touch(units, np.tile(worth, kinds), np.tile(share, kinds))

    def _scatter(
        self, out: NDArray[Any], got: NDArray[Any], where: Ids, layer: int, ids: Ids
    ) -> None:
        head, column = np.nonzero(ids < self._pages)
        inside = head % self._heads_a_unit
        block = layer % self._layers_a_unit
        for kind in range(len(out)):
            if self._kinds == 2:
                out[kind, column, head] = got[where, block, inside, kind]
            else:  # all keys, then all values
                first = kind * (len(got) // len(out))
                out[kind, column, head] = got[first + where, block, inside, 0]
        used = int(head.size) * len(out) * self._page_bytes
        if len(out) == 2:
            self.bytes_used += used
        else:
            self.bytes_scored += used

    def _units(self, layer: int, ids: Ids, to_choose: bool) -> tuple[Ids, Ids]:
        """Distinct units [n, 4] of a choice, and for each chosen page the index of its unit."""
        head, column = np.nonzero(ids < self._pages)
        pages = ids[head, column]
        flat = (head // self._heads_a_unit) * self._pages + pages
        distinct, where = np.unique(flat, return_inverse=True)
        units = np.zeros((len(distinct), 4), np.int32)
        units[:, 0] = layer // self._layers_a_unit
        units[:, 1], units[:, 3] = np.divmod(distinct, self._pages)
        if self._kinds == 1 and not to_choose:  # keys, then values
            units = np.concatenate([units, units])
            units[len(distinct) :, 2] = 1
        return units, where.astype(np.int32)

    def _guessed(self, layer: int, to_choose: bool) -> list[int]:
        """The layers that a layer's choice is guessed for, or the next whose keys are wanted."""
        end = (layer // self._period + 1) * self._period
        ahead = range(layer + 1, end) or range(end, end + self._period)
        if to_choose:
            ahead = range(layer + self._key_stride, layer + self._key_stride + 1)
        alike = (x for x in ahead if x < self._layers and self._windows[x] == self._windows[layer])
        return list(alike)
