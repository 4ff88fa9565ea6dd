"""Options of commands that use a store of prefixes."""

import dataclasses
import re
from pathlib import Path
from typing import Annotated

import typer

from kvjax.cli import prompt
from kvjax.cli.console import note, size_of
from kvjax.config import CacheConfig
from kvjax.decode import PrefixCache, PrefixConfig
from kvjax.errors import KvjaxError
from kvjax.model import Model
from kvjax.registry import cache_root
from kvjax.storage.page_store import PageStore

PANEL = "Stored prefixes"

HOST_BUDGET = f"{PrefixConfig.host_bytes >> 20}MiB"

CHAT = ", chat"
"""How the label of a document ends that opens a chat's first turn."""

_BYTES = re.compile(
    r"\s*(?P<amount>\d{1,15}(\.\d+)?)\s*(?P<step>[kmgt]?)(?P<binary>(?<=[kmgt])i)?b\s*",
    re.IGNORECASE | re.ASCII,
)

StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="The page store: a folder, or a URL such as s3://BUCKET/FOLDER/.",
        rich_help_panel=PANEL,
        show_default="in the cache folder",
    ),
]

Codec = Annotated[
    str,
    typer.Option(
        help="How pages that are written are encoded, without loss: none, zstd, blosc or splitzip.",
        rich_help_panel=PANEL,
    ),
]

ReadTimeout = Annotated[
    float,
    typer.Option(
        help="Seconds that one read, or another answer of the store, may take.",
        rich_help_panel=PANEL,
    ),
]


def store_url(store: str | None, cache_dir: Path | None) -> str:
    """The store that a command means.

    Args:
      store: what `--store` said.
      cache_dir: what `--cache-dir` said.
    """
    return store if store is not None else str(cache_root(cache_dir) / "prefixes")


def prefix_options(
    budget: Annotated[
        str,
        typer.Option(
            help="Most of a stored prefix that is attended to: '5%', '64 pages', '1024 tokens', "
            "'8MB'; at least its first and last page. Below 100% the answer is an approximation.",
            rich_help_panel=PANEL,
        ),
    ] = PrefixConfig.budget,
    select_by: Annotated[
        str,
        typer.Option(
            help="What pages are chosen by: low-bit, mean, quest, keys, h2o, impress, or all for "
            "every page.",
            rich_help_panel=PANEL,
        ),
    ] = PrefixConfig.by,
    select_bits: Annotated[
        int, typer.Option(help="Bits of low-bit keys: 2, 3 or 4.", rich_help_panel=PANEL)
    ] = PrefixConfig.bits,
    clip: Annotated[
        float,
        typer.Option(
            help="Share of a channel's range that low-bit keys cover, above 0 and at most 1.",
            rich_help_panel=PANEL,
        ),
    ] = PrefixConfig.clip,
    select_who: Annotated[
        str,
        typer.Option(
            help="Who chooses: every KV head, every layer, or a period's first layer (head, layer, "
            "period).",
            rich_help_panel=PANEL,
        ),
    ] = PrefixConfig.who,
    pooling: Annotated[
        float,
        typer.Option(
            help="Share of a neighbour's attention that a page is chosen by if its own is less.",
            rich_help_panel=PANEL,
        ),
    ] = PrefixConfig.pooling,
    period: Annotated[
        int,
        typer.Option(
            help="Layers whose pages are read ahead by the first one's choice.",
            rich_help_panel=PANEL,
        ),
    ] = PrefixConfig.period,
    reorder: Annotated[
        bool,
        typer.Option(
            "--reorder",
            help="Count the tokens that are chosen by impress or h2o, and after the answer write "
            "the prefix once more with those together that are chosen most.",
            rich_help_panel=PANEL,
        ),
    ] = PrefixConfig.reorder,
    prefetch: Annotated[
        bool, typer.Option(help="Read pages ahead on a guess.", rich_help_panel=PANEL)
    ] = PrefixConfig.prefetch,
    load_policy: Annotated[
        str,
        typer.Option(
            help="load, recompute, or auto: whichever is estimated to be faster.",
            rich_help_panel=PANEL,
        ),
    ] = PrefixConfig.load_policy,
    on_read_failure: Annotated[
        str, typer.Option(help="recompute or fail.", rich_help_panel=PANEL)
    ] = PrefixConfig.on_read_failure,
    read_timeout: ReadTimeout = PrefixConfig.timeout_s,
    host_budget: Annotated[
        str,
        typer.Option(help="Host memory for stored pages, such as 256MB.", rich_help_panel=PANEL),
    ] = HOST_BUDGET,
    device_budget: Annotated[
        str,
        typer.Option(
            help="Device memory for stored pages, such as 64MB, or 0; with --select, for pages "
            "that stay near, and 0 is what the window says.",
            rich_help_panel=PANEL,
        ),
    ] = "0",
    placement: Annotated[
        str,
        typer.Option(
            help="Which pages stay in memory: attention, impress, lru or lfu.",
            rich_help_panel=PANEL,
        ),
    ] = PrefixConfig.placement,
) -> PrefixConfig:
    """How stored prefixes are used; every command that runs a model with them takes these."""
    return PrefixConfig(
        budget=budget,
        by=select_by,  # type: ignore[arg-type]  # any text comes in, PrefixConfig refuses
        bits=select_bits,
        clip=clip,
        who=select_who,  # type: ignore[arg-type]
        pooling=pooling,
        period=period,
        reorder=reorder,
        prefetch=prefetch,
        load_policy=load_policy,  # type: ignore[arg-type]
        on_read_failure=on_read_failure,  # type: ignore[arg-type]
        host_bytes=_budget("--host-budget", host_budget),
        device_bytes=_budget("--device-budget", device_budget),
        placement=placement,  # type: ignore[arg-type]
        timeout_s=read_timeout,
    )


def check_unused(config: PrefixConfig) -> None:
    """Refuse options of stored prefixes where neither these nor selected pages are in use.

    Args:
      config: what the options said.

    Raises:
      KvjaxError: one of them is not what it is by default.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default:
            raise KvjaxError(
                f"{field.name} is {value!r}, which is of stored prefixes and selected pages: give "
                f"--prefix, --store or --select too, or leave it out"
            )


def open_prefixes(
    store: str | None, cache_dir: Path | None, config: PrefixConfig, max_bytes: str | None = None
) -> PrefixCache:
    """The prefixes of the store that a command means.

    Args:
      store: what `--store` said.
      cache_dir: what `--cache-dir` said.
      config: how they are used.
      max_bytes: what `--max-bytes` said.

    Raises:
      KvjaxError: max_bytes is no number of bytes.
    """
    most = None if max_bytes is None else bytes_of(max_bytes)
    return PrefixCache(store_url(store, cache_dir), config=config, max_bytes=most)


def open_store(
    store: str | None, cache_dir: Path | None, read_timeout: float, *, read_only: bool = False
) -> PageStore:
    """The store that a command means, to look after it.

    Args:
      store: what `--store` said.
      cache_dir: what `--cache-dir` said.
      read_timeout: what `--read-timeout` said.
      read_only: whether the command only looks.

    Raises:
      KvjaxError: read_timeout is no time.
      NotAStoreError: there is no store, or something else.
    """
    timeout_s = PrefixConfig(timeout_s=read_timeout).timeout_s  # refuses what is no time
    return PageStore.open(store_url(store, cache_dir), read_only=read_only, timeout_s=timeout_s)


def finish(prefixes: PrefixCache) -> None:
    """Do what is left after an answer: pack what was chosen, if asked to; write use counts.

    Raises:
      SegmentError: a prefix cannot be opened.
      UnitError: it cannot be read.
      StoreError: the store cannot be written.
    """
    if prefixes.config.reorder:
        for info in prefixes.reorder():
            note(f"reordered: {info.tokens:,} tokens in {size_of(info.bytes)}, {info.key[:12]}")
    prefixes.store.flush()  # or this use may not be counted: the process ends here


def _budget(option: str, text: str) -> int:
    return 0 if text.strip() == "0" else bytes_of(text, option)


def bytes_of(text: str, what: str = "max_bytes") -> int:
    """The bytes that a text such as "2GB" means.

    >>> bytes_of("1.5 MiB"), bytes_of("2GB")
    (1572864, 2000000000)

    Raises:
      KvjaxError: it means no number of bytes from 1 up.
    """
    found = _BYTES.fullmatch(text)
    size = 0
    if found is not None:
        step = 1024 if found["binary"] else 1000
        size = int(float(found["amount"]) * step ** " kmgt".index(found["step"].lower() or " "))
    if size < 1:
        raise KvjaxError(f"{what} is {text!r}: must be an amount and a unit, such as '2GB'")
    return size


def after_prefix(
    model: Model, prefixes: PrefixCache, key: str, text: str, *, chat: bool, cache: CacheConfig
) -> list[int]:
    """The tokens of a stored document, and then of a text about it.

    Args:
      model: whose tokenizer to use.
      prefixes: where the document is.
      key: its key, or the first digits.
      text: what follows, after a blank line.
      chat: whether the document was stored as the beginning of a chat's first turn.
      cache: of the call.

    Raises:
      UnknownKeyError: no stored document has such a key, or several have.
      KvjaxError: the model cannot tokenize or has no chat template, or the document was stored
        otherwise.
    """
    if model.tokenizer is None:
        raise KvjaxError(f"{model.name} came without a tokenizer: it cannot be asked in words")
    info = prefixes.info(key)
    if chat != info.label.endswith(CHAT):
        as_stored = "without --chat" if chat else "with --chat"
        raise KvjaxError(f"prefix {info.key[:12]} was stored {as_stored}: ask about it so too")
    after = prompt.around_chat(model, None)[1] if chat else ""
    ids = model.tokenizer.encode(f"\n\n{text}{after}", add_bos=False)
    return [*prefixes.tokens(model, key, cache=cache), *ids]
