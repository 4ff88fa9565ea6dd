"""What every way of decoding repeats: one prefill chunk, one decode step. Pure functions.

`generate` runs them inside one program; `stream` runs each as a program of its own.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key

from kvjax import cache as paged
from kvjax.cache import Reservation
from kvjax.decode.attend import chunk_attend, decode_attend, newest_attend
from kvjax.decode.sampling import Sampler
from kvjax.models import Decoder
from kvjax.pallas_kernels.support import Implementation

RUNNING, STOPPED, FULL, BROKEN = 0, 1, 2, 3
"""Why a row draws on, or does not: a stop token, as many tokens as it may, or no finite logits."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompts:
    """The prompts of a batch as one flat ragged stream, padded to whole chunks."""

    tokens: Int32[Array, " T"]  # the prompts' ids after one another
    cu_lengths: Int32[Array, " B1"]  # [B + 1], where each prompt starts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rules:
    """How tokens are drawn and when a row ends."""

    sampler: Sampler
    key: Key[Array, ""]  # draws depend on it, on the step and on the row
    stop_tokens: Int32[Array, " S"]  # -1 where there is none
    limits: Int32[Array, " B"]  # most tokens a row may draw; 0 for rows without a prompt


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything a step changes."""

    cache: Any  # a `PagedKVCache`, or a `TieredCache`
    hidden: Float[Array, "B d"]  # the newest token's hidden state, a row
    tokens: Int32[Array, " B"]  # the newest token drawn, a row; it is not in the cache yet
    finished: Int32[Array, " B"]  # RUNNING, STOPPED, FULL or BROKEN
    step: Int32[Array, ""]  # tokens drawn so far, a running row
    reservation: Reservation  # the last one; once it failed, nothing goes on
    finite: Bool[Array, " B"]  # whether a row's logits were all finite; if not, that row ends

    @property
    def active(self) -> Bool[Array, " B"]:
        """Rows that draw on."""
        return self.finished == RUNNING

    @property
    def sound(self) -> Bool[Array, ""]:
        """Nothing went wrong so far that concerns all rows."""
        return self.reservation.ok


def start(cache: Any, hidden_size: int, limits: Int32[Array, " B"]) -> DecodeState:
    """The state before anything ran.

    Args:
      cache: an empty cache.
      hidden_size: d.
      limits: as in `Rules`.
    """
    zero = jnp.int32(0)
    return DecodeState(
        cache=cache,
        hidden=jnp.zeros((limits.shape[0], hidden_size), jnp.float32),
        tokens=jnp.zeros_like(limits),
        finished=jnp.where(limits > 0, RUNNING, FULL).astype(jnp.int32),
        step=zero,
        reservation=Reservation(jnp.bool_(True), needed=zero, free=zero, longest=zero, wrong=zero),
        finite=jnp.ones(limits.shape, jnp.bool_),
    )


class _Chunk(NamedTuple):
    """Some tokens of the flat stream, and where they go."""

    tokens: Int32[Array, " C"]
    positions: Int32[Array, " C"]
    sequences: Int32[Array, " C"]  # B for padding
    slots: Int32[Array, " C"]  # among the sequence's stored tokens
    cu_lengths: Int32[Array, " B1"]  # where each sequence's tokens start among these
    last: Int32[Array, " B"]  # where among these each prompt ends, if it does here
    ends: Bool[Array, " B"]  # whether it does
    cache: Any  # with pages reserved
    reservation: Reservation


def _chunk(state: DecodeState, prompts: Prompts, index: Int32[Array, ""], chunk: int) -> _Chunk:
    begin = index * chunk
    tokens = jax.lax.dynamic_slice(prompts.tokens, (begin,), (chunk,))
    cu = jnp.clip(prompts.cu_lengths - begin, 0, chunk)
    cache, reservation = paged.reserve(state.cache, jnp.diff(cu), max_count=chunk)
    sequences, offset = paged.ragged_rows(cu, chunk)
    slots = offset + cache.lengths.at[sequences].get(mode="clip")
    positions = offset + cache.next_positions.at[sequences].get(mode="clip")
    last = prompts.cu_lengths[1:] - 1 - begin
    ends = (last >= 0) & (last < chunk) & (jnp.diff(cu) > 0)
    return _Chunk(tokens, positions, sequences, slots, cu, last, ends, cache, reservation)


def _prefilled(
    state: DecodeState, run: _Chunk, cache: Any, newest: Float[Array, "B d"]
) -> DecodeState:
    """The state after a chunk: its tokens counted, unless they had no pages."""
    counts = jnp.where(run.reservation.ok, jnp.diff(run.cu_lengths), 0)
    cache = paged.advance(cache, counts)
    return dataclasses.replace(state, cache=cache, hidden=newest, reservation=run.reservation)


def prefill_last(
    decoder: Decoder,
    state: DecodeState,
    prompts: Prompts,
    index: Int32[Array, ""],
    *,
    chunk: int,
    implementation: Implementation | None = None,
) -> DecodeState:
    """Prefill a chunk where only what comes after each prompt's last token is wanted.

    That is `prefill_chunk`, but for a model with a cross-decoder: most tokens leave once they are
    in the cache, and the last ones alone go on (YOCO, arXiv:2405.05254, section 2.3), in chunks
    that have any.

    Args:
      decoder: the model.
      state: the state after the chunks before.
      prompts: the whole stream.
      index: int32, which chunk.
      chunk: C, tokens a chunk, static.
      implementation: of `ragged_paged_attention` and `paged_attention`, or None.

    Returns:
      The state, `hidden` holding the hidden state of each prompt's last token once it was seen.
    """
    config, first = decoder.config, decoder.config.cross_from
    if first is None:
        return prefill_chunk(
            decoder, state, prompts, index, chunk=chunk, implementation=implementation
        )[0]
    run = _chunk(state, prompts, index, chunk)
    where = run.sequences, run.slots
    stores = run.reservation.ok
    attend = chunk_attend(config, run.cache, *where, run.cu_lengths, implementation, stores=stores)
    x, cache = decoder.through(
        range(first), decoder.embedded(run.tokens), run.positions, attend, run.cache
    )
    made = decoder.shared_keys_values(x, run.positions)
    cache = paged.write(cache, first, *made, paged.token_slots(run.cache, *where, first))

    def go_on() -> Array:
        lengths = jnp.where(run.ends, cache.lengths + jnp.diff(run.cu_lengths), 0)
        rows, positions = (z.at[run.last].get(mode="clip") for z in (x, run.positions))
        seen = newest_attend(config, lengths, implementation)
        rest = range(first, len(config.layers))
        rows, _ = decoder.through(rest, rows, positions, seen, cache)
        return jnp.where(run.ends[:, None], decoder.norm(rows), state.hidden)

    newest = jax.lax.cond(jnp.any(run.ends), go_on, lambda: state.hidden)
    return _prefilled(state, run, cache, newest)


def prefill_chunk(
    decoder: Decoder,
    state: DecodeState,
    prompts: Prompts,
    index: Int32[Array, ""],
    *,
    chunk: int,
    implementation: Implementation | None = None,
) -> tuple[DecodeState, Float[Array, "C d"]]:
    """Run the index-th `chunk` tokens of the flat stream, of however many prompts.

    Args:
      decoder: the model.
      state: the state after the chunks before.
      prompts: the whole stream.
      index: int32, which chunk.
      chunk: C, tokens a chunk, static.
      implementation: of `ragged_paged_attention`, or None.

    Returns:
      The state, `hidden` holding the hidden state of each prompt's last token once it was seen;
      and the chunk's hidden states, float32 [C, d].
    """
    run = _chunk(state, prompts, index, chunk)
    attend = chunk_attend(
        decoder.config,
        run.cache,
        run.sequences,
        run.slots,
        run.cu_lengths,
        implementation,
        stores=run.reservation.ok,
    )
    hidden, cache = decoder(run.tokens, run.positions, attend, run.cache)
    at_end = hidden.at[run.last].get(mode="clip")
    newest = jnp.where(run.ends[:, None], at_end, state.hidden)
    return _prefilled(state, run, cache, newest), hidden


def draw(decoder: Decoder, state: DecodeState, rules: Rules) -> DecodeState:
    """Draw each running row's next token from its newest hidden state.

    Args:
      decoder: the model.
      state: after prefill or a decode step.
      rules: how to draw and when to end.
    """
    logits = decoder.logits(state.hidden)
    finite = jnp.all(jnp.isfinite(logits), axis=-1) | ~state.active
    drawn = rules.sampler(logits, rules.key, state.step)
    tokens = jnp.where(state.active, drawn, state.tokens)
    step = state.step + 1
    stop = jnp.any(tokens[:, None] == rules.stop_tokens[None, :], axis=1)
    ended = jnp.where(stop, STOPPED, jnp.where(step >= rules.limits, FULL, RUNNING))
    ended = jnp.where(finite, ended, BROKEN)
    finished = jnp.where(state.active, ended, state.finished).astype(jnp.int32)
    return dataclasses.replace(
        state, tokens=tokens, finished=finished, step=step, finite=state.finite & finite
    )


def decode_step(
    decoder: Decoder,
    state: DecodeState,
    rules: Rules,
    *,
    implementation: Implementation | None = None,
) -> DecodeState:
    """Put each running row's newest token into the cache and draw the next.

    Args:
      decoder: the model.
      state: after `draw`.
      rules: how to draw and when to end.
      implementation: of `paged_attention`, or None.
    """
    active = state.active
    counts = active.astype(jnp.int32)
    cache, reservation = paged.reserve(state.cache, counts, max_count=1)
    stores = active & reservation.ok
    cache = paged.encode_due(cache, stores)
    attend = decode_attend(decoder.config, cache, active, implementation, stores=stores)
    hidden, cache = decoder(state.tokens, cache.next_positions, attend, cache)
    cache = paged.advance(cache, jnp.where(reservation.ok, counts, 0))
    state = dataclasses.replace(state, cache=cache, hidden=hidden, reservation=reservation)
    return draw(decoder, state, rules)
