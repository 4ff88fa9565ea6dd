"""From what a caller passes to what a program takes, with every check before tracing."""

import reprlib
from collections.abc import Collection, Sequence, Set
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Sharding
from jaxtyping import Int

from kvjax.cache import PagedKVCache, init
from kvjax.decode.program import compiled
from kvjax.decode.sampling import Sampling, make_sampler
from kvjax.decode.shapes import Shapes
from kvjax.decode.step import Prompts, Rules
from kvjax.errors import KvjaxError, as_kvjax_error, is_integer
from kvjax.model import Model
from kvjax.models import check_tokens
from kvjax.pallas_kernels.mosaic.layout import pool_format

T = TypeVar("T")

PromptLike = str | Sequence[int] | Int[np.ndarray, " n"] | Int[jax.Array, " n"]
"""A text, or token ids."""


def given_or_default(name: str, value: T | None, kind: type[T]) -> T:
    """What a caller configured; for None, what holds without.

    Args:
      name: the argument's, for the message.
      value: the caller's.
      kind: its class.

    Raises:
      KvjaxError: it is of another class.
    """
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise KvjaxError(
            f"{name} is {reprlib.repr(value)}: must be a kvjax.{kind.__name__}, or None"
        )
    return value


def token_ids(model: Model, prompt: PromptLike, what: str = "prompt") -> list[int]:
    """The ids of one prompt.

    Args:
      model: whose tokenizer and vocabulary to use.
      prompt: a text or ids.
      what: its name in error messages.

    Raises:
      KvjaxError: the model is no `Model`; the prompt is empty or surely too long, an id is out of
        range (a tokenizer may have more than the model), or it is text and there is no tokenizer.
    """
    if not isinstance(model, Model):
        raise KvjaxError(
            f"model is {reprlib.repr(model)}: must be what kvjax.load returns, such as "
            f"kvjax.load('smollm2-135m')"
        )
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise KvjaxError(
                f"{what} is text, but {model.name} came without a tokenizer: pass token ids"
            )
        _check_length(model, prompt, what)
        with as_kvjax_error():
            ids = _checked(model, model.tokenizer.encode(prompt), what)
    elif _is_list(prompt) and any(isinstance(item, str) for item in prompt):
        raise KvjaxError(
            f"{what} is a list of texts: must be one prompt, a text or token ids; only generate "
            f"takes several prompts"
        )
    else:
        ids = _checked(model, prompt, what)
    if not ids or (isinstance(prompt, str) and not prompt):
        raise KvjaxError(f"{what} is empty: give at least one token")
    return ids


def prompt_list(model: Model, prompts: PromptLike | Sequence[PromptLike]) -> list[list[int]]:
    """The ids of one prompt or of several.

    Args:
      model: whose tokenizer and vocabulary to use.
      prompts: a text, token ids, or a list of either.

    Raises:
      KvjaxError: there is none, or one of them is not usable.
    """
    if isinstance(prompts, jax.Array):
        prompts = np.asarray(prompts)
    if isinstance(prompts, str) or not _is_list(prompts):
        return [token_ids(model, prompts)]  # type: ignore[arg-type]
    if not len(prompts):
        raise KvjaxError("prompts is empty: give a text, token ids, or a list of either")
    if not any(_is_list(item) for item in prompts):
        return [token_ids(model, prompts)]  # type: ignore[arg-type]
    return [token_ids(model, p, f"prompt {i}") for i, p in enumerate(prompts)]


def only_prompt(model: Model, prompts: PromptLike | Sequence[PromptLike]) -> list[int]:
    """The ids of the one prompt there is.

    Raises:
      KvjaxError: there are several, or it is not usable.
    """
    rows = prompt_list(model, prompts)
    if len(rows) > 1:
        raise KvjaxError(
            f"prompts are {len(rows)}: a stored prefix serves one prompt at a time; call once for "
            f"each, or leave out prefixes"
        )
    return rows[0]


def stop_ids(model: Model, stop_tokens: Collection[int] | None, stop_at_eos: bool) -> list[int]:
    """The ids that end a row.

    Args:
      model: whose EOS tokens to add.
      stop_tokens: the caller's; None is none.
      stop_at_eos: whether the model's own end the row too.

    Raises:
      KvjaxError: an id is out of range.
    """
    given = list(stop_tokens) if isinstance(stop_tokens, Set) else stop_tokens
    own = [] if given is None else _checked(model, given, "stop_tokens")
    eos = model.tokenizer.eos_ids if stop_at_eos and model.tokenizer is not None else frozenset()
    return sorted({*own, *eos})


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence | np.ndarray | jax.Array) and getattr(value, "ndim", 1) > 0


def _check_length(model: Model, text: str, what: str) -> None:
    """Refuses what cannot fit the context by its length alone, before it is tokenized."""
    context = model.config.max_context
    if model.tokenizer is None or len(text) <= context:
        return
    least = -(-len(text) // model.tokenizer.longest_token)
    if least > context:
        raise KvjaxError(
            f"{what} has at least {least} tokens: the model's context is {context}; shorten it"
        )


def _checked(model: Model, ids: Collection[int] | np.ndarray | jax.Array, what: str) -> list[int]:
    try:
        array = np.asarray(ids)
    except ValueError:  # rows of different lengths
        array = np.empty((0, 0))
    if array.ndim != 1:
        raise KvjaxError(f"{what} is {reprlib.repr(ids)}: must be a list of token ids")
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise KvjaxError(f"{what} is {reprlib.repr(ids)}: token ids must be integers")
    try:
        check_tokens(array, model.config.vocab_size)
    except ValueError as error:
        raise KvjaxError(f"{what}: {error}") from error
    return [int(token) for token in array]


def padded_stops(stops: Sequence[int]) -> jax.Array:
    """Stop tokens as a program takes them: -1 where there is none, in few sizes."""
    room = max(8, -(-len(stops) // 8) * 8)
    return jnp.asarray(list(stops) + [-1] * (room - len(stops)), jnp.int32)


def flat_prompts(prompts: Sequence[Sequence[int]], shapes: Shapes) -> Prompts:
    """Prompts as one flat stream of the size that `shapes` has room for.

    Args:
      prompts: ids, none empty.
      shapes: the program's.
    """
    stream = np.zeros(shapes.chunk * shapes.chunks, np.int32)
    flat = np.concatenate([np.asarray(p, np.int32) for p in prompts])
    stream[: flat.size] = flat
    cu = np.full(shapes.batch + 1, flat.size, np.int32)
    cu[: len(prompts) + 1] = np.concatenate([[0], np.cumsum([len(p) for p in prompts])])
    return Prompts(tokens=jnp.asarray(stream), cu_lengths=jnp.asarray(cu))


def rules(
    model: Model,
    sampling: Sampling,
    key: jax.Array | int | None,
    stops: Sequence[int],
    limit: int,
    rows: int,
    batch: int,
) -> Rules:
    """How a call's tokens are drawn and when its rows end.

    Args:
      model: for the size of its vocabulary.
      sampling: how to draw.
      key: as `prng_key` takes it.
      stops: ids that end a row.
      limit: most tokens a row may draw.
      rows: that hold a prompt.
      batch: B, rows of the program.
    """
    return Rules(
        sampler=make_sampler(sampling, model.config.vocab_size),
        key=prng_key(key),
        stop_tokens=padded_stops(stops),
        limits=row_limits(rows, limit, batch),
    )


def row_limits(count: int, limit: int, batch: int) -> jax.Array:
    """Most tokens each row may draw: `limit` for the first `count` rows, 0 for padding."""
    return jnp.asarray([limit] * count + [0] * (batch - count), jnp.int32)


def empty_cache(shapes: Shapes) -> PagedKVCache:
    """The cache a program of these shapes starts with (traced or concrete)."""
    return init(
        shapes.spec,
        num_pages=shapes.num_pages,
        batch=shapes.batch,
        max_pages=shapes.max_pages,
        page_size=shapes.page_size,
        format=shapes.format,
        window_chunk=shapes.chunk if shapes.rings else None,
    )


def formats_between(state: Any, sharding: Sharding) -> Any:
    """How a state lies in memory between programs: pools as the kernels read them in place.

    Args:
      state: a cache or what holds one, abstract or concrete.
      sharding: where it lives.
    """
    return jax.tree.map(
        lambda x: pool_format(sharding) if x.ndim == 4 else Format(None, sharding), state
    )


def placed_cache(shapes: Shapes, sharding: Sharding) -> PagedKVCache:
    """An empty cache that outlives one program, as `formats_between` says."""
    formats = formats_between(jax.eval_shape(lambda: empty_cache(shapes)), sharding)
    cache: PagedKVCache = compiled(empty_cache, shapes, formats=formats)[0]()
    return cache


def prng_key(key: jax.Array | int | None) -> jax.Array:
    """A typed PRNG key from a key, a seed, or nothing (seed 0).

    Raises:
      KvjaxError: it is neither, or a seed that JAX would cut to 32 bits.
    """
    if key is None:
        return jax.random.key(0)
    if isinstance(key, jax.Array):
        typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        if typed and key.shape == ():
            return key
        if key.dtype == jnp.uint32 and key.shape == jax.random.key_data(jax.random.key(0)).shape:
            wrapped: jax.Array = jax.random.wrap_key_data(key)
            return wrapped
    elif is_integer(key):
        if not 0 <= key < 2**32:
            raise KvjaxError(f"key is {key!r}: a seed must be 0 to 2**32 - 1")
        return jax.random.key(int(key))
    raise KvjaxError(f"key is {key!r}: must be one key of jax.random.key, a seed, or None")
