"""`kvjax store`: what is in a page store, whether it is whole, and how to remove it."""

import dataclasses
import json
import time
from typing import Annotated, Any

import rich.box
import rich.table
import typer
from rich.console import Console
from rich.text import Text

from kvjax.cli import options
from kvjax.cli.console import note, size_of
from kvjax.cli.stored import ReadTimeout, StoreUrl, open_store
from kvjax.decode import PrefixConfig
from kvjax.storage.page_store import GC_AGE_S
from kvjax.storage.segment import SegmentInfo

app = typer.Typer(
    no_args_is_help=True, help="Look into a store of prefixes, check it, and clean it up."
)

EXIT_DAMAGED = 1
_KEY_SHOWN = 12
_KEY_LISTED = 8

Key = Annotated[str, typer.Argument(metavar="KEY", help="A prefix's key, or its first digits.")]


@app.command("ls")
def list_segments(
    store: StoreUrl = None,
    cache_dir: options.CacheDir = None,
    read_timeout: ReadTimeout = PrefixConfig.timeout_s,
    as_json: options.AsJson = False,
) -> None:
    """List stored prefixes, the most recently used first.

    Keys and labels are cut to fit the terminal; --json has all of them, and how pages are laid out.

    Example: kvjax store ls --json
    """
    infos = open_store(store, cache_dir, read_timeout, read_only=True).segments()
    if as_json:
        print(json.dumps([_as_dict(info) for info in infos]))
        return
    grid = rich.table.Table(box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    encoded = any(info.codec != "none" for info in infos)  # else the label needs the space
    codec = ["codec"] if encoded else []
    for column in ("key", "label", "tokens", "size", *codec, "hits", "written", "used"):
        left = column in ("key", "label", "codec")
        grid.add_column(column, justify="left" if left else "right", no_wrap=column != "label")
    for info in infos:
        grid.add_row(
            info.key[:_KEY_LISTED],
            Text(info.label, no_wrap=True, overflow="ellipsis"),  # alone gives way
            f"{info.tokens:,}",
            size_of(info.bytes),
            *([info.codec] if encoded else []),
            f"{info.hits:,}",
            _ago(info.created),
            _ago(info.last_used),
        )
    Console(highlight=False).print(grid)


@app.command()
def verify(
    key: Annotated[str | None, typer.Argument(metavar="[KEY]", show_default=False)] = None,
    *,
    store: StoreUrl = None,
    cache_dir: options.CacheDir = None,
    read_timeout: ReadTimeout = PrefixConfig.timeout_s,
    as_json: options.AsJson = False,
) -> None:
    """Read one stored prefix, or all, and compare checksums; exit with 1 if one is damaged.

    Example: kvjax store verify
    """
    opened = open_store(store, cache_dir, read_timeout, read_only=True)
    findings = opened.verify(None if key is None else opened.full_key(key))
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings]))
    else:
        for finding in findings:
            print(f"{finding.key[:_KEY_SHOWN]} {finding.part}: {finding.reason}: {finding.detail}")
        note("damaged" if findings else "everything is as it was written")
    if findings:
        raise typer.Exit(EXIT_DAMAGED)


@app.command()
def gc(
    min_age: Annotated[
        float, typer.Option(help="Seconds that unfinished data must be old.")
    ] = GC_AGE_S,
    store: StoreUrl = None,
    cache_dir: options.CacheDir = None,
    read_timeout: ReadTimeout = PrefixConfig.timeout_s,
    as_json: options.AsJson = False,
) -> None:
    """Remove what stopped writers left behind, and manifests that cannot be read.

    Example: kvjax store gc
    """
    freed = open_store(store, cache_dir, read_timeout).gc(min_age_s=min_age)
    if as_json:
        print(json.dumps(dataclasses.asdict(freed)))
        return
    print(f"{freed.segments} removed, {size_of(freed.bytes)} freed")


@app.command()
def rm(
    key: Key,
    *,
    store: StoreUrl = None,
    cache_dir: options.CacheDir = None,
    read_timeout: ReadTimeout = PrefixConfig.timeout_s,
    as_json: options.AsJson = False,
) -> None:
    """Remove a stored prefix.

    Example: kvjax store rm 3f2a91
    """
    opened = open_store(store, cache_dir, read_timeout)
    whole = opened.full_key(key)
    freed = opened.remove(whole)
    print(json.dumps({"key": whole, "bytes": freed}) if as_json else f"{size_of(freed)} freed")


@app.command()
def stats(
    store: StoreUrl = None,
    cache_dir: options.CacheDir = None,
    read_timeout: ReadTimeout = PrefixConfig.timeout_s,
    as_json: options.AsJson = False,
) -> None:
    """Sizes, ages and hits of the whole store.

    Example: kvjax store stats --json
    """
    found = open_store(store, cache_dir, read_timeout, read_only=True).stats()
    if as_json:
        # What this process itself missed and evicted is nothing: it only looks.
        names = ("segments", "bytes", "sketch_bytes", "hits", "oldest", "idle")
        print(json.dumps({name: getattr(found, name) for name in names}))
        return
    rows = [
        ("prefixes", f"{found.segments:,}"),
        ("size", size_of(found.bytes)),
        ("of which sketches", size_of(found.sketch_bytes)),
        ("hits", f"{found.hits:,}"),
        ("oldest", "-" if found.oldest is None else f"{found.oldest / 3600:.1f} h"),
        ("longest unused", "-" if found.idle is None else f"{found.idle / 3600:.1f} h"),
    ]
    grid = rich.table.Table(show_header=False)
    for row in rows:
        grid.add_row(*row)
    Console(highlight=False).print(grid)


def _as_dict(info: SegmentInfo) -> dict[str, Any]:
    fields = dataclasses.asdict(info)
    fields["identity"].pop("numerics")  # long, and in the key
    return fields


def _ago(moment: float) -> str:
    minutes = max(time.time() - moment, 0) / 60
    if minutes < 60:
        return f"{minutes:.0f} min ago"
    return f"{minutes / 60:.0f} h ago" if minutes < 48 * 60 else f"{minutes / 1440:.0f} days ago"
