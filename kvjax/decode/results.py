"""What entry points return."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from kvjax.errors import KvjaxError

FinishReason = Literal["stop", "length", "error"]


@dataclasses.dataclass(frozen=True)
class PrefixStats:
    """What a stored prefix gave a call, in pages, units, bytes and seconds.

    A unit is what one read brings. `bytes_read` are all keys and values that came from the store in
    this call; shard indexes with checksums, sketches and calibration are counted apart.
    """

    key: str  # of the stored prefix
    pages: int  # pages of the prompt that are stored
    pages_chosen: int  # of these, how many each layer and KV head attended to
    page_size: int
    bytes_read: int
    bytes_used: int  # keys and values that were attended to
    bytes_scored: int  # keys that pages were chosen by, where they are read for that
    index_bytes: int
    sketch_bytes: int
    calibration_bytes: int  # read to estimate what reading costs here, once a prefix
    bytes_wasted: int  # read on a guess and never used
    bytes_prefetched: int  # used, and their read began before they were known to be needed
    device_hits: int  # units that were in device memory
    host_hits: int  # units that were in host memory
    units: int  # units that were needed
    wait_seconds: float  # the program waited for reads
    read_seconds: float  # a read was under way
    seconds: float  # from the call to the end of prefill, compilation excluded

    @property
    def read_amplification(self) -> float | None:
        """Bytes read on demand or used, over bytes used that were not in memory; None without.

        A codec of the store makes it smaller: what is read is counted as it is stored.
        """
        hits = self.device_hits + self.host_hits
        missed = self.bytes_used * (1 - hits / self.units) if self.units else 0
        return (self.bytes_read - self.bytes_wasted) / missed if missed else None


@dataclasses.dataclass(frozen=True)
class TierReads:
    """What a tiered call read from a page store. A unit is one KV head's page of one layer."""

    bytes_read: int  # keys and values that came from the store, as they are stored
    index_bytes: int  # shard indexes and checksums that were read with them
    units_read: int  # units that came from the store
    requests: int  # pieces of files that were read for these: neighbours come together
    host_hits: int  # units that were in host memory
    units: int  # units that were needed
    wait_seconds: float  # the program waited for reads
    host_bytes: int  # of host memory that keeps units
    pages_kept: int = 0  # pages of all layers that were stored after the last token
    not_kept: str | None = None  # why pages of generated tokens were not stored, if they were to be


@dataclasses.dataclass(frozen=True)
class TierStats:
    """What decoding over tiers moved, in pages and bytes.

    A page here is one KV head's of one layer: its keys and values.
    """

    pages_chosen: int  # K, the most that a KV head reads in a step, the open page not counted
    slots: int  # the most of a row, layer and KV head on the device, the open page included
    least_slots: int  # the least of them; as many, but with a window plan
    reads: int  # pages that steps chose
    misses: int  # of these, how many were not near
    bytes_moved: int  # keys and values that were fetched for that
    index_bytes: int  # what pages are chosen by, on the device
    device_bytes: int  # of the slots, and of first pages that a format leaves as they are
    host_bytes: int  # of host memory that has room for every page, or every page not in the store
    store: TierReads | None = None  # where prompts' pages are in a store
    tokens: int | None = None  # in chosen pages, that the model's own indexer chose; None: all
    page_size: int = 0  # tokens a page

    @property
    def amplification(self) -> float | None:
        """Tokens read for one that is attended to; None where no single tokens are chosen."""
        return self.reads * self.page_size / self.tokens if self.tokens else None

    @property
    def hit_ratio(self) -> float | None:
        """The share of chosen pages that were near; None if none was chosen."""
        return 1 - self.misses / self.reads if self.reads else None


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a call did, in tokens, seconds, pages and bytes.

    `ttft_seconds` is from the call to the first token, compilation excluded; a call that runs as
    one program only shows its end, so it is None there. `bytes_per_token` and `cache_bytes` are
    what is stored, `bytes_read_per_step` is what a step must read: pages that layers share are
    stored once and read by each, and a sliding window bounds what is read. It is None where steps
    read codes or selected pages, or a stored prefix was used.
    """

    prompt_tokens: int
    new_tokens: int
    compile_seconds: float
    run_seconds: float  # everything but compilation
    ttft_seconds: float | None
    compilations: int  # programs compiled by this call
    pages_used: int  # pages held at the end
    pages_total: int
    page_size: int
    cache_bytes: dict[str, int]  # the pools as allocated, by dtype
    bytes_per_token: float  # of a full page, over all layers, scales and all; over tiers, as kept
    bytes_read_per_step: int | None  # of the cache, by a step after the last token, all rows
    prefix: PrefixStats | None = None  # where a stored prefix was used
    prefix_unused: str | None = None  # why none was, if stored prefixes were given
    tiers: TierStats | None = None  # where steps read selected pages
    state_bytes: int = 0  # of a sequence, however long, in layers that keep states and no tokens

    @property
    def decode_seconds(self) -> float | None:
        """Seconds after the first token."""
        return None if self.ttft_seconds is None else self.run_seconds - self.ttft_seconds

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second of decoding, or, without a TTFT, of the whole run."""
        if self.decode_seconds is None or self.new_tokens < 2:
            return self.new_tokens / self.run_seconds if self.run_seconds > 0 else 0.0
        return (self.new_tokens - 1) / max(self.decode_seconds, 1e-9)


@dataclasses.dataclass(frozen=True)
class Generation:
    """The answers to a batch of prompts, in the prompts' order."""

    tokens: list[list[int]]  # drawn ids; a final stop token is included
    texts: list[str]  # without that stop token; empty strings if the model has no tokenizer
    finish_reasons: list[FinishReason]  # "error" only in the `generation` of a `RowsFailedError`
    stats: Stats


class RowsFailedError(KvjaxError):
    """Some prompts of a call could not be answered to the end; the others are unharmed.

    Attributes:
      failures: by the prompt's place in the batch, what went wrong.
      generation: of all prompts. What failed has the tokens that were drawn before, and "error" as
        its reason; the others are as they would be without it.
    """

    def __init__(self, failures: Mapping[int, KvjaxError], generation: Generation) -> None:
        first, *more = (failures[row] for row in sorted(failures))
        others = len(generation.tokens) - len(failures)
        also = f" (prompts {_numbers(failures)} failed)" if more else ""
        kept = f"; the other {others} answers are in this error's generation" if others else ""
        super().__init__(f"{first}{also}{kept}")
        self.failures = dict(failures)
        self.generation = generation

    def __reduce__(self) -> tuple[Any, ...]:
        """It is not made of its message."""
        return functools.partial(type(self), self.failures, self.generation), ()


def _numbers(rows: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(rows)))


@dataclasses.dataclass(frozen=True)
class StreamEvent:
    """One drawn token of a stream."""

    token: int
    text: str  # what became printable with it; never half a character
    finish_reason: FinishReason | None  # set on the last event
    stats: Stats | None  # set on the last event


@dataclasses.dataclass(frozen=True)
class Score:
    """How likely a model finds a text."""

    tokens: list[int]
    logprobs: list[float | None]  # natural log p(token | tokens before it); the first has none
    top_tokens: list[int | None]  # the likeliest token at each place; the first has none
    perplexity: float  # exp of the mean negative log-probability
    stats: Stats
