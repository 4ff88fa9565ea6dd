"""How stored prefixes are chosen from, read and kept in memory."""

import dataclasses
import math
from collections.abc import Collection
from typing import Literal, get_args

from kvjax.config import CacheConfig
from kvjax.decode.choosing import ByPages, ByTokens, Selection
from kvjax.errors import KvjaxError
from kvjax.model import Model, keeps_latents
from kvjax.policies import Choice, ExactKeys, LowBitKeys, MeanKeys, QuestBounds, Sketch
from kvjax.policies.budget import Budget
from kvjax.policies.select import Who
from kvjax.storage.layout import Layout
from kvjax.storage.unit_codec import Codec

By = Literal["low-bit", "mean", "quest", "keys", "impress", "h2o", "all"]
LoadPolicy = Literal["auto", "load", "recompute"]
Placement = Literal["attention", "impress", "lru", "lfu"]


TOKEN_CHUNK = 64
"""Tokens that are read together where tokens are chosen."""


@dataclasses.dataclass(frozen=True)
class PrefixConfig:
    """How stored prefixes are chosen from, read and kept in memory.

    Attributes:
      budget: most of a prefix that is attended to, but for the first and the last page, which
        always are: a share, pages, tokens or bytes. What is read on a wrong guess comes on top. If
        the model has sliding windows, it is raised to the longest: layers with a window attend to
        all that is in it, and to nothing else.
      by: what pages are chosen by: "low-bit", the keys in `bits` bits; "mean", page means
        (ShadowKV); "quest", Quest's bounds; "keys", all keys of a deciding layer, read from the
        store (ContiguousKV); "h2o", tokens by the same keys, read in chunks of 64; "impress",
        tokens by the keys of three KV heads, if these agree; "all", every page whatever the
        budget.
      reorder: whether tokens are counted as they are chosen, for `PrefixCache.reorder` to pack
        (IMPRESS); only where tokens are chosen, by "impress" or "h2o".
      bits: of low-bit keys, 2, 3 or 4.
      clip: share of a channel's range that low-bit codes cover.
      who: "head", "layer" or "period" chooses.
      pooling: the share of a neighbour's attention that a page is chosen by if its own is less, 0
        to 1; see `Choice`.
      period: layers a period; a choice is guessed for the rest of its period and for the next.
      prefetch: whether pages are read ahead on a guess.
      load_policy: "load", "recompute", or "auto": whichever is estimated to be faster.
      on_read_failure: "recompute" the prefix, or "fail".
      host_bytes: bytes of host memory that keep pages between requests, for each shape of what one
        read brings.
      device_bytes: bytes of device memory that do; they are backed by as many bytes of host memory,
        so that a page which leaves the device is not transferred.
      pin_host: whether pages in host memory are also kept page-locked (JAX's "pinned_host"), as
        many bytes again, where a program on an accelerator reads them without a call to Python.
      codec: how pages that are added, or their codes in a format, are encoded in the store, always
        without loss: "none"; "zstd"; "blosc", bits shuffled, then LZ4; or "splitzip"
        (arXiv:2605.01708), of bfloat16 only, which gives way to "none" where it saves nothing. What
        is stored says itself how it is read.
      placement: which pages are kept: those of greatest "attention" x uses (ContiguousKV), or by
        "lru", "lfu" or IMPRESS's score.
      timeout_s: the longest wait for a read, or for another answer of the store, in seconds.

    Raises:
      KvjaxError: a field is not what it must be.
    """

    budget: str = "25%"
    by: By = "low-bit"
    reorder: bool = False
    bits: int = 3
    clip: float = 1.0
    who: Who = "head"
    pooling: float = 0.5
    period: int = 4
    prefetch: bool = True
    load_policy: LoadPolicy = "auto"
    on_read_failure: Literal["recompute", "fail"] = "recompute"
    host_bytes: int = 256 << 20
    device_bytes: int = 0
    pin_host: bool = False
    placement: Placement = "attention"
    codec: Codec = "none"
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        Budget(self.budget)
        kinds = {"by": By, "load_policy": LoadPolicy, "placement": Placement, "codec": Codec}
        for name, kind in kinds.items():
            _one_of(name, getattr(self, name), get_args(kind))
        _one_of("on_read_failure", self.on_read_failure, ("recompute", "fail"))
        if self.by == "low-bit":
            LowBitKeys(self.bits, self.clip)
        if self.reorder and not self.by_tokens:
            raise KvjaxError(
                f"reorder is True and by is {self.by!r}: only tokens are reordered; choose by "
                f"'impress' or 'h2o', or leave reorder out"
            )
        for name in ("host_bytes", "device_bytes"):
            if getattr(self, name) < 0:
                raise KvjaxError(f"{name} is {getattr(self, name)}: must be 0 or more bytes")
        if not 0 < self.timeout_s < math.inf:
            raise KvjaxError(f"timeout_s is {self.timeout_s}: must be a number of seconds above 0")
        self.choice()

    def choice(self, always: tuple[int, int] = (1, 1)) -> Choice:
        """Who chooses, as a program takes it.

        Args:
          always: first and last pages that are in whatever the budget.
        """
        first, last = always
        return Choice(
            who=self.who, period=self.period, pooling=self.pooling, first=first, last=last
        )

    def sketch(self) -> Sketch | None:
        """What is kept in memory to choose by, if anything is."""
        if self.by == "low-bit":
            return LowBitKeys(self.bits, self.clip)
        if self.by == "mean":
            return MeanKeys()
        return QuestBounds() if self.by == "quest" else None

    def least_pages(self, always: tuple[int, int] = (1, 1)) -> int:
        """Pages that a program must have room to choose.

        Args:
          always: as of `choice`.
        """
        return max(sum(always), 1)

    def key_layers(self, layers: Collection[int]) -> int:
        """How many layers read all of their keys to choose by.

        Args:
          layers: those of the model that choose or are chosen for: they have no window.
        """
        if self.by not in ("keys", "impress", "h2o"):
            return 0
        return len({self.choice().decider(x) for x in layers} if self.by == "keys" else layers)

    @property
    def by_tokens(self) -> bool:
        """Whether tokens are chosen, rather than pages."""
        return self.by in ("impress", "h2o")

    def selection(self, always: tuple[int, int] = (1, 1)) -> Selection:
        """How a program chooses.

        Args:
          always: as of `choice`.
        """
        if self.by_tokens:
            probes = 3 if self.by == "impress" else None
            return ByTokens(probe_heads=probes, chunk=TOKEN_CHUNK, count_uses=self.reorder)
        return ByPages(ExactKeys() if self.by == "keys" else self.sketch(), self.choice(always))

    def layout(self, page_size: int, layers: int, heads: int) -> Layout:
        """How prefixes are cut into reads: what is always chosen together is read together.

        Args:
          page_size: tokens a page.
          layers: of the model; where a period does not divide them, a read brings a part of one.
          heads: KV heads of a layer.

        Raises:
          KvjaxError: tokens are chosen in chunks that are not made of whole pages.
        """
        if self.by_tokens and TOKEN_CHUNK % page_size:
            raise KvjaxError(
                f"page_size is {page_size} and by is {self.by!r}: its chunks of {TOKEN_CHUNK} "
                f"tokens must be made of whole pages; choose pages of 8, 16, 32 or 64 tokens"
            )
        together = self.who == "period" and self.by != "keys"
        return Layout(
            page_size=page_size,
            layers=math.gcd(layers, self.period) if together else 1,
            heads=1 if self.who == "head" or self.by == "impress" else heads,
            split_kv=self.by in ("keys", "impress", "h2o"),
        )

    def sketch_name(self) -> str | None:
        """What the sketch is called in a segment; None if none is kept."""
        if self.sketch() is None:
            return None
        return f"low-bit-{self.bits}-{self.clip:g}" if self.by == "low-bit" else self.by


def check_codec(codec: str, dtype: str) -> None:
    """Refuse a codec that cannot encode the pages of a cache.

    Args:
      codec: as `PrefixConfig.codec`.
      dtype: of the cache.

    Raises:
      KvjaxError: it cannot.
    """
    if codec == "splitzip" and dtype != "bfloat16":
        raise KvjaxError(
            f"codec is {codec!r} and the cache is {dtype}: it encodes bfloat16; keep the cache in "
            f"bfloat16, or choose 'zstd' or 'blosc'"
        )


def check_latents(config: PrefixConfig, model: Model) -> None:
    """Refuse what pages of latents cannot be chosen by.

    Args:
      config: of the prefixes.
      model: the caller's.

    Raises:
      KvjaxError: keys are to be read without values.
    """
    if not keeps_latents(model.config):
        return
    if config.key_layers((0,)):
        raise KvjaxError(
            f"by is {config.by!r} and {model.name} keeps latents, of which keys are most: to read "
            f"all keys is to read the prefix; choose by 'low-bit', 'mean', 'quest' or 'all'"
        )


def check_format(config: PrefixConfig, cache: CacheConfig) -> None:
    """Refuse a format where prefixes are chosen from, or encoded, as numbers.

    Args:
      config: of the prefixes.
      cache: of a call.

    Raises:
      KvjaxError: they are.
    """
    if cache.page_format is None:
        return
    if config.by_tokens:
        raise KvjaxError(
            f"by is {config.by!r} and cache.format is given: tokens that are chosen one by one are "
            f"packed into new pages, and a format's codes are of whole pages; choose by 'low-bit', "
            f"'mean', 'quest', 'keys' or 'all', or leave out format"
        )
    if config.codec == "splitzip":
        raise KvjaxError(
            "codec is 'splitzip' and cache.format is given: it encodes bfloat16 numbers, and pages "
            "of a format are bytes; take 'zstd', 'blosc' or 'none'"
        )


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise KvjaxError(f"{name} is {value!r}: must be one of {', '.join(allowed)}")
