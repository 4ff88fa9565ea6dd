"""What the tiered decode benchmark compares: selections, windows and places, as configurations."""

import dataclasses

from kvjax.policies import (
    Hierarchical,
    MagicPIG,
    MeanKeys,
    Place,
    PQCache,
    RetroInfer,
    Select,
    Window,
)
from kvjax.policies.index import PageIndex
from kvjax.policies.tiering import By

EXACT = "all pages, in memory"
MAPPED = "all pages, mapped from disk"
OURS = "low-bit keys, window x3"
PLANNED = "low-bit keys, planned windows"
QUARTER = f"{OURS}, a quarter in host memory"
PACKED = {name: f"low-bit keys, window x3, pages in {name}" for name in ("int8", "int4")}


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to decode.

    Attributes:
      by: what pages are chosen by.
      window: pages that stay near.
      host: share of the prompt's pages that host memory has room for, the store holding all of
        them; None keeps all in host memory.
      planned: whether heads share the window's memory by what each was seen to fetch.
      format: of pages.
    """

    by: By | PageIndex
    window: Window = dataclasses.field(default_factory=Window)
    host: float | None = None
    planned: bool = False
    format: str | None = None

    def select(self, budget: str) -> Select:
        """The selection at a budget."""
        return Select(budget=budget, by=self.by)


METHODS: dict[str, Method] = {
    OURS: Method("low-bit"),
    PLANNED: Method("low-bit", planned=True),
    "low-bit keys, window x0": Method("low-bit", Window(0)),
    "low-bit keys, window x1": Method("low-bit", Window(1)),
    "low-bit keys, window x3, LRU": Method("low-bit", Window(3, "lru")),
    "low-bit keys, window x3, LFU": Method("low-bit", Window(3, "lfu")),
    QUARTER: Method("low-bit", host=0.25),
    **{name: Method("low-bit", format=format) for format, name in PACKED.items()},
    "centroids, then low-bit keys": Method("hierarchical"),
    "centroids, then page means (KVDrive)": Method(Hierarchical(MeanKeys(), probe=0.5)),
    "exact keys (oracle)": Method("keys"),
    "Quest": Method("quest", Window(0)),
    "ShadowKV's landmarks": Method("mean", Window(0)),
    "RetroInfer": Method(RetroInfer(), Window(3, "lru")),
    "PQCache": Method(PQCache(), Window(3, "lfu")),
    "MagicPIG's hashes": Method(MagicPIG(), Window(0)),
}
"""Ours, its variants, and the published selections with the window that each system has."""

SYSTEMS = ("Quest", "ShadowKV's landmarks", "RetroInfer", "PQCache", "MagicPIG's hashes")
"""Published selections; they fetch, wait and compute one after the other as ours does here."""


def place(method: Method, store: str, prompt_bytes: int) -> Place:
    """Where a method's pages live.

    Args:
      method: which.
      store: a folder, for methods that use one.
      prompt_bytes: of the prompt's pages.
    """
    if method.host is None:
        return Place()
    return Place(store=store, host_bytes=int(method.host * prompt_bytes))
