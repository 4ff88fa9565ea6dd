"""Texts to measure or learn from, as token ids."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.decode import inputs
from kvjax.errors import KvjaxError, as_kvjax_error
from kvjax.model import Model


def texts_as_ids(
    model: Model, texts: inputs.PromptLike | Sequence[inputs.PromptLike], most: int | None
) -> list[list[int]]:
    """The ids of each text, which may be longer than the model's context.

    Args:
      model: whose tokenizer and vocabulary to use.
      texts: one text or several, as texts or token ids.
      most: tokens of a text that are used, so that no more of it need be read; None is all.

    Raises:
      KvjaxError: as `inputs.token_ids` does.
    """
    if len(texts) == 0:
        raise KvjaxError("texts is empty: give a text, token ids, or a list of either")
    one = isinstance(texts, str) or (not isinstance(texts[0], str) and np.ndim(texts[0]) == 0)
    several: Sequence[Any] = [texts] if one else texts  # type: ignore[assignment]
    rows = []
    for row, text in enumerate(several):
        if isinstance(text, str) and isinstance(model, Model) and model.tokenizer is not None:
            length = None if most is None else most * model.tokenizer.longest_token
            with as_kvjax_error():
                text = model.tokenizer.encode(text[:length])
        rows.append(inputs.token_ids(model, text, f"text {row}"))
    return rows
