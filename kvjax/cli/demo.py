"""`kvjax demo`: a real model answers a question about a real document through a paged cache."""

import dataclasses
import importlib.resources
import json
from typing import Any

from kvjax import registry
from kvjax.cli import options, stored
from kvjax.cli.console import bars, note, size_of
from kvjax.cli.generate import run
from kvjax.cli.prompt import around_chat
from kvjax.cli.pull import fetch
from kvjax.cli.running import open_model, show_stats, stats_as_json
from kvjax.config import CacheConfig
from kvjax.decode import PrefixConfig
from kvjax.model import Model

MODEL = "smollm2-135m"
DOCUMENT = "state_of_the_union_1790.txt"
QUESTION = "How large was the loan completed in Holland?"
MOST_NEW_TOKENS = 48


@options.with_options(cache=options.cache_options, config=stored.prefix_options)
def demo(
    dtype: options.DTypeName = "auto",
    prefill_chunk: options.PrefillChunk = 512,
    store: stored.StoreUrl = None,
    cache_dir: options.CacheDir = None,
    as_json: options.AsJson = False,
    verbose: options.Verbose = False,
    *,
    cache: CacheConfig,
    config: PrefixConfig,
) -> None:
    """Let a small real model answer a question about a real document, twice.

    First it reads the document. Its pages are stored, and asked again it reads a few of them from
    disk instead. Fetches SmolLM2-135M (93 MB, Apache-2.0) the first time.

    Example: kvjax demo --budget 25%
    """
    if not registry.model_path(MODEL, cache_dir).exists():
        fetch(MODEL, cache_dir)
    if not as_json:
        note(f"document: {DOCUMENT}, question: {QUESTION}", "bold")
    if config.load_policy == "auto":  # it is here to be seen
        config = dataclasses.replace(config, load_policy="load")
    with bars() as progress:
        model, load_seconds = open_model(MODEL, dtype=dtype, cache_dir=cache_dir, progress=progress)
        before, after = document_and_question(model)
        prompt = [*tokens_of(model, before), *tokens_of(model, after)]
        options_of_both: dict[str, Any] = {
            "show": not as_json,
            "max_new_tokens": MOST_NEW_TOKENS,
            "cache": cache,
            "prefill_chunk": prefill_chunk,
        }
        cold, cold_stats = run(model, prompt, progress, **options_of_both)
    if not as_json:
        show_stats(model, cold_stats, load_seconds, verbose=verbose)
        note("Its pages are stored now; the same question again:", "bold")
    with bars() as progress:
        prefixes = stored.open_prefixes(store, cache_dir, config)
        prefixes.add(
            model,
            tokens_of(model, before),
            cache=cache,
            label=f"{DOCUMENT} for {model.name}{stored.CHAT}",
            prefill_chunk=prefill_chunk,
            progress=progress.share,
        )
        warm, warm_stats = run(model, prompt, progress, prefixes=prefixes, **options_of_both)
    stored.finish(prefixes)
    if as_json:
        runs = {
            "cold": {**cold, "stats": stats_as_json(cold_stats, load_seconds)},
            "warm": {**warm, "stats": stats_as_json(warm_stats, load_seconds)},
        }
        print(json.dumps({"document": DOCUMENT, "question": QUESTION, **runs}))
        return
    show_stats(model, warm_stats, load_seconds, verbose=verbose)
    stored_bytes = model.spec.bytes_per_token * len(tokens_of(model, before))
    if warm_stats.prefix is not None:
        prefix = warm_stats.prefix
        note(
            f"The document's keys and values take {size_of(stored_bytes)}. For the second answer "
            f"{prefix.pages_chosen:,} of its {prefix.pages:,} pages were chosen in every layer, "
            f"and {size_of(prefix.bytes_read)} read."
        )


def document_and_question(model: Model) -> tuple[str, str]:
    """The document, and then the question about it, as the model was trained to be asked."""
    document = importlib.resources.files("kvjax").joinpath("data", DOCUMENT).read_text("utf-8")
    before, after = around_chat(model, system=None)
    return f"{before}{document.strip()}", f"\n\nQuestion: {QUESTION}{after}"


def tokens_of(model: Model, text: str) -> list[int]:
    """A text's tokens; both parts of the prompt are tokenized on their own."""
    assert model.tokenizer is not None  # this model has one
    return model.tokenizer.encode(text, add_bos=False)
