"""Texts for a conversion: most of each to learn from, its end to judge by."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from kvjax.decode import inputs
from kvjax.decode.text_ids import texts_as_ids
from kvjax.errors import KvjaxError, as_kvjax_error, check_integer
from kvjax.model import Model
from kvjax.models import check_tokens
from kvjax.spec import DEFAULT_PAGE_SIZE

WINDOW_TOKENS = 1024
"""Most tokens that run at once, as a text of their own."""

HELD_OUT = 8
"""One part of so many of every text, its last, is never learnt from."""

HELD_OUT_TOKENS = 8192
"""Most tokens that are judged by, of all texts."""

LEAST_TOKENS = 4 * DEFAULT_PAGE_SIZE
"""Of a text: pages to learn from, and one to judge by."""


@dataclasses.dataclass(frozen=True)
class Texts:
    """Windows of equal length W of a model's tokens."""

    learnt: Int32[np.ndarray, "n W"]
    held_out: Int32[np.ndarray, "m W"]


def split_texts(
    model: Model,
    texts: inputs.PromptLike | Sequence[inputs.PromptLike],
    *,
    window: int = WINDOW_TOKENS,
) -> Texts:
    """Windows to learn from, and others of the last eighth of every text.

    Args:
      model: whose tokenizer to use.
      texts: a text, token ids, or a list of either; each may be longer than the model's context.
      window: most tokens of one.

    Raises:
      KvjaxError: there is no text, it has fewer than four pages of tokens, an id is not in the
        vocabulary, or it is text and the model has no tokenizer.
    """
    check_integer("window", window, 2, ": the first token of one is not predicted")
    learnt: list[int] = []
    held_out: list[int] = []
    for row, ids in enumerate(texts_as_ids(model, texts, None)):
        if len(ids) < LEAST_TOKENS:
            raise KvjaxError(
                f"text {row} has {len(ids)} tokens: at least {LEAST_TOKENS} (four pages) are "
                f"needed to tell what keys and values are like, and thousands to tell it well; "
                f"give a longer text"
            )
        last = max(len(ids) // HELD_OUT, DEFAULT_PAGE_SIZE)
        learnt += ids[:-last]
        held_out += ids[-last:]
    width = min(window, model.config.max_context, len(held_out))
    return Texts(windows_of(learnt, width), windows_of(held_out[:HELD_OUT_TOKENS], width))


def windows_of(ids: list[int], width: int) -> Int32[np.ndarray, "n W"]:
    """Pieces of equal length; what is left at the end is not in them.

    Args:
      ids: of a text.
      width: tokens of a window.
    """
    count = len(ids) // width
    return np.asarray(ids[: count * width], np.int32).reshape(count, width)


def check_windows(model: Model, windows: Int32[np.ndarray, "n W"]) -> None:
    """Refuse windows that nothing can be learnt from.

    Args:
      model: whose vocabulary they are of.
      windows: token ids.

    Raises:
      KvjaxError: there is none, or an id is not in the vocabulary.
    """
    shape = np.shape(windows)
    if len(shape) != 2 or 0 in shape:
        raise KvjaxError(
            f"windows has shape {shape}: must be [n, W], at least one row of at least one token "
            f"id, as split_texts makes them of texts"
        )
    with as_kvjax_error():
        check_tokens(windows, model.config.vocab_size)


def positions_of(tokens: Int32[Array, " T"]) -> Int32[Array, " T"]:
    """0 to T - 1."""
    return jnp.arange(tokens.shape[0], dtype=jnp.int32)
