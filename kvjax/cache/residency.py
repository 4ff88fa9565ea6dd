"""Which pages of a layer are near: slots of a pool, looked up and handed out by pure functions."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

Eviction = Literal["lookahead", "lru", "lfu"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residency:
    """The pages in each KV head's S slots, of N pages that a sequence may have."""

    slot_of: Int32[Array, "B Hkv N"]  # S where the page is not near
    page_in: Int32[Array, "B Hkv S"]  # N where the slot is empty
    rank: Float32[Array, "B Hkv S"]  # the least is evicted first


def nothing_near(batch: int, kv_heads: int, *, pages: int, slots: int) -> Residency:
    """All slots empty.

    Args:
      batch: B, sequences.
      kv_heads: Hkv.
      pages: N, most pages of a sequence.
      slots: S of each sequence and KV head.
    """
    return Residency(
        slot_of=jnp.full((batch, kv_heads, pages), slots, jnp.int32),
        page_in=jnp.full((batch, kv_heads, slots), pages, jnp.int32),
        rank=jnp.zeros((batch, kv_heads, slots), jnp.float32),
    )


def find(near: Residency, pages: Int32[Array, "B Hkv K"]) -> Int32[Array, "B Hkv K"]:
    """The slots that hold pages; S for those that are not near, and for what is no page.

    Args:
      near: what is near.
      pages: int32 [B, Hkv, K]; N or more is no page.
    """
    total, slots = near.slot_of.shape[2], near.page_in.shape[2]
    found = jnp.take_along_axis(near.slot_of, jnp.clip(pages, 0, total - 1), axis=2)
    return jnp.where((pages >= 0) & (pages < total), found, slots)


def used(near: Residency, slots: Int32[Array, "B Hkv K"]) -> Bool[Array, "B Hkv S"]:
    """Which slots are among those given.

    Args:
      near: what is near.
      slots: int32 [B, Hkv, K]; S or more is none.
    """
    return jnp.zeros(near.page_in.shape, bool).at[_rows(slots)].set(True, mode="drop")


def ranked(
    near: Residency,
    evict: Eviction,
    *,
    mass: Float32[Array, "B Hkv N"],
    read: Bool[Array, "B Hkv S"],
    step: Int32[Array, ""],
) -> Residency:
    """What the pages in slots are worth after a step has chosen.

    Args:
      near: what is near, before what the step fetches.
      evict: "lookahead" ranks by the attention of this step, "lru" by the last step that read a
        page, "lfu" by how many steps have.
      mass: float32 [B, Hkv, N], attention that each page gets in this step.
      read: bool [B, Hkv, S], slots that this step reads.
      step: int32, 1 for the first step.
    """
    if evict == "lookahead":
        total = near.slot_of.shape[2]
        rank = jnp.take_along_axis(mass, jnp.clip(near.page_in, 0, total - 1), axis=2)
    elif evict == "lru":
        rank = jnp.where(read, step.astype(jnp.float32), near.rank)
    else:
        rank = near.rank + read.astype(jnp.float32)
    return dataclasses.replace(near, rank=rank)


def admit(
    near: Residency,
    pages: Int32[Array, "B Hkv K"],
    rank: Float32[Array, "B Hkv K"],
    keep: Bool[Array, "B Hkv S"],
) -> tuple[Residency, Int32[Array, "B Hkv K"]]:
    """Give pages the slots of those that rank least; empty slots, and NaN ranks, go first.

    Args:
      near: what is near.
      pages: int32 [B, Hkv, K], distinct and not near; N or more is none.
      rank: float32 [B, Hkv, K], of the new pages.
      keep: bool [B, Hkv, S], slots that are not to be taken; the others must be enough.

    Returns:
      The residency, and int32 [B, Hkv, K], the slot of each page; S where there is none.
    """
    total = near.slot_of.shape[2]
    slots, count = near.page_in.shape[2], pages.shape[2]
    worthless = (near.page_in >= total) | jnp.isnan(near.rank)
    order = jnp.where(keep, jnp.inf, jnp.where(worthless, -jnp.inf, near.rank))
    free = jax.lax.top_k(-order, min(count, slots))[1].astype(jnp.int32)
    wanted = (pages >= 0) & (pages < total)
    place = jnp.cumsum(wanted, axis=2, dtype=jnp.int32) - 1
    taken = jnp.take_along_axis(free, jnp.clip(place, 0, free.shape[2] - 1), axis=2)
    taken = jnp.where(wanted & (place < free.shape[2]), taken, slots)
    wanted = taken < slots
    evicted = jnp.take_along_axis(near.page_in, jnp.clip(taken, 0, slots - 1), axis=2)
    evicted = jnp.where(wanted, evicted, total)
    slot_of = near.slot_of.at[_rows(evicted)].set(slots, mode="drop")
    slot_of = slot_of.at[_rows(jnp.where(wanted, pages, total))].set(taken, mode="drop")
    return (
        Residency(
            slot_of=slot_of,
            page_in=near.page_in.at[_rows(taken)].set(pages, mode="drop"),
            rank=near.rank.at[_rows(taken)].set(rank, mode="drop"),
        ),
        taken,
    )


def only(near: Residency, keep: Bool[Array, "B Hkv S"]) -> Residency:
    """Forget what is in the other slots (use and drop).

    Args:
      near: what is near.
      keep: bool [B, Hkv, S].
    """
    total, slots = near.slot_of.shape[2], near.page_in.shape[2]
    gone = jnp.where(keep, total, near.page_in)
    slot_of = near.slot_of.at[_rows(gone)].set(slots, mode="drop")
    return dataclasses.replace(near, slot_of=slot_of, page_in=jnp.where(keep, near.page_in, total))


def _rows(last: Int32[Array, "B Hkv K"]) -> tuple[Array, Array, Array]:
    """Indices of all entries of [B, Hkv, K] but for the last axis."""
    batch, heads, _ = last.shape
    row = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    return row, jnp.arange(heads, dtype=jnp.int32)[None, :, None], last
