"""The device's part of sequences whose pages live elsewhere, as a value."""

import dataclasses
import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache import PagedKVCache
from kvjax.cache.residency import Eviction, Residency, nothing_near
from kvjax.decode import tiered_layers
from kvjax.decode.latent_rows import LatentRows
from kvjax.decode.tiered_choice import index_pages
from kvjax.decode.tiered_index import build_index
from kvjax.decode.tiered_sinks import Sinks
from kvjax.formats import Format
from kvjax.pallas_kernels.support import Implementation
from kvjax.policies import Choice, DistilledIndexer, PageIndex
from kvjax.policies.lightning_indexer import IndexerWeights
from kvjax.spec import KVSpec

T = TypeVar("T")

Learned = tuple[IndexerWeights | None, ...]
"""Weights of a distilled indexer, by layer; empty where none chooses."""


@dataclasses.dataclass(frozen=True)
class TieredShapes:
    """The static facts of a tiered program; equal shapes share one program."""

    spec: KVSpec
    batch: int  # B, rows, a power of two
    tokens: int  # T, that a prompt has room for, a multiple of the page size
    pages: int  # N, most pages of a row
    page_size: int
    room: int  # K, pages that a KV head may choose in a step
    slots: tuple[tuple[int, ...], ...]  # by layer that chooses and KV head, the open page's too
    output: int  # tokens that a row has room to draw
    fetches: bool  # whether pages can be elsewhere; if not, S is N
    stored: bool  # whether some of them are in a store, whose reads begin before they are needed
    keeps: bool  # whether pages stay near from step to step
    evict: Eviction
    observe: int  # last tokens of a prompt that say what is near at first
    micro_batches: int  # parts of the batch that pages are selected and read for apart
    index: PageIndex | DistilledIndexer | None  # the latter's form; None: the model's own indexer
    choice: Choice
    attention: Implementation | None
    format: Format | None = None  # how full pages are kept
    hot_exact: bool = False  # whether pages are as the model made them until they leave

    @property
    def selecting(self) -> tuple[int, ...]:
        """Layers that choose pages; the others have a sliding window."""
        return tiered_layers.selecting_layers(self.spec)

    @property
    def leaving(self) -> tuple[int, ...]:
        """Layers whose pages leave the device, in the order in which they are kept elsewhere.

        Those that choose; all of them where a store keeps a prompt as other calls would find it.
        """
        whole = self.stored and self.format is None
        return tuple(range(len(self.spec.layers))) if whole else self.selecting

    @property
    def latents(self) -> LatentRows | None:
        """How pages of latents leave the device; None where layers keep keys and values."""
        kept = all(layer.kind == "mla" for layer in self.spec.layers)
        return LatentRows(self.spec, self.page_size) if kept else None

    def scored(
        self, keys: Float[Array, "*n Hkv D"], values: Float[Array, "*n Hkv Dv"]
    ) -> Float[Array, "*n Hkv Dk"]:
        """What queries score of tokens: their keys; of latents, these and the position keys.

        Args:
          keys: as pools hold them.
          values: likewise.
        """
        return keys if self.latents is None else jnp.concatenate([values, keys], axis=-1)

    def index_of(self, layer: int, learned: Learned) -> PageIndex | None:
        """What a layer's pages are chosen by; None where that is the model's own indexer.

        Args:
          layer: one of `selecting`.
          learned: of the cache.
        """
        if not isinstance(self.index, DistilledIndexer):
            return self.index
        form, weights = self.index.layers[layer], learned[layer]
        assert form is not None
        assert weights is not None
        return form.with_weights(weights)

    def place(self, layer: int) -> int:
        """Which of the layers that choose pages a layer is."""
        return self.selecting.index(layer)

    def slots_of(self, layer: int) -> tuple[int, ...]:
        """Slots of a layer's KV heads."""
        return self.slots[self.place(layer)]

    def most_slots(self, layer: int) -> int:
        """S, of the layer's KV head that has most."""
        return max(self.slots_of(layer))

    def ring_pages(self, layer: int) -> int:
        """R, pages of a row that a layer with a sliding window keeps."""
        window = self.spec.layers[layer].window
        assert window is not None
        return tiered_layers.ring_pages(window, self.page_size, self.pages)

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
    """Pages that each choosing layer's KV heads chose, counted over steps and rows."""

    chosen: Int32[Array, "L Hkv"]
    missed: Int32[Array, "L Hkv"]  # of these, how many were not near
    tokens: Int32[Array, " L"]  # that the model's own indexer chose in them


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TieredCache:
    """Slots, what is in them, and what pages are chosen by; one entry a layer.

    A pool is flat in the pages of single KV heads: F = B x the slots of all heads, row after row,
    head after head, so that each head may have slots of its own. `near` is as wide as the layer's
    widest head; what is past a head's limit stays empty. A layer with a sliding window has pages of
    all its heads, [B x R, Hkv, P, D], and nothing else: its other entries are empty.
    """

    keys: tuple[Float[Array, "F 1 P D"] | Float[Array, "R Hkv P D"], ...]
    values: tuple[Float[Array, "F 1 P Dv"] | Float[Array, "R Hkv P Dv"], ...]
    sinks: tuple[Sinks, ...]
    near: tuple[Residency, ...]
    learned: Learned
    index_keys: PagedKVCache | None  # of a model's own indexer: see `index_pages`
    limits: Int32[Array, "L Hkv"]  # slots that heads of choosing layers may use, at most all
    index: tuple[dict[str, Array], ...]  # [B, ...]
    lengths: Int32[Array, " B"]  # tokens of each row
    counts: Int32[Array, " B"]  # pages that each row chooses in a step, at most K
    handle: Int32[Array, ""]  # of the pages that are elsewhere
    written: Int32[Array, ""]  # changes with every write to them, so that reads come after it
    traffic: Traffic


def empty_tiers(shapes: TieredShapes, learned: Learned) -> TieredCache:
    """The cache before any prompt.

    Args:
      shapes: the program's.
      learned: what its pages are chosen by, if that was learned.
    """
    spec, batch, pages = shapes.spec, shapes.batch, shapes.pages
    layers = range(len(spec.layers))

    def pool(layer: int, width: int) -> Array:
        if layer in shapes.selecting:
            count, heads = sum(shapes.slots_of(layer)), 1
        else:
            count, heads = shapes.ring_pages(layer), spec.layers[layer].pool_dims[0]
        return jnp.zeros((batch * count, heads, shapes.page_size, width), spec.dtype)

    def no_sinks(layer: int) -> Sinks:
        heads, *dims = spec.layers[layer].pool_dims
        first = shapes.sink_pages if layer in shapes.selecting else 0
        shape = (batch, first, heads, shapes.page_size)
        return Sinks(*(jnp.zeros((*shape, width), spec.dtype) for width in dims))

    def near(layer: int) -> Residency:
        if layer not in shapes.selecting:
            return nothing_near(batch, 0, pages=0, slots=0)
        heads = len(shapes.slots_of(layer))
        return nothing_near(batch, heads, pages=pages, slots=shapes.most_slots(layer))

    def empty_index(layer: int) -> dict[str, Array]:
        index = shapes.index_of(layer, learned) if layer in shapes.selecting else None
        if index is None:
            return {}
        heads, width, value_width = spec.layers[layer].pool_dims
        scored = width if shapes.latents is None else value_width + width
        keys, values = (
            jax.ShapeDtypeStruct((pages, heads, shapes.page_size, each), jnp.dtype(spec.dtype))
            for each in (scored, value_width)
        )
        some = jax.ShapeDtypeStruct((), jnp.int32)
        of_layer = functools.partial(build_index, index)
        made = jax.eval_shape(of_layer, keys, values, some)
        return {name: jnp.zeros((batch, *x.shape), x.dtype) for name, x in made.items()}

    zero, limits = jnp.int32(0), jnp.asarray(shapes.slots, jnp.int32)
    return TieredCache(
        keys=tuple(pool(i, spec.layers[i].pool_dims[1]) for i in layers),
        values=tuple(pool(i, spec.layers[i].pool_dims[2]) for i in layers),
        sinks=tuple(no_sinks(i) for i in layers),
        near=tuple(near(i) for i in layers),
        learned=learned,
        index_keys=None
        if shapes.index is not None
        else index_pages(spec, batch=batch, pages=pages, page_size=shapes.page_size),
        limits=limits,
        index=tuple(empty_index(i) for i in layers),
        lengths=jnp.zeros((batch,), jnp.int32),
        counts=jnp.zeros((batch,), jnp.int32),
        handle=zero,
        written=zero,
        traffic=Traffic(
            jnp.zeros_like(limits), jnp.zeros_like(limits), jnp.zeros_like(limits[:, 0])
        ),
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
        with_pools(cache, layer, keys, values),
        sinks=_replaced(cache.sinks, layer, sinks),
        near=_replaced(cache.near, layer, near),
        index=_replaced(cache.index, layer, index),
    )


def with_pools(cache: TieredCache, layer: int, keys: Array, values: Array) -> TieredCache:
    """The cache with one layer's pools replaced.

    Args:
      cache: before.
      layer: which.
      keys: its pool.
      values: its pool.
    """
    return dataclasses.replace(
        cache,
        keys=_replaced(cache.keys, layer, keys),
        values=_replaced(cache.values, layer, values),
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
    own = shapes.slots_of(layer)
    first = jnp.asarray([sum(own[:head]) for head in range(len(own))], jnp.int32)
    at = rows[:, None, None] * sum(own) + first[None, :, None] + slots
    return jnp.where(slots < max(own), at, shapes.batch * sum(own))


def usable(shapes: TieredShapes, cache: TieredCache, layer: int) -> Bool[Array, "Hkv S"]:
    """The slots that a layer's KV heads may use.

    Args:
      shapes: the program's.
      cache: for the limits.
      layer: which.
    """
    slot = jnp.arange(shapes.most_slots(layer), dtype=jnp.int32)
    return slot[None] < cache.limits[shapes.place(layer)][:, None]


def counted(
    traffic: Traffic,
    layer: int,
    chosen: Bool[Array, "B Hkv K"],
    missed: Bool[Array, "B Hkv K"],
    tokens: Int32[Array, ""],
) -> Traffic:
    """Traffic with one layer's step added.

    Args:
      traffic: before.
      layer: which of those that choose pages.
      chosen: which entries are pages.
      missed: which of them were not near.
      tokens: int32, how many in them the model's own indexer chose.
    """
    return Traffic(
        traffic.chosen.at[layer].add(jnp.sum(chosen, axis=(0, 2), dtype=jnp.int32)),
        traffic.missed.at[layer].add(jnp.sum(missed, axis=(0, 2), dtype=jnp.int32)),
        traffic.tokens.at[layer].add(tokens),
    )
