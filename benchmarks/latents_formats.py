"""What a format costs a model that keeps keys and values, or latents: bytes, KL, perplexity."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks import report
from benchmarks.formats_measure import read_document
from benchmarks.report import Row
from kvjax.config import CacheConfig
from kvjax.convert import Judgement, judged
from kvjax.decode import inputs
from kvjax.decode.calls import cache_spec
from kvjax.decode.program import compiled
from kvjax.decode.shapes import plan
from kvjax.model import Model, kv_spec

FORMATS = ("int8", "int4")

KEYS_AND_VALUES = "keys and values"


@dataclasses.dataclass(frozen=True)
class InFormat:
    """A model whose pages are stored in a format."""

    stored: str  # what pages hold
    name: str  # of the format
    bytes: float  # of a token, scales and all
    share: float  # of the bytes of the original's keys and values in bfloat16
    judged: Judgement  # against the original
    other: Judgement  # on the text of another kind
    added: float  # KL from the same model without a format


def in_formats(
    original: Model,
    model: Model,
    stored: str,
    windows: np.ndarray,
    other: np.ndarray,
    say: Callable[[str], None],
) -> tuple[InFormat, ...]:
    """Read windows through pages of each format, as `kvjax.score` does, and judge what comes.

    Args:
      original: the yardstick.
      model: what it was made into, or itself.
      stored: what the model's pages hold, for people.
      windows: token ids [n, W], texts of their own.
      other: windows of another kind of text.
      say: told what is being done.
    """
    plain = kv_spec(original.config, "bfloat16").bytes_per_token
    found = []
    for name in FORMATS:
        say(f"{stored} in {name}")
        cache = CacheConfig(format=name)
        page_format, spec = cache.page_format, cache_spec(model, cache)
        assert page_format is not None
        states = states_through(model, windows, cache)
        size = page_format.bytes_per_token(spec, cache.page_size)
        found.append(
            InFormat(
                stored,
                name,
                size,
                size / plain,
                judged(original, model, windows, other_states=states),
                judged(original, model, other, other_states=states_through(model, other, cache)),
                judged(model, model, windows, other_states=states).kl,
            )
        )
    return tuple(found)


def states_through(model: Model, windows: np.ndarray, cache: CacheConfig) -> np.ndarray:
    """A model's last hidden states [n, W, d], read through a cache in chunks.

    Args:
      model: what runs.
      windows: token ids [n, W], texts of their own.
      cache: the configuration.
    """
    rows = []
    for window in windows:
        ids = [int(token) for token in window]
        shapes = plan(
            model.config,
            cache_spec(model, cache),
            [len(ids)],
            new_tokens=0,
            prefill_chunk=512,
            cache=cache,
        )
        given = model.params, inputs.flat_prompts([ids], shapes)
        program, _ = compiled(read_document, (model.graphdef, shapes), *given)
        state, hidden = program(*given)
        state.reservation.check(state.cache)
        rows.append(np.asarray(hidden[: len(ids)]))
    return np.stack(rows)


def rows_of(found: Sequence[InFormat]) -> list[Row]:
    """Bytes, perplexity and KL, a few rows a model and format."""
    rows = []
    for one in found:
        claim = f"{one.stored}, in {one.name}"
        rows.append(
            Row(
                claim=claim,
                metric="stored of a token",
                unit="bytes",
                ours=one.bytes,
                baseline="keys and values in bfloat16",
                baseline_value=one.bytes / one.share,
            )
        )
        for metric, judgement in (("perplexity", one.judged), ("perplexity of 1790", one.other)):
            rows.append(
                Row(
                    claim=claim,
                    metric=metric,
                    unit="",
                    ours=judgement.perplexity,
                    baseline="the original",
                    baseline_value=judgement.original_perplexity,
                )
            )
        rows.append(Row(claim=claim, metric="KL", unit="nats", ours=one.judged.kl))
        rows.append(Row(claim=claim, metric="KL of the format alone", unit="nats", ours=one.added))
    return rows


def table(found: Sequence[InFormat]) -> str:
    """A Markdown table, a line a model and format."""
    headings = (
        "stored", "format", "bytes a token", "of bf16 keys and values", "KL", "of the format",
        "perplexity", "of 1790",
    )  # fmt: skip
    lines = [
        (
            one.stored,
            one.name,
            f"{one.bytes:,.0f}",
            f"{one.share:.1%}",
            f"{one.judged.kl:.4f}",
            f"{one.added:.4f}",
            f"{one.judged.ratio - 1:+.1%}",
            f"{one.other.ratio - 1:+.1%}",
        )
        for one in found
    ]
    return report.markdown_table(headings, lines)
