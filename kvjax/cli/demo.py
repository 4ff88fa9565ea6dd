"""`kvjax demo`: a real model answers a question about a real document through a paged cache."""

import importlib.resources
import json

from kvjax import registry
from kvjax.cli import options
from kvjax.cli.console import bars, note, size_of
from kvjax.cli.generate import run
from kvjax.cli.prompt import as_chat
from kvjax.cli.pull import fetch
from kvjax.cli.running import open_model, show_stats, stats_as_json
from kvjax.config import CacheConfig
from kvjax.model import Model

MODEL = "smollm2-135m"
DOCUMENT = "state_of_the_union_1790.txt"
QUESTION = "How large was the loan completed in Holland?"
MOST_NEW_TOKENS = 48


@options.with_options(cache=options.cache_options)
def demo(
    dtype: options.DTypeName = "auto",
    prefill_chunk: options.PrefillChunk = 512,
    cache_dir: options.CacheDir = None,
    as_json: options.AsJson = False,
    verbose: options.Verbose = False,
    *,
    cache: CacheConfig,
) -> None:
    """Let a small real model answer a question about a real document.

    Fetches SmolLM2-135M (93 MB, Apache-2.0) the first time.

    Example: kvjax demo --page-size 32
    """
    if not registry.model_path(MODEL, cache_dir).exists():
        fetch(MODEL, cache_dir)
    if not as_json:
        note(f"document: {DOCUMENT}, question: {QUESTION}", "bold")
    with bars() as progress:
        model, load_seconds = open_model(MODEL, dtype=dtype, cache_dir=cache_dir, progress=progress)
        result, stats = run(
            model,
            question_text(model),
            progress,
            show=not as_json,
            max_new_tokens=MOST_NEW_TOKENS,
            cache=cache,
            prefill_chunk=prefill_chunk,
        )
    if as_json:
        found = {"document": DOCUMENT, "question": QUESTION, **result}
        print(json.dumps({**found, "stats": stats_as_json(stats, load_seconds)}))
        return
    show_stats(model, stats, load_seconds, verbose=verbose)
    note(
        f"The model read the document once and left {size_of(model.spec.bytes_per_token)} of keys "
        f"and values a token in pages of {stats.page_size} tokens;\n"
        f"to write its {stats.new_tokens} tokens it read those pages, through a block table, and "
        "not the document again."
    )


def question_text(model: Model) -> str:
    """The document and the question about it, as the model was trained to be asked."""
    document = importlib.resources.files("kvjax").joinpath("data", DOCUMENT).read_text("utf-8")
    return as_chat(model, f"{document.strip()}\n\nQuestion: {QUESTION}", system=None)
