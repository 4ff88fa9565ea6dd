"""What a decode step reads of a long context, what stays near, and where the rest lives."""

import dataclasses
import math
import numbers
import os
from typing import Literal, get_args

from kvjax.errors import KvjaxError, check_integer
from kvjax.policies.budget import Budget
from kvjax.policies.hierarchical import Hierarchical
from kvjax.policies.index import PageIndex, PerPage
from kvjax.policies.indexer import DistilledIndexer
from kvjax.policies.low_bit import ExactKeys, LowBitKeys
from kvjax.policies.low_rank import LowRank
from kvjax.policies.magicpig import MagicPIG
from kvjax.policies.pqcache import PQCache
from kvjax.policies.retroinfer import RetroInfer
from kvjax.policies.select import Aggregate, Choice
from kvjax.policies.sketch import MeanKeys, QuestBounds
from kvjax.policies.window_plan import WindowPlan
from kvjax.storage.unit_codec import Codec

By = Literal[
    "low-bit",
    "hierarchical",
    "kvdrive",
    "mean",
    "quest",
    "retroinfer",
    "pqcache",
    "magicpig",
    "low-rank",
    "keys",
    "indexer",
]
NAMES: tuple[str, ...] = get_args(By)
"""What pages may be chosen by, as `Select.by` names it."""

DEFAULT_BUDGET = "6.25%"
"""What a step reads unless the caller or the model says how much."""


@dataclasses.dataclass(frozen=True)
class Select:
    """Which pages a decode step reads: the K of greatest estimated attention, for every KV head.

    The first and the last full page, and the page that is being filled, are always read. Layers
    with a sliding window choose nothing: they read what it reaches, which stays on the device.

    Attributes:
      budget: K as a share of prompt and new tokens, as pages, tokens or bytes; "100%" is exact.
        None is 6.25 %, and "100%" with "indexer", which knows no other: it says how many tokens.
      by: what pages are chosen by: "low-bit", their keys in `bits` bits; "hierarchical", the same
        for the pages that centroids find; "kvdrive", page means for these (arXiv:2605.18071);
        "mean", page means (ShadowKV's landmarks, arXiv:2410.21465); "quest", Quest's bounds
        (arXiv:2406.10774); "retroinfer", clusters of tokens (arXiv:2505.02922); "pqcache",
        product-quantized keys (arXiv:2407.12820); "magicpig", hashes (arXiv:2410.16179);
        "low-rank", keys before their rotation in few dimensions (ShadowKV's); "keys", the exact
        keys, an oracle that keeps all of them on the device; or any `kvjax.policies.PageIndex`, or
        a `DistilledIndexer` that was learned of the model's own attention. "indexer" is the model's
        own (DSA: DeepSeek V3.2, GLM-5), for models that have one and for no others: a step reads
        the pages that hold the tokens it chooses, and attends to these alone.
      bits: of low-bit keys, 2, 3 or 4.
      aggregate: how the query heads of a KV head agree: by the "sum", "max" or "mean" of their
        attention, or by turns, "query", each naming the page it attends to most; see `Choice`.
      pooling: the share of a neighbour's attention that a page counts with; see `Choice`.

    Raises:
      KvjaxError: a field is not what it must be.
    """

    budget: str | None = None
    by: By | PageIndex | DistilledIndexer = "low-bit"
    bits: int = 3
    aggregate: Aggregate = "sum"
    pooling: float = 0.0

    def __post_init__(self) -> None:
        own = self.by == "indexer"
        if self.budget is None:
            object.__setattr__(self, "budget", "100%" if own else DEFAULT_BUDGET)
        assert self.budget is not None
        Budget(self.budget)
        for name, only in (("budget", "100%"), ("aggregate", "sum"), ("pooling", 0.0)):
            if own and getattr(self, name) != only:
                raise KvjaxError(
                    f"{name} is {getattr(self, name)!r} and by is 'indexer': the model's own "
                    f"indexer says which tokens all heads attend to, and how many; leave out {name}"
                )
        named = isinstance(self.by, str) and self.by in NAMES
        index = isinstance(self.by, PageIndex | DistilledIndexer) and not isinstance(self.by, type)
        if not (named or index):
            raise KvjaxError(
                f"by is {self.by!r}: must be one of {', '.join(NAMES)}, a PageIndex or a "
                f"DistilledIndexer"
            )
        if not _is_number(self.pooling):
            raise KvjaxError(f"pooling is {self.pooling!r}: must be a number from 0 to 1")
        try:
            hash(self.by)
        except TypeError:
            raise KvjaxError(
                f"by is {self.by!r}: must be hashable, since programs are kept by it; make the "
                f"PageIndex a frozen dataclass of plain values"
            ) from None
        self.index()
        self.choice()

    def index(self) -> PageIndex | DistilledIndexer | None:
        """What pages are chosen by; `LowRank` without the rotation, which is the model's.

        None where that is the model's own indexer.
        """
        if not isinstance(self.by, str):
            return self.by
        if self.by == "indexer":
            return None
        named: dict[str, PageIndex] = {
            "low-bit": PerPage(LowBitKeys(self.bits)),
            "hierarchical": Hierarchical(LowBitKeys(self.bits)),
            "kvdrive": Hierarchical(MeanKeys()),
            "mean": PerPage(MeanKeys()),
            "quest": PerPage(QuestBounds()),
            "retroinfer": RetroInfer(),
            "pqcache": PQCache(),
            "magicpig": MagicPIG(),
            "low-rank": LowRank(),
            "keys": PerPage(ExactKeys()),
        }
        return named[self.by]

    def choice(self) -> Choice:
        """Who chooses, as a program takes it."""
        return Choice(who="head", aggregate=self.aggregate, pooling=self.pooling)


@dataclasses.dataclass(frozen=True)
class Window:
    """Which of the pages that steps have read stay near for the next steps.

    Attributes:
      times: slots for each layer and KV head, in multiples of the K pages of a step; 0 keeps
        nothing from step to step (use and drop). Not given with a plan.
      evict: what makes room: the page of least attention in the current step ("lookahead",
        KVDrive, arXiv:2605.18071), the one not read for longest ("lru"), or the one read least
        often ("lfu").
      plan: slots of its own for every layer and KV head, as `kvjax.decode.plan_windows` finds them;
        a `WindowPlan`, or the path of a saved one. A head to which it gives fewer than K has K.

    Raises:
      KvjaxError: a field is not what it must be.
    """

    times: float = 3.0
    evict: Literal["lookahead", "lru", "lfu"] = "lookahead"
    plan: WindowPlan | str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if not (_is_number(self.times) and (self.times == 0 or 1 <= self.times < math.inf)):
            raise KvjaxError(
                f"times is {self.times!r}: must be 0 (keep nothing) or a number of at least 1"
            )
        _one_of("evict", self.evict, ("lookahead", "lru", "lfu"))
        if isinstance(self.plan, os.PathLike):
            object.__setattr__(self, "plan", os.fspath(self.plan))
        path = isinstance(self.plan, str) and self.plan
        if not (self.plan is None or path or isinstance(self.plan, WindowPlan)):
            raise KvjaxError(
                f"plan is {self.plan!r}: must be a kvjax.policies.WindowPlan, the path of a saved "
                f"one, or None"
            )
        if self.plan is not None and self.times != Window.times:
            raise KvjaxError(
                f"times is {self.times} and plan is given: the plan says how many slots each head "
                f"has; leave out one of them"
            )

    def slots(self, room: int) -> int:
        """Slots of a layer and KV head, but for the page that is being filled.

        Args:
          room: K, pages of a step.
        """
        return max(math.ceil(self.times * room), room)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where pages live that are not near.

    Attributes:
      device_bytes: most bytes of device memory for pages that stay near; None is what the window
        says. What pages are chosen by, and those that are fetched in a step, come on top.
      host_bytes: most bytes of host memory for a prompt's pages where a store holds them all;
        without a store, host memory holds them all. While a prompt is prefilled that no store has,
        its pages are there too, whatever this says.
      store: URL or folder of a page store that holds every full page of the prompts; later calls
        with `prefixes` find them there, later calls with this prefill again, and read a stored
        prompt's pages that they share if these are most. Other pages, and those of generated
        tokens until the call ends, are in host memory.
      keep_generated: whether full pages of generated tokens join the store when the call ends, for
        prompts that go on where the answer ended; only the new pages are written. Where steps did
        not read all pages, what they computed is no more than an approximation of what is to be
        found there, and is not stored: the statistics say so.
      order: how pages lie in the files of a prompt that is written: by "position", or by "cluster",
        pages of near keys next to each other. Neighbours come in one read.
      codec: how a prompt's pages are encoded where they are written to the store, without loss:
        "none", "zstd", "blosc" or "splitzip"; see `kvjax.decode.PrefixConfig`.
      hot_exact: with a format, whether pages that are near are as the model made them until they
        leave: those that get most attention stay exact, the others are packed, which is what comes
        back of them. Otherwise every full page is read as its format keeps it, near or not, and
        what is near does not change results.
      observe: how many of the prompt's last tokens say which pages are near at first.
      timeout_s: the longest wait for a read, in seconds; one that failed or is late is made once
        more.
      micro_batches: parts that a batch is cut into, a power of two: while pages are read for one
        part, those of the next are selected. More than there are rows counts as a row a part.

    Raises:
      KvjaxError: a field is not what it must be.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    store: str | os.PathLike[str] | None = None
    keep_generated: bool = False
    order: Literal["position", "cluster"] = "position"
    codec: Codec = "none"
    hot_exact: bool = False
    observe: int = 32
    timeout_s: float = 30.0
    micro_batches: int = 1

    def __post_init__(self) -> None:
        for name in ("device_bytes", "host_bytes"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 0, " bytes, or None")
        if isinstance(self.store, os.PathLike):
            object.__setattr__(self, "store", os.fspath(self.store))
        if self.store is not None and not (isinstance(self.store, str) and self.store):
            raise KvjaxError(f"store is {self.store!r}: must be a URL or a folder's path, or None")
        if self.host_bytes is not None and self.store is None:
            raise KvjaxError(
                f"host_bytes is {self.host_bytes} and store is None: name a store for the pages "
                f"that do not fit, or leave out host_bytes"
            )
        for name in ("keep_generated", "hot_exact"):
            if not isinstance(getattr(self, name), bool):
                raise KvjaxError(f"{name} is {getattr(self, name)!r}: must be True or False")
        if self.keep_generated and self.store is None:
            raise KvjaxError(
                "keep_generated is True and store is None: name a store to keep them in, or leave "
                "out keep_generated"
            )
        _one_of("order", self.order, ("position", "cluster"))
        if self.order != "position" and self.store is None:
            raise KvjaxError(
                f"order is {self.order!r} and store is None: it is that of pages in the store's "
                f"files; name a store, or leave out order"
            )
        _one_of("codec", self.codec, get_args(Codec))
        if self.codec != "none" and self.store is None:
            raise KvjaxError(
                f"codec is {self.codec!r} and store is None: it is that of pages in the store's "
                f"files; name a store, or leave out codec"
            )
        check_integer("observe", self.observe, 1)
        if check_integer("micro_batches", self.micro_batches, 1).bit_count() > 1:
            raise KvjaxError(f"micro_batches is {self.micro_batches}: must be a power of two")
        if not (_is_number(self.timeout_s) and 0 < self.timeout_s < math.inf):
            raise KvjaxError(
                f"timeout_s is {self.timeout_s!r}: must be a number of seconds above 0"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise KvjaxError(f"{name} is {value!r}: must be one of {', '.join(allowed)}")
