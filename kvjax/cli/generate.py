"""`kvjax generate`: continue a text, or answer a question about one."""

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from kvjax import decode
from kvjax.cli import options, prompt, stored, tiers
from kvjax.cli.console import Bars, bars
from kvjax.cli.running import open_model, show_stats, stats_as_json
from kvjax.config import CacheConfig
from kvjax.decode import Calibration, PrefixConfig, Sampling, Stats
from kvjax.errors import KvjaxError
from kvjax.model import Model


@options.with_options(
    sampling=options.sampling_options,
    cache=options.cache_options,
    config=stored.prefix_options,
    selected=tiers.tier_options,
)
def generate(
    text: Annotated[str | None, typer.Argument(metavar="PROMPT", show_default=False)] = None,
    *,
    file: prompt.FromFile = None,
    stdin: prompt.FromStdin = False,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Use the model's chat template; control tokens spelled in the text count as such.",
        ),
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="What the system turn says; needs --chat.")
    ] = None,
    model: options.ModelName = "smollm2-135m",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n")] = 64,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="A token that ends the answer, as its text or its id; may be repeated."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            rich_help_panel="Sampling", help="Of the draws; needs --temperature.", show_default="0"
        ),
    ] = None,
    dtype: options.DTypeName = "auto",
    prefill_chunk: options.PrefillChunk = 512,
    stream: Annotated[
        bool,
        typer.Option(
            help="Draw and write token by token, which shows the time to the first, or run prefill "
            "and decode as one program."
        ),
    ] = True,
    prefix: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="Ask about a stored document: the key that `kvjax prefix add` printed.",
            rich_help_panel=stored.PANEL,
        ),
    ] = None,
    store: stored.StoreUrl = None,
    cache_dir: options.CacheDir = None,
    as_json: options.AsJson = False,
    verbose: options.Verbose = False,
    sampling: Sampling,
    cache: CacheConfig,
    config: PrefixConfig,
    selected: tiers.TierOptions,
) -> None:
    """Continue a text, or answer a question about one.

    The text goes to stdout, progress and the closing table go to stderr.

    With --prefix, or where --store holds the prompt's beginning, that is not computed anew: a
    budget's worth of its pages is read. With --select, every step reads the pages that it needs
    most; the others stay in host memory, or in --store.

    Example: kvjax generate --chat --file report.txt "What was the profit in 2019?"
    Example: kvjax generate --prefix KEY --budget 25% "What was the profit in 2019?"
    Example: kvjax generate --select low-bit --device-budget 64MB --file report.txt "In short:"
    Example: kvjax generate --select quest --aggregate query --file report.txt "In short:"
    """
    if system is not None and not chat:
        raise KvjaxError("--system needs --chat: a plain text has no system turn")
    if system is not None and prefix is not None:
        raise KvjaxError("--system is of no use with --prefix: the stored document has its own")
    if seed is not None and sampling.temperature == 0:
        raise KvjaxError(
            f"--seed is {seed} and --temperature 0, which takes the likeliest token and draws "
            f"nothing: give a temperature, such as 1, or leave out --seed"
        )
    if prefix is not None and selected.select is not None:
        raise KvjaxError(
            "--prefix and --select: a stored document's pages are chosen once, before the first "
            "token; leave out one of them"
        )
    if selected.select is None and prefix is None and store is None:
        stored.check_unused(config)
    cache = tiers.with_tiers(cache, selected, config, store=store)
    content = prompt.gather(text, file, stdin)
    with bars() as progress:
        opened, load_seconds = open_model(
            model, dtype=dtype, cache_dir=cache_dir, progress=progress
        )
        if selected.calibration is not None:
            cache = Calibration.load(selected.calibration, model=opened).apply(cache)
        prefixes = None
        if selected.select is None and (prefix is not None or store is not None):
            prefixes = stored.open_prefixes(store, cache_dir, config)
        asked: str | list[int] = prompt.as_chat(opened, content, system) if chat else content
        if prefixes is not None and prefix is not None:
            asked = stored.after_prefix(opened, prefixes, prefix, content, chat=chat, cache=cache)
        result, stats = run(
            opened,
            asked,
            progress,
            stream=stream,
            show=not as_json,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            key=seed,
            stop_tokens=prompt.stop_ids(opened, stop or []),
            cache=cache,
            prefill_chunk=prefill_chunk,
            prefixes=prefixes,
        )
    if prefixes is not None:
        stored.finish(prefixes)
    if as_json:
        print(json.dumps({**result, "stats": stats_as_json(stats, load_seconds)}))
    else:
        if not stream:
            print(result["text"])
        show_stats(opened, stats, load_seconds, verbose=verbose)


def run(
    model: Model,
    text: str | Sequence[int],
    progress: Bars,
    *,
    stream: bool = True,
    show: bool = True,
    **arguments: Any,
) -> tuple[dict[str, Any], Stats]:
    """Generates; when streaming, may write the text to stdout as it comes.

    Args:
      model: what to run.
      text: the prompt.
      progress: stopped before the first token is written.
      stream: whether to draw token by token, or all in one program.
      show: whether to write what is streamed.
      arguments: those of `kvjax.decode.generate`.

    Returns:
      The text, its tokens and why it ended; and the statistics.
    """
    if not stream:
        result = decode.generate(model, text, progress=progress.share, **arguments)
        return {
            "text": result.texts[0],
            "tokens": result.tokens[0],
            "finish_reason": result.finish_reasons[0],
        }, result.stats
    tokens, pieces = [], []
    finish_reason = stats = None
    for event in decode.stream(model, text, progress=progress.share, **arguments):
        tokens.append(event.token)
        pieces.append(event.text)
        if show:
            progress.stop()
            sys.stdout.write(event.text)
            sys.stdout.flush()
        finish_reason, stats = event.finish_reason, event.stats
    if show:
        sys.stdout.write("\n")
    assert stats is not None  # every stream ends with them
    return {"text": "".join(pieces), "tokens": tokens, "finish_reason": finish_reason}, stats
