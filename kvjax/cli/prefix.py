"""`kvjax prefix`: prefill a document once and keep its pages."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from kvjax.cli import options, prompt
from kvjax.cli.console import bars, note, size_of
from kvjax.cli.running import open_model
from kvjax.cli.stored import StoreUrl, open_prefixes, prefix_options
from kvjax.config import CacheConfig
from kvjax.decode import PrefixConfig

app = typer.Typer(no_args_is_help=True, help="Keep the pages of a document that is asked about.")


@app.command()
@options.with_options(cache=options.cache_options, config=prefix_options)
def add(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A UTF-8 text.")],
    *,
    chat: Annotated[
        bool, typer.Option("--chat", help="The document opens the user's turn of a chat.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="What the system turn says; needs --chat.")
    ] = None,
    model: options.ModelName = "smollm2-135m",
    dtype: options.DTypeName = "auto",
    store: StoreUrl = None,
    prefill_chunk: options.PrefillChunk = 512,
    cache_dir: options.CacheDir = None,
    as_json: options.AsJson = False,
    cache: CacheConfig,
    config: PrefixConfig,
) -> None:
    """Prefill a document and store its pages; prints the key that --prefix takes.

    Example: kvjax prefix add --chat report.txt
    """
    text = prompt.read_text(file)
    prefixes = open_prefixes(store, cache_dir, config)
    with bars() as progress:
        opened, _ = open_model(model, dtype=dtype, cache_dir=cache_dir, progress=progress)
        before = prompt.around_chat(opened, system)[0] if chat else ""
        info = prefixes.add(
            opened,
            before + text,
            cache=cache,
            label=f"{opened.name}: {file.name}",
            prefill_chunk=prefill_chunk,
            progress=progress.share,
        )
    if as_json:
        found = {"key": info.key, "tokens": info.tokens, "bytes": info.bytes}
        print(json.dumps({**found, "layout": dataclasses.asdict(info.layout)}))
        return
    print(info.key[:12])
    note(
        f"{info.tokens:,} tokens in {size_of(info.bytes)}, sketches {size_of(info.sketch_bytes)}; "
        f"ask with: kvjax generate --prefix {info.key[:12]}{' --chat' if chat else ''} 'QUESTION'"
    )
