"""What a model's layers attend to in a text: their queries and keys, and the softmax of these."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from flax import nnx
from jaxtyping import Array, Float32, Int32

from kvjax.decode import inputs
from kvjax.decode.program import compiled
from kvjax.decode.text_ids import texts_as_ids
from kvjax.errors import KvjaxError, check_integer
from kvjax.model import Model, check_own_keys
from kvjax.models import Decoder, causal_attend
from kvjax.models.linear import soft_cap
from kvjax.models.rope import frequencies, unrotated
from kvjax.policies.lightning_indexer import turned
from kvjax.spec import DEFAULT_PAGE_SIZE

PART_TOKENS = 2048
"""Most tokens that are read at once, as a text of their own."""

LEAST_TOKENS = 8 * DEFAULT_PAGE_SIZE
"""Of a text."""


class AttentionRule(NamedTuple):
    """How a layer makes scores of queries and keys that are not rotated."""

    scale: float
    cap: float | None
    frequencies: tuple[float, ...]
    sharpen: float

    @classmethod
    def of(cls, model: Model, layer: int) -> "AttentionRule":
        """A layer's.

        Args:
          model: whose.
          layer: its index.
        """
        radians, sharpen = frequencies(model.config.layers[layer])
        cap = model.config.attn_soft_cap
        return cls(model.config.scale(layer), cap, tuple(radians.tolist()), sharpen)


class Seen(NamedTuple):
    """What a layer's attention was given for C texts of T tokens, before the rotation."""

    queries: Any  # float32 [C, T, Hq, D], in NumPy until a layer's turn
    keys: Any  # float32 [C, T, Hkv, D]


def read_attention(
    model: Model, texts: inputs.PromptLike | Sequence[inputs.PromptLike], tokens: int
) -> list[Seen | None]:
    """Every layer's queries and keys of texts, in parts of equal length; None under a window.

    Args:
      model: that reads.
      texts: as texts or token ids.
      tokens: most that are read.

    Raises:
      KvjaxError: see `distill_indexer`.
    """
    check_own_keys(model, "an indexer is learned for", "run it without select")
    most = check_integer("tokens", tokens, LEAST_TOKENS)
    rows = texts_as_ids(model, texts, most)
    layers = model.config.layers
    if any(layer.latent is not None for layer in layers):
        raise KvjaxError(
            f"{model.name} makes keys from latents and rotates only a part of each: an indexer of "
            f"its kind is part of such a model (DeepSeek V3.2), and is not distilled"
        )
    if all(layer.window is not None for layer in layers):
        raise KvjaxError(
            f"all layers of {model.name} have sliding windows: they choose nothing, so there is "
            f"nothing to learn"
        )
    parts = _parts(rows, most, model.config.max_context)
    _check_memory(model, parts.size)
    seen: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in layers]
    for part in parts:
        given = (model.params, jnp.asarray(part))
        program, _ = compiled(_attended, model.graphdef, *given)
        for kept, new in zip(seen, jax.device_get(program(*given)), strict=True):
            kept.append(new)
    return [
        Seen(*(np.stack(each) for each in zip(*kept, strict=True)))
        if layer.window is None
        else None
        for layer, kept in zip(layers, seen, strict=True)
    ]


def _parts(rows: list[list[int]], most: int, context: int) -> Int32[np.ndarray, "C T"]:
    """Parts of equal length, the shortest text's and the model's context at most.

    Raises:
      KvjaxError: a text is shorter than eight pages.
    """
    for row, ids in enumerate(rows):
        if len(ids) < LEAST_TOKENS:
            raise KvjaxError(
                f"text {row} has {len(ids)} tokens: at least {LEAST_TOKENS} (eight pages) are "
                f"needed to learn from, and thousands to learn well; give a longer text"
            )
    share = max(most // len(rows), LEAST_TOKENS)
    longest = min(PART_TOKENS, context, share, *(len(ids) for ids in rows))
    length = longest // DEFAULT_PAGE_SIZE * DEFAULT_PAGE_SIZE
    parts = [
        ids[start : start + length]
        for ids in rows
        for start in range(0, min(len(ids), share) - length + 1, length)
    ]
    return np.asarray(parts, np.int32)


def _check_memory(model: Model, tokens: int) -> None:
    """Refuse queries and keys that this machine has no memory for.

    Raises:
      KvjaxError: it has not.
    """
    channels = sum(x.head_dim * (x.num_heads + x.num_kv_heads) for x in model.config.layers)
    needed = 2 * 4 * channels * tokens  # float32, as they come and put together
    free = psutil.virtual_memory().available
    if needed > free:
        raise KvjaxError(
            f"queries and keys of {tokens} tokens take {needed} bytes, and this machine has {free} "
            f"bytes of memory free: read fewer tokens"
        )


def _attended(
    graphdef: Any, params: Any, tokens: Int32[Array, " T"]
) -> tuple[tuple[Float32[Array, "T Hq D"], Float32[Array, "T Hkv D"]], ...]:
    """Every layer's queries and keys without their rotation."""
    decoder: Decoder = nnx.merge(graphdef, params)
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    plain = causal_attend(decoder.config, jnp.zeros_like(tokens), positions)

    def attend(
        layer: int, q: Array, k: Array, v: Array, seen: tuple[tuple[Array, Array], ...]
    ) -> tuple[Array, tuple[tuple[Array, Array], ...]]:
        of = decoder.config.layers[layer]
        back = unrotated(q, of, positions), unrotated(k, of, positions)
        return plain(layer, q, k, v, None)[0], (*seen, back)

    nothing: tuple[tuple[Array, Array], ...] = ()
    return decoder(tokens, positions, attend, nothing)[1]


def rotated_queries(
    rule: AttentionRule, queries: Float32[Array, "R Hq D"], rows: Int32[Array, " R"]
) -> Float32[Array, "R Hq D"]:
    """Queries as attention has them.

    Args:
      rule: the layer's.
      queries: float32 [R, Hq, D], not rotated.
      rows: int32 [R], their positions.
    """
    radians = jnp.array(rule.frequencies, jnp.float32)[None, :]
    return turned(queries, rows.astype(jnp.float32)[:, None] * radians) * rule.sharpen


def rotated_keys(rule: AttentionRule, keys: Float32[Array, "T Hkv D"]) -> Float32[Array, "T Hkv D"]:
    """Keys as attention has them, of a text from its beginning.

    Args:
      rule: the layer's.
      keys: float32 [T, Hkv, D], not rotated.
    """
    return rotated_queries(rule, keys, jnp.arange(keys.shape[0], dtype=jnp.int32))


def layer_attention(
    rule: AttentionRule, text: Any, rows: Int32[Array, " R"]
) -> Float32[Array, "R Hq T"]:
    """What the model's heads attend to.

    Args:
      rule: the layer's.
      text: one of `Seen`, [T, ...].
      rows: int32 [R], positions of the queries.
    """
    keys, queries = rotated_keys(rule, text.keys), rotated_queries(rule, text.queries[rows], rows)
    count, heads, dim = queries.shape
    grouped = queries.reshape(count, keys.shape[1], -1, dim)
    scores = jnp.einsum("rhgd,thd->rhgt", grouped, keys, precision=jax.lax.Precision.HIGHEST)
    scores = soft_cap(scores * rule.scale, rule.cap).reshape(count, heads, -1)
    before = jnp.arange(keys.shape[0], dtype=jnp.int32)[None, None, :] <= rows[:, None, None]
    return jax.nn.softmax(jnp.where(before, scores, -jnp.inf), axis=2)
