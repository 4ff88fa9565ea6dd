"""`score`: the log-probability of every token of a text, through the paged cache."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from kvjax.cache import Reservation
from kvjax.config import CacheConfig
from kvjax.decode import inputs
from kvjax.decode.calls import Progress, cache_spec, not_finite
from kvjax.decode.meter import Meter
from kvjax.decode.results import Score
from kvjax.decode.shapes import SMALLEST_CHUNK, Shapes, plan
from kvjax.decode.step import DecodeState, Prompts, prefill_chunk, start
from kvjax.errors import KvjaxError
from kvjax.model import Model

LOGIT_ROWS = 32
"""Rows whose logits are held at once: a whole chunk's would take more memory than the model."""


class _Result(NamedTuple):
    logprobs: Float[Array, " T"]  # of the token after each
    top: Int32[Array, " T"]
    reservation: Reservation
    pages_used: Int32[Array, ""]


def score(
    model: Model,
    text: inputs.PromptLike,
    *,
    cache: CacheConfig | None = None,
    prefill_chunk: int = 512,
    progress: Progress | None = None,
) -> Score:
    """Score a text by the model, as chunked prefill computes it.

    Whatever `cache` approximates shows in the result: this is how cache features are judged.

    Args:
      model: what to run.
      text: a text or token ids, at least two tokens.
      cache: page size, pool size, dtype and attention implementation.
      prefill_chunk: most tokens run at once.
      progress: called as phases begin and end.

    Returns:
      Log-probabilities, the likeliest tokens and the perplexity.

    Raises:
      KvjaxError: the text is too short, or too long for the model; raised before tracing. After
        the run: logits are not finite.
      PoolExhaustedError: the pool is too small.
    """
    meter = Meter()
    cache = inputs.given_or_default("cache", cache, CacheConfig)
    if cache.select is not None:
        raise KvjaxError(
            "cache.select is given: scoring prefills, which reads every page; leave out select"
        )
    ids = inputs.token_ids(model, text, "text")
    if len(ids) < 2:
        raise KvjaxError("text has 1 token: scoring needs at least 2, one to predict from")
    shapes = plan(
        model.config,
        cache_spec(model, cache),
        [len(ids)],
        new_tokens=0,
        prefill_chunk=prefill_chunk,
        cache=cache,
    )
    report = progress or (lambda phase, share: None)
    arguments = (model.params, inputs.flat_prompts([ids], shapes))
    report("compile", 0.0)
    program = meter.program(_score, (model.graphdef, shapes), *arguments)
    report("compile", 1.0)
    report("prefill", 0.0)
    result: _Result = jax.device_get(program(*arguments))
    report("prefill", 1.0)
    result.reservation.check(jax.eval_shape(lambda: inputs.empty_cache(shapes)))
    logprobs = [float(x) for x in result.logprobs[: len(ids) - 1]]
    for index, logprob in enumerate(logprobs):
        if not math.isfinite(logprob):
            raise not_finite(f"text, after token {index}", model, shapes)
    return Score(
        tokens=ids,
        logprobs=[None, *logprobs],
        top_tokens=[None, *(int(t) for t in result.top[: len(ids) - 1])],
        perplexity=math.exp(-math.fsum(logprobs) / len(logprobs)),
        stats=meter.stats(
            shapes, prompt_tokens=len(ids), new_tokens=0, pages_used=int(result.pages_used)
        ),
    )


def _score(static: tuple[Any, Shapes], params: Any, prompts: Prompts) -> _Result:
    graphdef, shapes = static
    decoder = nnx.merge(graphdef, params)
    total, chunk = prompts.tokens.shape[0], shapes.chunk
    rows = LOGIT_ROWS if chunk % LOGIT_ROWS == 0 else SMALLEST_CHUNK
    state = start(
        inputs.empty_cache(shapes),
        decoder.config.hidden_size,
        jnp.ones((shapes.batch,), jnp.int32),
    )
    following = jnp.roll(prompts.tokens, -1)
    chunks = (prompts.cu_lengths[-1] + (chunk - 1)) // chunk

    def judge(pair: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden, target = pair
        logits = decoder.logits(hidden)
        chosen = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        top = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return chosen - jax.nn.logsumexp(logits, axis=-1), top

    def goes_on(carry: tuple[Array, DecodeState, Array, Array]) -> Array:
        index, state, _, _ = carry
        return (index < chunks) & state.reservation.ok

    def step(
        carry: tuple[Array, DecodeState, Array, Array],
    ) -> tuple[Array, DecodeState, Array, Array]:
        index, state, logprobs, tops = carry
        state, hidden = prefill_chunk(
            decoder, state, prompts, index, chunk=chunk, implementation=shapes.attention
        )
        targets = jax.lax.dynamic_slice(following, (index * chunk,), (chunk,))
        some, top = jax.lax.map(
            judge, (hidden.reshape(-1, rows, hidden.shape[1]), targets.reshape(-1, rows))
        )
        at = (index * chunk,)
        logprobs = jax.lax.dynamic_update_slice(logprobs, some.reshape(-1), at)
        tops = jax.lax.dynamic_update_slice(tops, top.reshape(-1), at)
        return index + 1, state, logprobs, tops

    carry = (jnp.int32(0), state, jnp.zeros((total,), jnp.float32), jnp.zeros((total,), jnp.int32))
    _, state, logprobs, tops = jax.lax.while_loop(goes_on, step, carry)
    used = jnp.sum(state.cache.page_refs > 0, dtype=jnp.int32)
    return _Result(logprobs, tops, state.reservation, used)
