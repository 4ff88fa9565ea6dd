"""Which pages a layer reads: the K of greatest mass, chosen by KV head, by layer or by period."""

import dataclasses
from typing import Literal, get_args

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from kvjax.errors import KvjaxError
from kvjax.pallas_kernels import select_pages

Who = Literal["head", "layer", "period"]
Aggregate = Literal["sum", "max", "mean", "query"]


@dataclasses.dataclass(frozen=True)
class Choice:
    """Who chooses pages, and what is always in. Hashable, static under jit.

    Attributes:
      who: "head": each KV head chooses for itself; "layer": a layer's heads choose together;
        "period": the first of `period` layers chooses for all of them (ContiguousKV,
        arXiv:2601.13631).
      period: layers that share a choice if `who` is "period".
      aggregate: how query heads that choose together agree: by the "sum", "max" or "mean" of their
        mass; or "query", by turns: each query head names the page of greatest mass to it that it
        has not named yet, those that nobody named before are in, and so on until there are enough.
        In the last turn the pages of greatest mass to any head are in. Quest (arXiv:2406.10774)
        lets each query head read its own pages; here a KV head reads what its query heads name.
      first: how many of the first pages are always in (the attention sinks).
      last: how many of the last live pages are always in.
      pooling: the share of a neighbour's mass that a page counts with if its own is less, 0 to 1.
        What is asked for often begins in the page that a question attends to and goes on in the
        next; SnapKV (arXiv:2404.14469) pools the mass of tokens for the same reason.

    Raises:
      KvjaxError: an unknown `who` or `aggregate`, or a number out of range.
    """

    who: Who = "head"
    period: int = 4
    aggregate: Aggregate = "sum"
    first: int = 1
    last: int = 1
    pooling: float = 0.0

    def __post_init__(self) -> None:
        if self.who not in get_args(Who):
            raise KvjaxError(f"who is {self.who!r}: must be one of {', '.join(get_args(Who))}")
        if self.aggregate not in get_args(Aggregate):
            raise KvjaxError(
                f"aggregate is {self.aggregate!r}: must be one of {', '.join(get_args(Aggregate))}"
            )
        for name, value, least in (
            ("period", self.period, 1),
            ("first", self.first, 0),
            ("last", self.last, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise KvjaxError(f"{name} is {value!r}: must be an integer of at least {least}")
        if not 0 <= self.pooling <= 1:
            raise KvjaxError(f"pooling is {self.pooling!r}: must be a number from 0 to 1")

    def decider(self, layer: int) -> int:
        """The layer whose choice `layer` reads by: its own, or the first of its period.

        Args:
          layer: index of a layer, 0 or more.
        """
        return layer - layer % self.period if self.who == "period" else layer


def select(
    mass: Float32[Array, "Hq N"],
    pages: Int32[Array, ""],
    *,
    room: int,
    kv_heads: int,
    count: Int32[Array, ""] | None = None,
    choice: Choice | None = None,
) -> Int32[Array, "Hkv K"]:
    """The pages of greatest mass for every KV head. Pure, jittable.

    Args:
      mass: float32 [Hq, N], as a sketch's `page_mass` gives it; NaN counts as 0. For a choice by
        layer or period, all heads count alike.
      pages: int32 scalar, live pages; the others are never chosen.
      room: K, static: the most pages that can be chosen, from `choice.first + choice.last` to N.
      kv_heads: Hkv; query head h reads KV head h // (Hq / Hkv).
      count: int32 scalar, how many pages to choose, so that one program serves every budget up to
        K; taken as `choice.first + choice.last` or K where it is out of range. None means K.
      choice: who chooses and what is always in; None means `Choice()`.

    Returns:
      int32 [Hkv, K], page ids, ascending and distinct; after `count` of them, or after all live
      pages where there are fewer, N. Of pages with equal mass the earlier one is chosen. Heads
      that choose together have equal rows.

    Raises:
      KvjaxError: K is out of range or Hkv does not divide Hq. Raised before anything is traced.
    """
    choice = Choice() if choice is None else choice
    heads, num_pages = mass.shape
    forced = choice.first + choice.last
    least = max(forced, 1)
    if isinstance(room, bool) or not isinstance(room, int) or not least <= room <= num_pages:
        raise KvjaxError(
            f"room is {room!r}: must be an integer from {least} (1, or the {forced} pages that are "
            f"always in) to {num_pages}, the pages there are"
        )
    if kv_heads < 1 or heads % kv_heads:
        raise KvjaxError(
            f"kv_heads is {kv_heads}: must divide the {heads} query heads that mass has"
        )
    grouped = mass.reshape(kv_heads if choice.who == "head" else 1, -1, num_pages)
    grouped = jnp.where(jnp.isnan(grouped), 0, grouped)
    if choice.aggregate == "query":
        score = _by_turns(_pooled(grouped, pages, choice.pooling), pages, room, choice)
    elif choice.aggregate == "max":
        score = _pooled(jnp.max(grouped, axis=1), pages, choice.pooling)
    elif choice.aggregate == "mean":
        score = _pooled(jnp.mean(grouped, axis=1), pages, choice.pooling)
    else:
        score = _pooled(jnp.sum(grouped, axis=1), pages, choice.pooling)
    budgets = None if count is None else jnp.broadcast_to(count, score[None, :, 0].shape)
    chosen = select_pages(
        score[None],
        pages[None],
        room=room,
        sink_pages=choice.first,
        recent_pages=choice.last,
        budgets=budgets,
    )
    return jnp.broadcast_to(chosen.pages[0], (kv_heads, room))


def _by_turns(
    mass: Float32[Array, "H G N"], pages: Int32[Array, ""], room: int, choice: Choice
) -> Float32[Array, "H N"]:
    """Scores that fall in the order in which G heads name pages.

    Pages that are always in are not named, and have the lowest scores, as those that do not exist.
    """
    heads, group, num_pages = mass.shape
    page = jnp.arange(num_pages, dtype=jnp.int32)
    free = (page >= choice.first) & (page < pages - choice.last)
    mass = jnp.where(free[None, None], mass, -jnp.inf)
    named = lax.top_k(mass, room)[1].reshape(heads, -1)  # K turns fill any list
    turn = jnp.tile(jnp.arange(room, dtype=jnp.int32), group)
    head = jnp.arange(heads, dtype=jnp.int32)[:, None]
    first = jnp.full((heads, num_pages), room, jnp.int32).at[head, named].min(turn[None])
    keys = (first, -jnp.max(mass, axis=1), jnp.broadcast_to(page, first.shape))
    order = lax.sort(keys, dimension=1, is_stable=True, num_keys=2)[2]
    falling = -page.astype(jnp.float32)
    return jnp.zeros((heads, num_pages), jnp.float32).at[head, order].set(falling[None])


def _pooled(
    score: Float32[Array, "*H N"], pages: Int32[Array, ""], share: float
) -> Float32[Array, "*H N"]:
    """The greater of a page's own mass and a share of a live neighbour's."""
    if not share:
        return score
    live = jnp.arange(score.shape[-1], dtype=jnp.int32) < pages
    score = jnp.where(jnp.broadcast_to(live, score.shape), score, 0)
    sides = ((0, 0),) * (score.ndim - 1)
    before = jnp.pad(score, (*sides, (1, 0)))[..., :-1]
    after = jnp.pad(score, (*sides, (0, 1)))[..., 1:]
    return jnp.maximum(score, share * jnp.maximum(before, after))
