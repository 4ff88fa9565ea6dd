"""`kvjax score`: how probable a model finds a text, token by token."""

import json
from pathlib import Path
from typing import Annotated

import typer

from kvjax import decode
from kvjax.cli import options, prompt
from kvjax.cli.console import bars
from kvjax.cli.running import open_model, show_stats, stats_as_json
from kvjax.config import CacheConfig
from kvjax.decode import Score
from kvjax.errors import KvjaxError
from kvjax.model import Model

MOST_SHOWN = 40
"""Tokens that are shown one by one; of a longer text, the most surprising ones."""


@options.with_options(cache=options.cache_options)
def score(
    text: Annotated[str | None, typer.Argument(metavar="TEXT", show_default=False)] = None,
    *,
    file: prompt.FromFile = None,
    stdin: prompt.FromStdin = False,
    tokens: Annotated[
        Path | None,
        typer.Option(
            help="A JSON file with a list of token ids, in a text's place; --json shows a text's."
        ),
    ] = None,
    model: options.ModelName = "smollm2-135m",
    dtype: options.DTypeName = "auto",
    prefill_chunk: options.PrefillChunk = 512,
    cache_dir: options.CacheDir = None,
    as_json: options.AsJson = False,
    verbose: options.Verbose = False,
    cache: CacheConfig,
) -> None:
    """Log-probability of every token of a text (natural logarithm), and the perplexity.

    Whatever the cache options approximate shows here.

    Example: kvjax score --json --file chapter.txt --page-size 32
    """
    if tokens is None:
        content: str | list[int] = prompt.gather(text, file, stdin)
    elif text is not None or file is not None or stdin:
        raise KvjaxError("--tokens stands in a text's place: give one of them")
    else:
        content = prompt.read_tokens(tokens)
    with bars() as progress:
        opened, load_seconds = open_model(
            model, dtype=dtype, cache_dir=cache_dir, progress=progress
        )
        result = decode.score(
            opened, content, cache=cache, prefill_chunk=prefill_chunk, progress=progress.share
        )
    if as_json:
        found = {
            "logprobs": result.logprobs,
            "tokens": result.tokens,
            "top_tokens": result.top_tokens,
            "perplexity": result.perplexity,
            "stats": stats_as_json(result.stats, load_seconds),
        }
        print(json.dumps(found))
        return
    _show(opened, result)
    show_stats(opened, result.stats, load_seconds, verbose=verbose)


def _show(model: Model, result: Score) -> None:
    tokenizer = model.tokenizer
    rows = list(zip(range(len(result.tokens)), result.tokens, result.logprobs, strict=True))[1:]
    if len(rows) > MOST_SHOWN:
        rows = sorted(sorted(rows, key=lambda row: row[2] or 0.0)[:MOST_SHOWN])
        print(f"the {MOST_SHOWN} most surprising of {len(result.tokens):,} tokens:")
    for index, token, logprob in rows:
        piece = "" if tokenizer is None else repr(tokenizer.decode([token], skip_special=False))
        print(f"{index:>7} {token:>7} {logprob:>9.4f}  {piece}")
    print(f"perplexity {result.perplexity:.4f}")
