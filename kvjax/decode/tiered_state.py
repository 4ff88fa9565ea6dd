"""The device's part of sequences whose pages live elsewhere, as a value."""

import dataclasses
import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache.residency import Eviction, Residency, nothing_near
from kvjax.decode.tiered_index import build_index
from kvjax.decode.tiered_sinks import Sinks
from kvjax.formats import Format
from kvjax.pallas_kernels.support import Implementation
from kvjax.policies import Choice, PageIndex
from kvjax.spec import KVSpec

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class TieredShapes:
    """The static facts of a tiered program; equal shapes share one program."""

    spec: KVSpec
    batch: int  # B, rows, a power of two
    tokens: int  # T, that a prompt has room for, a multiple of the page size
    pages: int  # N, most pages of a row
    page_size: int
    room: int  # K, pages that a KV head may choose in a step
    slots: tuple[tuple[int, ...], ...]  # of a row, by layer and KV head, the open page's included
    output: int  # tokens that a row has room to draw
    fetches: bool  # whether pages can be elsewhere; if not, S is N
    stored: bool  # whether some of them are in a store, whose reads begin before they are needed
    keeps: bool  # whether pages stay near from step to step
    evict: Eviction
    observe: int  # last tokens of a prompt that say what is near at first
    micro_batches: int  # parts of the batch that pages are selected and read for apart
    index: PageIndex
    choice: Choice
    attention: Implementation | None
    format: Format | None = None  # how full pages are kept
    hot_exact: bool = False  # whether pages are as the model made them until they leave

    def most_slots(self, layer: int) -> int:
        """S, of the layer's KV head that has most."""
        return max(self.slots[layer])

    @property
    def sink_pages(self) -> int:
        """S, first pages of a row that stay as they are."""
        return 0 if self.format is None else sink_pages(self.format, self.page_size, self.pages)

    @property
    def row_pages(self) -> int:
        """Pages of all layers and KV heads that a row's slots hold, rounded up."""
        heads = sum(map(len, self.slots))
        return -(-sum(map(sum, self.slots)) // heads)

    @property
    def num_pages(self) -> int:
        """Pages that all rows' slots hold."""
        return self.batch * self.row_pages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Traffic:
    """Pages that each layer's KV heads chose, counted over steps and rows."""

    chosen: Int32[Array, "L Hkv"]
    missed: Int32[Array, "L Hkv"]  # of these, how many were not near


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TieredCache:
    """Slots, what is in them, and what pages are chosen by; one entry a layer.

    A pool is flat in the pages of single KV heads: F = B x the slots of all heads, row after row,
    head after head, so that each head may have slots of its own. `near` is as wide as the layer's
    widest head; what is past a head's limit stays empty.
    """

    keys: tuple[Float[Array, "F 1 P D"], ...]
    values: tuple[Float[Array, "F 1 P Dv"], ...]
    sinks: tuple[Sinks, ...]
    near: tuple[Residency, ...]
    limits: Int32[Array, "L Hkv"]  # slots that each head may use, at most those it has
    index: tuple[dict[str, Array], ...]  # [B, ...]
    lengths: Int32[Array, " B"]  # tokens of each row
    counts: Int32[Array, " B"]  # pages that each row chooses in a step, at most K
    handle: Int32[Array, ""]  # of the pages that are elsewhere
    written: Int32[Array, ""]  # changes with every write to them, so that reads come after it
    traffic: Traffic


def empty_tiers(shapes: TieredShapes) -> TieredCache:
    """The cache before any prompt.

    Args:
      shapes: the program's.
    """
    spec, batch, pages = shapes.spec, shapes.batch, shapes.pages
    layers = range(len(spec.layers))

    def pool(layer: int, width: int) -> Array:
        shape = (batch * sum(shapes.slots[layer]), 1, shapes.page_size, width)
        return jnp.zeros(shape, spec.dtype)

    def no_sinks(layer: int) -> Sinks:
        of = spec.layers[layer]
        shape = (batch, shapes.sink_pages, of.kv_heads, shapes.page_size)
        dims = of.head_dim, of.value_dim
        return Sinks(*(jnp.zeros((*shape, width), spec.dtype) for width in dims))

    def empty_index(layer: int) -> dict[str, Array]:
        of, dtype = spec.layers[layer], jnp.dtype(spec.dtype)
        keys, values = (
            jax.ShapeDtypeStruct((pages, of.kv_heads, shapes.page_size, width), dtype)
            for width in (of.head_dim, of.value_dim)
        )
        some = jax.ShapeDtypeStruct((), jnp.int32)
        made = jax.eval_shape(functools.partial(build_index, shapes.index), keys, values, some)
        return {name: jnp.zeros((batch, *x.shape), x.dtype) for name, x in made.items()}

    zero, counts = jnp.int32(0), jnp.zeros((len(layers), spec.layers[0].kv_heads), jnp.int32)
    return TieredCache(
        keys=tuple(pool(i, spec.layers[i].head_dim) for i in layers),
        values=tuple(pool(i, spec.layers[i].value_dim) for i in layers),
        sinks=tuple(no_sinks(i) for i in layers),
        near=tuple(
            nothing_near(batch, len(shapes.slots[i]), pages=pages, slots=shapes.most_slots(i))
            for i in layers
        ),
        limits=jnp.asarray(shapes.slots, jnp.int32),
        index=tuple(empty_index(i) for i in layers),
        lengths=jnp.zeros((batch,), jnp.int32),
        counts=jnp.zeros((batch,), jnp.int32),
        handle=zero,
        written=zero,
        traffic=Traffic(counts, counts),
    )


def sink_pages(page_format: Format, page_size: int, pages: int) -> int:
    """First pages of a row that a format leaves as they are.

    Args:
      page_format: the format.
      page_size: tokens a page.
      pages: most pages of a row.
    """
    return min(page_format.sink_tokens(page_size) // page_size, pages)


def with_layer(
    cache: TieredCache,
    layer: int,
    *,
    keys: Array,
    values: Array,
    sinks: Sinks,
    near: Residency,
    index: dict[str, Array],
) -> TieredCache:
    """The cache with one layer's arrays replaced.

    Args:
      cache: before.
      layer: which.
      keys: its pool.
      values: its pool.
      sinks: its pages that never leave.
      near: what is in its slots.
      index: what its pages are chosen by.
    """
    return dataclasses.replace(
        cache,
        keys=_replaced(cache.keys, layer, keys),
        values=_replaced(cache.values, layer, values),
        sinks=_replaced(cache.sinks, layer, sinks),
        near=_replaced(cache.near, layer, near),
        index=_replaced(cache.index, layer, index),
    )


def _replaced(old: tuple[T, ...], layer: int, new: T) -> tuple[T, ...]:
    return (*old[:layer], new, *old[layer + 1 :])


def slot_rows(
    shapes: TieredShapes,
    layer: int,
    slots: Int32[Array, "b Hkv K"],
    rows: Int32[Array, " b"],
) -> Int32[Array, "b Hkv K"]:
    """Where slots are in a layer's pools; F, past all of them, where a slot is none.

    Args:
      shapes: the program's.
      layer: whose pools.
      slots: int32 [b, Hkv, K]; S is none.
      rows: int32 [b], the batch's rows that they are of.
    """
    own = shapes.slots[layer]
    first = jnp.asarray([sum(own[:head]) for head in range(len(own))], jnp.int32)
    at = rows[:, None, None] * sum(own) + first[None, :, None] + slots
    return jnp.where(slots < max(own), at, shapes.batch * sum(own))


def usable(cache: TieredCache, layer: int) -> Bool[Array, "Hkv S"]:
    """The slots that a layer's KV heads may use.

    Args:
      cache: for the limits.
      layer: which.
    """
    slot = jnp.arange(cache.near[layer].page_in.shape[2], dtype=jnp.int32)
    return slot[None] < cache.limits[layer][:, None]


def counted(
    traffic: Traffic,
    layer: int,
    chosen: Bool[Array, "B Hkv K"],
    missed: Bool[Array, "B Hkv K"],
) -> Traffic:
    """Traffic with one layer's step added.

    Args:
      traffic: before.
      layer: which.
      chosen: which entries are pages.
      missed: which of them were not near.
    """
    return Traffic(
        traffic.chosen.at[layer].add(jnp.sum(chosen, axis=(0, 2), dtype=jnp.int32)),
        traffic.missed.at[layer].add(jnp.sum(missed, axis=(0, 2), dtype=jnp.int32)),
    )
