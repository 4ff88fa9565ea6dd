"""What a short run found best for decoding over tiers on one machine, kept as a file."""

import dataclasses
import os
from typing import Any, Literal

from kvjax.config import CacheConfig
from kvjax.decode.identity import fingerprint
from kvjax.errors import KvjaxError, check_integer
from kvjax.model import Model
from kvjax.policies import DistilledIndexer, Hierarchical, PageIndex, RetroInfer, Window, WindowPlan
from kvjax.sealed import read_sealed, write_sealed

MAGIC = "kvjax tier calibration"
VERSION = 1

_AGAIN = "calibrate again"


@dataclasses.dataclass(frozen=True)
class Trial:
    """One setting that was tried.

    Attributes:
      setting: what was changed.
      value: pages (RetroInfer: tokens) a centroid stands for; slots in multiples of a step's pages;
        or parts that the batch is cut into.
      step_seconds: of a decode step, median.
      fetch_seconds: of a step, that the host took to find and read missing pages.
      evaluate_seconds: of a step, that looking up and evicting takes; None where it was not timed.
      hit_ratio: share of chosen pages that were near.
      kl: mean KL in nats from the distributions with all pages; None where it does not depend on
        the setting.
    """

    setting: Literal["centroids", "window", "micro-batches"]
    value: float
    step_seconds: float
    fetch_seconds: float
    evaluate_seconds: float | None = None
    hit_ratio: float | None = None
    kl: float | None = None


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Settings for a `CacheConfig` with `select` and `place`, and what they were chosen by.

    Attributes:
      model: fingerprint of the model that ran.
      page_size: tokens a page.
      per_centroid: pages (RetroInfer: tokens) a centroid stands for; None where pages are chosen by
        an index without centroids.
      times: slots of the window, in multiples of a step's pages.
      micro_batches: parts that the batch is cut into.
      slots: of each layer and KV head, where they were planned; `times` then is their mean.
      trials: all that were made.
    """

    model: str
    page_size: int
    per_centroid: int | None
    times: float
    micro_batches: int
    slots: tuple[tuple[int, ...], ...] | None
    trials: tuple[Trial, ...]

    def apply(self, cache: CacheConfig) -> CacheConfig:
        """A cache configuration with these settings.

        Args:
          cache: with `select` and `place`.

        Raises:
          KvjaxError: it has not, its page size is another, or it chooses pages by an index without
            centroids where this has a number of them.
        """
        if cache.select is None or cache.place is None:
            raise KvjaxError(
                "a calibration is of selected pages that live elsewhere: give "
                "CacheConfig(select=..., place=...)"
            )
        if cache.page_size != self.page_size:
            raise KvjaxError(
                f"page_size is {cache.page_size}, and the calibration is for {self.page_size}: use "
                f"that page size, or {_AGAIN}"
            )
        select, window = cache.select, cache.window or Window()
        if self.per_centroid is not None:
            select = dataclasses.replace(
                select, by=with_centroids(select.index(), self.per_centroid)
            )
        if self.slots is None:
            window = dataclasses.replace(window, times=self.times, plan=None)
        else:
            plan = WindowPlan(self.slots, self.model, self.page_size)
            window = dataclasses.replace(window, times=Window.times, plan=plan)
        place = dataclasses.replace(cache.place, micro_batches=self.micro_batches)
        return dataclasses.replace(cache, select=select, window=window, place=place)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the calibration as JSON, whole or not at all; an older file is replaced.

        Args:
          path: of the file.

        Raises:
          OSError: it cannot be written.
        """
        write_sealed(path, dataclasses.asdict(self), magic=MAGIC, version=VERSION)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, model: Model) -> "Calibration":
        """Reads a calibration that `save` wrote, for this model.

        Args:
          path: of the file.
          model: that is to run.

        Raises:
          KvjaxError: there is no such file, it is none of these, of another version or damaged, or
            the calibration is another model's.
          OSError: it cannot be read.
        """
        body = read_sealed(path, what="calibration", magic=MAGIC, version=VERSION, again=_AGAIN)
        name = f"calibration {os.fspath(path)}"
        try:
            found = _from_body(body)
        except (KeyError, TypeError, ValueError) as error:
            raise KvjaxError(f"{name} lacks or mistakes a field ({error}): {_AGAIN}") from error
        if found.model != fingerprint(model):
            raise KvjaxError(
                f"{name} is for model {found.model[:12]}, and {model.name} is "
                f"{fingerprint(model)[:12]}: {_AGAIN}"
            )
        return found


def centroids_of(index: PageIndex | DistilledIndexer | None) -> int | None:
    """Pages (RetroInfer: tokens) that a centroid of an index stands for; None without centroids."""
    if isinstance(index, Hierarchical):
        return index.pages_per_cluster
    return index.tokens_per_cluster if isinstance(index, RetroInfer) else None


def with_centroids(index: PageIndex | DistilledIndexer | None, per_centroid: int) -> PageIndex:
    """An index with another number of centroids.

    Args:
      index: one that has some.
      per_centroid: pages (RetroInfer: tokens) that each stands for.

    Raises:
      KvjaxError: it has none.
    """
    if isinstance(index, Hierarchical):
        return dataclasses.replace(index, pages_per_cluster=per_centroid)
    if isinstance(index, RetroInfer):
        return dataclasses.replace(index, tokens_per_cluster=per_centroid)
    raise KvjaxError(
        f"the calibration has {per_centroid} entries a centroid, and pages are chosen by {index}, "
        f"which has no centroids: choose by what was calibrated, or {_AGAIN}"
    )


def _from_body(body: dict[str, Any]) -> Calibration:
    slots = body["slots"]
    if slots is not None:
        slots = tuple(tuple(check_integer("slots", count, 0) for count in row) for row in slots)
    centroids = body["per_centroid"]
    return Calibration(
        model=body["model"],
        page_size=check_integer("page_size", body["page_size"], 1),
        per_centroid=None if centroids is None else check_integer("per_centroid", centroids, 1),
        times=float(body["times"]),
        micro_batches=check_integer("micro_batches", body["micro_batches"], 1),
        slots=slots,
        trials=tuple(Trial(**trial) for trial in body["trials"]),
    )
