"""`kvjax prefix`: prefill a document once and keep its pages."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvjax.cli import options, prompt
from kvjax.cli.console import bars, note, size_of
from kvjax.cli.running import open_model
from kvjax.cli.stored import CHAT, PANEL, Codec, StoreUrl, open_prefixes, prefix_options
from kvjax.config import CacheConfig
from kvjax.decode import PrefixConfig
from kvjax.decode.inputs import token_ids

MODEL = "smollm2-135m"

app = typer.Typer(no_args_is_help=True, help="Keep the pages of a document that is asked about.")


@app.command()
@options.with_options(cache=options.cache_options, config=prefix_options)
def add(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A UTF-8 text, or - for standard input.")
    ],
    *,
    chat: Annotated[
        bool, typer.Option("--chat", help="The document opens the user's turn of a chat.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="What the system turn says; needs --chat.")
    ] = None,
    model: options.ModelName = MODEL,
    dtype: options.DTypeName = "auto",
    store: StoreUrl = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            help="Most that the store may hold, as 2GB; the least recently used prefixes give way.",
            rich_help_panel=PANEL,
            show_default="no limit",
        ),
    ] = None,
    codec: Codec = PrefixConfig.codec,
    replace_shorter: Annotated[
        bool,
        typer.Option(
            "--replace-shorter",
            help="Remove the stored documents that this one begins with; their keys are gone.",
            rich_help_panel=PANEL,
        ),
    ] = False,
    prefill_chunk: options.PrefillChunk = 512,
    cache_dir: options.CacheDir = None,
    as_json: options.AsJson = False,
    cache: CacheConfig,
    config: PrefixConfig,
) -> None:
    """Prefill a document and store its pages; prints the key that --prefix takes.

    With --format, its pages are stored as that format's codes, for calls in the same format that
    go on with the whole document.

    Example: kvjax prefix add --chat report.txt
    Example: kvjax prefix add --format int4 report.txt
    """
    text = prompt.gather(None, None, True) if str(file) == "-" else prompt.read_text(file)
    text = text.strip()  # as `generate --file` does: the same tokens either way
    config = dataclasses.replace(config, codec=codec)  # type: ignore[arg-type]  # it refuses
    prefixes = open_prefixes(store, cache_dir, config, max_bytes)
    began = time.time()
    with bars() as progress:
        opened, _ = open_model(model, dtype=dtype, cache_dir=cache_dir, progress=progress)
        before = prompt.around_chat(opened, system)[0] if chat else ""
        ids = token_ids(opened, before + text)
        info = prefixes.add(
            opened,
            ids,
            cache=cache,
            label=f"{file.name} for {opened.name}{CHAT if chat else ''}",
            prefill_chunk=prefill_chunk,
            progress=progress.share,
        )
        replaced = prefixes.remove_shorter(info.key) if replace_shorter else []
    if as_json:
        found: dict[str, Any] = {"key": info.key, "tokens": info.tokens, "bytes": info.bytes}
        found["codec"] = info.codec
        found["replaced"] = [shorter.key for shorter in replaced]
        print(json.dumps({**found, "layout": dataclasses.asdict(info.layout)}))
        return
    print(info.key[:12])
    note(
        f"{'stored' if info.created >= began else 'already there'}: {info.tokens:,} tokens in "
        f"{size_of(info.bytes)}, of which {size_of(info.sketch_bytes)} to choose pages by"
        f"{'' if info.codec == 'none' else f'; pages encoded by {info.codec}'}"
    )
    for shorter in replaced:
        note(f"replaced: {shorter.key[:12]}, {shorter.label}, {shorter.tokens:,} tokens")
    asking = {"--store": store, "--model": model, "--dtype": dtype, "--page-size": cache.page_size}
    usual = {"--store": None, "--model": MODEL, "--dtype": "auto", "--page-size": 16}
    said = [f"{name} {value}" for name, value in asking.items() if value != usual[name]]
    said += [f"--cache-dtype {cache.dtype}"] * (cache.dtype is not None)
    said += [options.format_flags(cache)] * (cache.format is not None)
    said += [f"--cache-dir {cache_dir}"] * (cache_dir is not None) + ["--chat"] * chat
    note(f"ask with: kvjax generate --prefix {' '.join([info.key[:12], *said])} 'QUESTION'")
