"""Measures what a model's keys and values are like on a text, for formats that need to know."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from kvjax.decode import inputs
from kvjax.decode.calls import Progress
from kvjax.decode.captured import Captured, captured, first_keys
from kvjax.decode.format_losses import layer_losses
from kvjax.decode.identity import fingerprint
from kvjax.decode.program import compiled
from kvjax.decode.text_ids import texts_as_ids
from kvjax.errors import KvjaxError, check_integer
from kvjax.formats.calibration import FormatCalibration
from kvjax.formats.statistics import layer_calibration
from kvjax.model import Model, check_own_keys
from kvjax.models.rope import frequencies
from kvjax.spec import DEFAULT_PAGE_SIZE

PART_TOKENS = 512
"""Most tokens that run at once, as a text of their own: the backward pass keeps all of them."""


LEAST_TOKENS = 3 * DEFAULT_PAGE_SIZE
"""Of a text: a first page, which stays as it is, one that is encoded, and one that is read."""

FIRST_TOKENS = 256
"""Tokens that are tried as the first of a text."""


def calibrate_formats(
    model: Model,
    texts: inputs.PromptLike | Sequence[inputs.PromptLike],
    *,
    tokens: int = 4096,
    progress: Progress | None = None,
) -> FormatCalibration:
    """Measure ranges and levels of every layer's keys and values; takes minutes.

    Texts run in parts of at most 512 tokens, forwards and back: what an error of an element costs
    is told by the loss's gradient. What bits of a layer cost is measured on one or two longer ones.

    Args:
      model: that will run.
      texts: like those that will come, as texts or token ids.
      tokens: most that are measured, the first ones of every text in equal shares.
      progress: called with "calibrate" and how much of it is done.

    Returns:
      What formats are made of: see `FormatCalibration.format`.

    Raises:
      KvjaxError: a text is shorter than three pages, memory has no room for the samples, or the
        model makes its keys from latents, or has layers that make none.
    """
    check_own_keys(model, "formats are calibrated for", "run it without a format")
    if any(layer.latent is not None for layer in model.config.layers):
        raise KvjaxError(
            f"{model.name} makes keys from latents and rotates only a part of each: levels are "
            f"measured of keys that are rotated whole; take a format that needs no calibration, "
            f"such as 'int8' or 'int4'"
        )
    most = check_integer("tokens", tokens, LEAST_TOKENS)
    rows = texts_as_ids(model, texts, most)
    parts = _parts(rows, most)
    _check_memory(model, sum(map(len, parts)))
    report = progress or (lambda phase, share: None)
    report("calibrate", 0.0)
    samples: list[list[Captured]] = [[] for _ in model.config.layers]
    for done, part in enumerate(parts, 1):
        given = (model.params, jnp.asarray(part, jnp.int32))
        program, _ = compiled(captured, model.graphdef, *given)
        for kept, new in zip(samples, jax.device_get(program(*given)), strict=True):
            kept.append(new)
        report("calibrate", 0.5 * done / (len(parts) + 1))
    given = (model.params, _first_tokens(parts))
    program, _ = compiled(first_keys, model.graphdef, *given)
    first = jax.device_get(program(*given))
    losses = layer_losses(
        model, [ids[:most] for ids in rows], lambda done: report("calibrate", 0.5 + 0.45 * done)
    )
    layers = []
    for shape, kept, sinks, loss in zip(model.config.layers, samples, first, losses, strict=True):
        of_layer = layer_calibration(
            np.concatenate([part.keys[1:] for part in kept]),
            np.concatenate([part.key_weights[1:] for part in kept]),
            np.concatenate([part.values for part in kept]),
            np.concatenate([part.value_weights for part in kept]),
            sinks,
            *frequencies(shape),
            loss,
        )
        layers.append(of_layer)
    report("calibrate", 1.0)
    return FormatCalibration(fingerprint(model), sum(map(len, parts)), tuple(layers))


def _parts(rows: list[list[int]], most: int) -> list[list[int]]:
    """What runs at once: pieces of equal length of each text, whole pages each.

    Raises:
      KvjaxError: a text is shorter than three pages.
    """
    size = DEFAULT_PAGE_SIZE
    for row, ids in enumerate(rows):
        if len(ids) < LEAST_TOKENS:
            raise KvjaxError(
                f"text {row} has {len(ids)} tokens: at least {LEAST_TOKENS} (three pages) are "
                f"needed to tell what keys are like, and thousands to tell it well; give a longer "
                f"text"
            )
    parts = []
    for ids in rows:
        ids = ids[: max(most // len(rows), size)]
        pieces = -(-len(ids) // PART_TOKENS)
        length = len(ids) // pieces // size * size
        parts += [ids[start * length : (start + 1) * length] for start in range(pieces)]
    return parts


def _first_tokens(parts: list[list[int]]) -> jax.Array:
    """Tokens that texts may begin with: those that parts do, and others of them, each once."""
    flat = np.concatenate([[part[0] for part in parts], *parts])
    _, first = np.unique(flat, return_index=True)
    return jnp.asarray(np.resize(flat[np.sort(first)][:FIRST_TOKENS], FIRST_TOKENS), jnp.int32)


def _check_memory(model: Model, tokens: int) -> None:
    """Refuse samples that this machine has no memory for.

    Raises:
      KvjaxError: it has not.
    """
    elements = sum(layer.elements_per_token for layer in model.spec.layers)
    needed = 3 * 4 * 2 * elements * tokens  # float32, with weights; joined, and worked on
    free = psutil.virtual_memory().available
    if needed > free:
        raise KvjaxError(
            f"keys and values of {tokens} tokens, with what they are measured by, take {needed} "
            f"bytes, and this machine has {free} bytes of memory free: measure fewer tokens"
        )
