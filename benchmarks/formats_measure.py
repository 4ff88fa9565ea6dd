"""What storing tokens in fewer bits costs: a document read through a format, then questions."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from benchmarks.formats_methods import Method
from kvjax.cache import PagedKVCache
from kvjax.config import CacheConfig
from kvjax.decode import Sampling, inputs
from kvjax.decode.calls import cache_spec
from kvjax.decode.program import compiled
from kvjax.decode.sampling import make_sampler
from kvjax.decode.shapes import Shapes, plan
from kvjax.decode.step import DecodeState, Prompts, Rules, decode_step, prefill_chunk, start
from kvjax.formats import PagePacking
from kvjax.model import Model
from kvjax.pallas_kernels.packed_pages import PackedPages
from kvjax.pallas_kernels.residual import encoded_before

QUESTION, ANSWER = 48, 16
"""Tokens of a question at most, and of an answer."""

ROWS = 64
"""Positions whose distributions are held at once."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """Bytes that a cache's arrays take."""

    per_token: float  # of pages, scales and all, and of sinks, which stay as they are
    recent: float  # a sequence's newest tokens, which stay as they are


@dataclasses.dataclass(frozen=True)
class Run:
    """What a model made of a document and of questions about it, through one cache."""

    document: Float[Array, "T d"]  # final hidden state at each token
    questions: list[Float[Array, "n d"]]  # the same of each question's tokens
    answers: list[list[int]]  # greedy
    kept: Kept
    state: DecodeState  # after the document
    shapes: Shapes


@dataclasses.dataclass(frozen=True)
class Against:
    """Distributions against those of another run at the same tokens, in nats."""

    kl: float  # KL(other || this), mean
    agrees: float  # share of positions with the same likeliest token
    nll: float  # of the tokens that follow, mean


def run(
    model: Model,
    document: list[int],
    questions: Sequence[list[int]],
    cache: CacheConfig,
    say: Callable[[str], None],
) -> Run:
    """Read a document in chunks, then decode each question and an answer token by token.

    Every question begins with the document's cache, which is a value.

    Args:
      model: what runs.
      document: ids.
      questions: ids of each.
      cache: with a format, or without.
      say: told what goes on.
    """
    shapes = plan(
        model.config,
        cache_spec(model, cache),
        [len(document)],
        new_tokens=QUESTION + ANSWER + 1,
        prefill_chunk=512,
        cache=cache,
    )
    static = (model.graphdef, shapes)
    prompts = inputs.flat_prompts([document], shapes)
    say("compiling the document's program")
    read, took = compiled(read_document, static, model.params, prompts)
    say(f"reading (compiled in {took:.0f} s)")
    state, hidden = jax.block_until_ready(read(model.params, prompts))
    state.reservation.check(state.cache)
    asked = _asked(model, shapes, state, questions, say)
    return Run(hidden[: len(document)], *asked, kept(state.cache), state, shapes)


def encoded_after(
    model: Model,
    exact: Run,
    method: Method,
    questions: Sequence[list[int]],
    say: Callable[[str], None],
) -> Run:
    """Encode a document that was read exactly, and ask: only what is stored differs.

    Pages hold what their codes stand for, so that the program of the exact run serves again.

    Args:
      model: what runs.
      exact: through a cache without a format.
      method: with a format, or bf16.
      questions: ids of each.
      say: told what goes on.
    """
    cache, spec = exact.state.cache, model.spec
    chosen, size = method.format, method.page_size
    newest = size if chosen is None else chosen.recent(size)
    encoded = encoded_before(exact.document.shape[0], newest, size)
    pools: dict[str, list[Array]] = {"k_pages": [], "v_pages": []}
    kept_bytes = recent = 0.0
    for index, shape in enumerate(spec.layers):
        layer = None if chosen is None else chosen.layer(spec, index)
        packings = (None, None) if layer is None else (layer.keys, layer.values)
        dims = shape.head_dim, shape.value_dim
        for name, packing, dim in zip(pools, packings, dims, strict=True):
            arguments = getattr(cache, name)[index], cache.block_tables[0]
            sinks = 0 if packing is None else chosen.sink_tokens(size)
            program, _ = compiled(_there_and_back, (packing, size, sinks, encoded), *arguments)
            pool, stored = program(*arguments)
            pools[name].append(pool)
            sink_bytes = 2 * sinks * shape.kv_heads * dim
            kept_bytes += (_nbytes(stored) + sink_bytes) / encoded
            recent += 2 * newest * shape.kv_heads * dim if packing else 0
    state = dataclasses.replace(
        exact.state,
        cache=dataclasses.replace(cache, **{name: tuple(made) for name, made in pools.items()}),
    )
    asked = _asked(model, exact.shapes, state, questions, say)
    return Run(exact.document, *asked, Kept(kept_bytes, recent), state, exact.shapes)


def _there_and_back(
    static: tuple[PagePacking | None, int, int, int], pool: Array, table: Int32[Array, " M"]
) -> tuple[Array, Any]:
    """A plain pool with tokens encoded and decoded, and what is stored of them.

    Those are after the sinks, and before the newest; sinks are rounded to bf16 as the newest are.
    """
    packing, size, sinks, encoded = static
    if packing is None:
        rounded = pool.astype(jnp.bfloat16)
        return rounded.astype(pool.dtype), rounded[table[: encoded // pool.shape[2]]]
    _, heads, plain_size, dim = pool.shape
    ids = table[: encoded // plain_size]
    rows = pool[ids].swapaxes(1, 2).reshape(encoded, heads, dim)
    pages = rows.reshape(-1, size, heads, dim).swapaxes(1, 2)
    packed = packing.encode(pages, jnp.arange(pages.shape[0], dtype=jnp.int32) * size)
    decoded = packed.values().swapaxes(1, 2).reshape(-1, plain_size, heads, dim)
    decoded = decoded.swapaxes(1, 2)
    first = pool[ids].astype(jnp.bfloat16).astype(decoded.dtype)
    is_sink = jnp.arange(len(ids), dtype=jnp.int32) < sinks // plain_size
    return pool.at[ids].set(
        jnp.where(is_sink[:, None, None, None], first, decoded)
    ), packed.stored()


def _asked(
    model: Model,
    shapes: Shapes,
    state: DecodeState,
    questions: Sequence[list[int]],
    say: Callable[[str], None],
) -> tuple[list[Float[Array, "n d"]], list[list[int]]]:
    """Hidden states at each question's tokens, and each greedy answer."""
    asked, answers = [], []
    for index, question in enumerate(questions):
        room = np.full(QUESTION + ANSWER, -1, np.int32)
        room[: len(question)] = question
        count = jnp.int32(len(question) + ANSWER)
        arguments = (model.params, state, _rules(model), jnp.asarray(room), count)
        ask, took = compiled(_ask, (model.graphdef, shapes), *arguments)
        say(f"question {index + 1} of {len(questions)} (compiled in {took:.0f} s)")
        states, tokens = ask(*arguments)
        asked.append(states[: len(question)])
        answers.append(np.asarray(tokens)[len(question) : len(question) + ANSWER].tolist())
    return asked, answers


def kept(cache: PagedKVCache) -> Kept:
    """What a cache's arrays take, by what they grow with."""
    pools, sinks = (*cache.k_pages, *cache.v_pages), cache.sink_tokens
    first = [x[:, :sinks] for recent in cache.recent for x in jax.tree.leaves(recent)]
    newest = [x[:, sinks:] for recent in cache.recent for x in jax.tree.leaves(recent)]
    tokens = max(int(cache.lengths.sum()), 1)
    grown = [pool.stored() if isinstance(pool, PackedPages) else pool for pool in pools]
    return Kept(
        per_token=_nbytes(grown) / cache.num_pages / cache.page_size + _nbytes(first) / tokens,
        recent=_nbytes(newest) / cache.batch,
    )


def _nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def against(
    model: Model,
    exact: Float[Array, "n d"],
    other: Float[Array, "n d"],
    following: Sequence[int],
) -> Against:
    """Compare two runs' distributions at the same tokens.

    Args:
      model: whose head to use.
      exact: final hidden states.
      other: final hidden states of what is judged.
      following: the token after each.
    """
    count = len(following)
    after = -(-count // ROWS) * ROWS - count
    pair = [jnp.pad(jnp.asarray(x[:count]), ((0, after), (0, 0))) for x in (exact, other)]
    targets = jnp.asarray([*following, *[0] * after], jnp.int32)
    arguments = (model.params, *pair, targets)
    compare, _ = compiled(_compare, model.graphdef, *arguments)
    found = np.stack(jax.device_get(compare(*arguments)))[:, :count]
    kl, agrees, nll = found.mean(axis=1).tolist()
    return Against(kl, agrees, nll)


def _rules(model: Model) -> Rules:
    return Rules(
        sampler=make_sampler(Sampling(), model.config.vocab_size),
        key=inputs.prng_key(0),
        stop_tokens=inputs.padded_stops([]),
        limits=jnp.full((1,), 1 << 20, jnp.int32),
    )


def read_document(
    static: tuple[Any, Shapes], params: Any, prompts: Prompts
) -> tuple[DecodeState, Float[Array, "T d"]]:
    """Read one document: the state behind it, and the final hidden state at each token.

    Args:
      static: the model's graph, and the shapes of the cache.
      params: the model's.
      prompts: the document alone.
    """
    graphdef, shapes = static
    decoder = nnx.merge(graphdef, params)
    width, chunk = decoder.config.hidden_size, shapes.chunk
    state = start(inputs.empty_cache(shapes), width, jnp.full((1,), 1 << 20, jnp.int32))
    chunks = (prompts.cu_lengths[-1] + (chunk - 1)) // chunk

    def step(index: Array, carry: tuple[DecodeState, Array]) -> tuple[DecodeState, Array]:
        state, hidden = carry
        state, some = prefill_chunk(
            decoder, state, prompts, index, chunk=chunk, implementation=shapes.attention
        )
        return state, jax.lax.dynamic_update_slice(hidden, some, (index * chunk, 0))

    hidden = jnp.zeros((prompts.tokens.shape[0], width), jnp.float32)
    done: tuple[DecodeState, Array] = jax.lax.fori_loop(0, chunks, step, (state, hidden))
    return done


def _ask(
    static: tuple[Any, Shapes],
    params: Any,
    state: DecodeState,
    rules: Rules,
    given: Int32[Array, " room"],
    count: Int32[Array, ""],
) -> tuple[Float[Array, "room d"], Int32[Array, " room"]]:
    """Decode `count` tokens, those that are given or, where they are -1, the likeliest."""
    graphdef, shapes = static
    decoder = nnx.merge(graphdef, params)

    def step(index: Array, carry: Any) -> Any:
        state, hidden, tokens = carry
        token = jnp.where(given[index] < 0, state.tokens[0], given[index])
        state = dataclasses.replace(state, tokens=token[None])
        state = decode_step(decoder, state, rules, implementation=shapes.attention)
        return state, hidden.at[index].set(state.hidden[0]), tokens.at[index].set(token)

    room = given.shape[0]
    empty = jnp.zeros((room, decoder.config.hidden_size)), jnp.zeros((room,), jnp.int32)
    _, hidden, tokens = jax.lax.fori_loop(0, count, step, (state, *empty))
    return hidden, tokens


def _compare(
    graphdef: Any,
    params: Any,
    exact: Float[Array, "n d"],
    other: Float[Array, "n d"],
    following: Int32[Array, " n"],
) -> tuple[Array, Array, Array]:
    decoder = nnx.merge(graphdef, params)

    def block(inputs: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        p, q = (jax.nn.log_softmax(decoder.logits(hidden), axis=-1) for hidden in inputs[:2])
        same = (jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)).astype(jnp.float32)
        nll = -jnp.take_along_axis(q, inputs[2][:, None], axis=-1)[:, 0]
        return jnp.sum(jnp.exp(p) * (p - q), axis=-1), same, nll

    blocks = tuple(x.reshape(-1, ROWS, *x.shape[1:]) for x in (exact, other, following))
    found = jax.lax.map(block, blocks)
    kl, same, nll = (x.reshape(-1) for x in found)
    return kl, same, nll
