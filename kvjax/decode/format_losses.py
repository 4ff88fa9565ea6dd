"""What it costs to keep one layer's keys, or values, in so many bits: measured on a text.

A text is read exactly; of its first part one layer's keys or values are encoded, all else stays
exact, and the rest of the text is read over that. The loss is the KL divergence of its
distributions from those that the exact text gave. One number of bits is measured; those of others
follow by their squared errors, to which the divergence is proportional while it is small.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from kvjax.decode.program import compiled
from kvjax.formats import PagePacking
from kvjax.formats.mixed import MIXED_BITS, LayerLosses, key_packing, value_packing
from kvjax.model import Model
from kvjax.models import Decoder, causal_attend, dense_attention
from kvjax.spec import DEFAULT_PAGE_SIZE

WINDOW_TOKENS = 1152
"""Most tokens of a text that is measured: eight parts of nine are encoded, the last is read."""

WINDOWS = 2
"""Texts that are measured."""

_MEASURED = 3
"""Bits that are: few enough for a loss well above rounding."""


class _Text(NamedTuple):
    """One text, read exactly."""

    rest: Int32[Array, " Q"]  # tokens after the part that is encoded
    keys: tuple[Float[Array, "T Hkv D"], ...]
    values: tuple[Float[Array, "T Hkv Dv"], ...]
    logprobs: Float32[Array, "Q V"]


def layer_losses(
    model: Model, rows: Sequence[list[int]], done: Callable[[float], None]
) -> tuple[LayerLosses | None, ...]:
    """The loss of each layer's keys and values alone; None of a layer with a sliding window.

    Args:
      model: that runs.
      rows: ids of texts, at least one of three pages.
      done: told how much of it is, 0 to 1.
    """
    texts = [_read(model, window) for window in _windows(rows)]
    layers = model.config.layers
    losses: list[LayerLosses | None] = []
    for layer, shape in enumerate(layers):
        if shape.window is None:
            keys = _of_part(model, texts, layer, "keys", key_packing)
            losses.append(LayerLosses(keys, _of_part(model, texts, layer, "values", value_packing)))
        else:
            losses.append(None)
        done((layer + 1) / len(layers))
    return tuple(losses)


def _of_part(
    model: Model,
    texts: Sequence[_Text],
    layer: int,
    part: str,
    packing: Callable[[int], PagePacking],
) -> tuple[float, ...]:
    """Losses of a layer's keys or values in each of `MIXED_BITS`."""
    errors, loss = dict.fromkeys(MIXED_BITS, 0.0), 0.0
    for text in texts:
        exact: tuple[Array, ...] = getattr(text, part)
        for bits in MIXED_BITS:
            there, _ = compiled(_there_and_back, packing(bits), exact[layer])
            again, error = there(exact[layer])
            errors[bits] += float(error)
            if bits == _MEASURED:
                new = (*exact[:layer], again, *exact[layer + 1 :])
                given = text._replace(keys=new) if part == "keys" else text._replace(values=new)
                program, _ = compiled(_divergence, model.graphdef, model.params, given)
                loss += float(program(model.params, given)) / len(texts)
    if not errors[_MEASURED]:
        return (0.0,) * len(MIXED_BITS)
    return tuple(max(loss, 0.0) * errors[bits] / errors[_MEASURED] for bits in MIXED_BITS)


def _windows(rows: Sequence[list[int]]) -> list[list[int]]:
    """Texts of one length: the first of each row, then the next."""
    size = min(WINDOW_TOKENS, max(map(len, rows)))
    pieces = [
        (start, row, ids[start : start + size])
        for row, ids in enumerate(rows)
        for start in range(0, len(ids) - size + 1, size)
    ]
    return [ids for _, _, ids in sorted(pieces)[:WINDOWS]]


def _read(model: Model, ids: list[int]) -> _Text:
    encoded = max(len(ids) * 8 // 9 // DEFAULT_PAGE_SIZE, 2) * DEFAULT_PAGE_SIZE
    tokens = jnp.asarray(ids, jnp.int32)
    given = model.params, tokens
    program, _ = compiled(_exact, (model.graphdef, encoded), *given)
    return _Text(tokens[encoded:], *program(*given))


def _exact(static: tuple[Any, int], params: Any, tokens: Int32[Array, " T"]) -> tuple[Any, ...]:
    """Keys and values of a text's first tokens, and log-probabilities after the others."""
    graphdef, encoded = static
    decoder: Decoder = nnx.merge(graphdef, params)
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    plain = causal_attend(decoder.config, jnp.zeros_like(tokens), positions)

    def attend(
        layer: int, q: Array, k: Array, v: Array, seen: tuple[Any, ...]
    ) -> tuple[Array, tuple[Any, ...]]:
        return plain(layer, q, k, v, None)[0], (*seen, (k[:encoded], v[:encoded]))

    nothing: tuple[Any, ...] = ()
    hidden, seen = decoder(tokens, positions, attend, nothing)
    keys, values = zip(*seen, strict=True)
    return keys, values, jax.nn.log_softmax(decoder.logits(hidden[encoded:]))


def _there_and_back(
    packing: PagePacking, rows: Float[Array, "T Hkv D"]
) -> tuple[Float[Array, "T Hkv D"], Float32[Array, ""]]:
    """Rows encoded and decoded, but for the first page; and the squared error."""
    size = DEFAULT_PAGE_SIZE
    pages = rows.reshape(-1, size, *rows.shape[1:]).swapaxes(1, 2)
    packed = packing.encode(pages, jnp.arange(pages.shape[0], dtype=jnp.int32) * size)
    again = packed.values().swapaxes(1, 2).reshape(rows.shape).at[:size].set(rows[:size])
    return again, jnp.sum(jnp.square(again - rows))


def _divergence(graphdef: Any, params: Any, text: _Text) -> Float32[Array, ""]:
    """The mean KL divergence of the rest's distributions, in nats, over keys and values given."""
    decoder: Decoder = nnx.merge(graphdef, params)
    config, first = decoder.config, text.keys[0].shape[0]
    total = first + text.rest.shape[0]
    every = jnp.arange(total, dtype=jnp.int32)
    one = jnp.zeros_like(every)

    def attend(layer: int, q: Array, k: Array, v: Array, state: None) -> tuple[Array, None]:
        out = dense_attention(
            q,
            jnp.concatenate([text.keys[layer], k]),
            jnp.concatenate([text.values[layer], v]),
            query_segments=one[first:],
            query_positions=every[first:],
            key_segments=one,
            key_positions=every,
            scale=config.scale(layer),
            window=config.layers[layer].window,
            cap=config.attn_soft_cap,
        )
        return out, state

    hidden, _ = decoder(text.rest, every[first:], attend, None)
    mine = jax.nn.log_softmax(decoder.logits(hidden))
    divergence = jnp.sum(jnp.exp(text.logprobs) * (text.logprobs - mine), axis=1)
    return jnp.mean(divergence)
