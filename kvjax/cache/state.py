"""The paged KV cache as a value: pools of pages, block tables, lengths, and who holds what."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, UInt8

from kvjax.errors import KvjaxError, PoolExhaustedError, check_integer
from kvjax.formats import Format, empty_pages
from kvjax.pallas_kernels.packed_pages import KeyPool, ValuePool
from kvjax.pallas_kernels.validate import FLOATS, MAX_INT32
from kvjax.spec import INDEX_FLOAT4, KVSpec, LayerSpec

COUNTS, STARTS, SEQUENCES, RING = 1, 2, 3, 4
"""What was asked wrongly: tokens to reserve, starts in a chunk, sequences to fork, more tokens at
once than rings have room for; 0 is nothing."""

_WRONG = {
    COUNTS: "counts must be 0 to max_count tokens a sequence: give reserve the largest count as "
    "max_count, or None",
    STARTS: "cu_lengths must start at 0, never fall, and end within the keys' tokens",
    SEQUENCES: "fork needs two different sequences, each from 0 to {last}, as source and target",
    RING: "counts must be 0 to {most} tokens a sequence where layers with a window keep rings, or "
    "its first tokens' windows would be overwritten: append fewer at once, or make the cache with "
    "a larger window_chunk",
}


Integers = Int[Array, " B"] | Int[np.ndarray, " B"] | Sequence[int]
"""One integer a sequence, of any width; they are kept as int32."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recent:
    """The tokens of each sequence that are as they were made, where others are packed.

    S sinks, then the R newest: see `PagedKVCache.recent_row`.
    """

    keys: Float[Array, "B S+R Hkv D"]
    values: Float[Array, "B S+R Hkv Dv"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexPages:
    """One layer's index keys (DSA), in the pages of its latents: what tokens are chosen by."""

    keys: Float[Array, "N 1 P Di"] | UInt8[Array, "N 1 half Di"]  # 4 bits: two tokens a byte
    scales: Float32[Array, "N 1 P"] | None  # what keys of 8 or 4 bits are multiplied by; else None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKVCache:
    """Keys and values of B sequences in N pages of P slots, one pool a layer.

    A page id names the same page in every layer. A page that several sequences hold is read-only;
    only a sequence's last page, held by it alone, is written. A layer with a format has packed
    pools, whose pages are written once, each when it leaves the sequence's newest tokens; those,
    and the first if the format says so, stand in `recent` as the model made them. A layer of kind
    "mla" has pools of one head: rotated position keys in place of keys, and latents in place of
    values. A layer that is shared with an earlier one (YOCO) has no pools: see `pools`. A layer
    with a sliding window may have R pages for each sequence in place of N for all, a ring: its page
    j is then at j modulo R of these, see `tables`. A layer of kind "retention" has no pools but a
    state for each sequence. Update the cache with the functions of this
    package, or with `dataclasses.replace`; donate it to a jitted function and the pools are updated
    in place.
    """

    k_pages: tuple[KeyPool | None, ...]  # one layer's keys, position encoding applied; see `pools`
    v_pages: tuple[ValuePool | None, ...]  # one layer's values
    block_tables: Int32[Array, "B M"]  # the pages of each sequence in order; N where there is none
    lengths: Int32[Array, " B"]  # tokens written, a sequence
    skipped: Int32[Array, " B"]  # tokens before the last that are not here: position = slot + this
    page_refs: Int32[Array, " N"]  # how many sequences hold each page; 0 is free
    recent: tuple[Recent | None, ...]  # one layer's sinks and newest; None where pools are plain
    index_pages: tuple[IndexPages | None, ...]  # one layer's index keys; None where it has none
    states: tuple[Float32[Array, "B H D Dv"] | None, ...]  # one layer's; None where it has pages
    spec: KVSpec = dataclasses.field(metadata={"static": True})
    format: Format | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def recent_tokens(self) -> int:
        """R: most newest tokens of a sequence that are not encoded, in layers with a format."""
        rows = next(recent.keys.shape[1] for recent in self.recent if recent is not None)
        return rows - self.sink_tokens

    @property
    def sink_tokens(self) -> int:
        """S: first tokens of a sequence that are never encoded, in layers with a format."""
        return 0 if self.format is None else _sinks(self.format, self.page_size, self.max_pages)

    def recent_row(self, slots: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
        """The row of `recent` where the token of a slot stands, while it is not encoded.

        Args:
          slots: int32, of any shape.
        """
        sinks = self.sink_tokens
        return jnp.where(slots < sinks, slots, sinks + slots % self.recent_tokens)

    def pools(self, layer: int) -> tuple[KeyPool, ValuePool]:
        """The keys and values that a layer reads: its own, or those of the layer it shares with.

        Args:
          layer: index of the layer.
        """
        source = self.spec.source(layer)
        keys, values = self.k_pages[source], self.v_pages[source]
        assert keys is not None
        assert values is not None
        return keys, values

    def ring(self, layer: int) -> int:
        """R: pages of each sequence in a layer that keeps the last ones only; 0 where all are kept.

        Args:
          layer: index of the layer.
        """
        if self.states[layer] is not None:
            return 0
        pages = self.pools(layer)[0].shape[0]
        return pages // self.batch if pages < self.num_pages else 0

    @property
    def most_at_once(self) -> int | None:
        """Most tokens of a sequence that may come at once; None where no layer keeps a ring.

        The last of them must not take the page of what the window of the first one reaches.
        """
        rings = ((layer.window, self.ring(index)) for index, layer in enumerate(self.spec.layers))
        room = [
            (ring - 1) * self.page_size - window + 2
            for window, ring in rings
            if ring and window is not None
        ]
        return min(room, default=None)

    def tables(self, layer: int) -> Int32[Array, "B M"]:
        """The pages of each sequence in one layer's pools, in order; N where there is none.

        Where the layer keeps a ring, an entry behind its last R pages names a page that holds newer
        tokens by now: for a window that does not reach there, it does not matter.

        Args:
          layer: index of the layer.
        """
        ring = self.ring(layer)
        if not ring:
            return self.block_tables
        row = jnp.arange(self.batch, dtype=jnp.int32)[:, None]
        place = row * ring + jnp.arange(self.max_pages, dtype=jnp.int32)[None, :] % ring
        return jnp.where(self.block_tables < self.num_pages, place, self.num_pages)

    @property
    def num_pages(self) -> int:
        """N: pages in the pool, and the id that stands for "no page"."""
        return self.page_refs.shape[0]

    @property
    def page_size(self) -> int:
        """P: tokens a page."""
        return next(pool.shape[2] for pool in self.k_pages if pool is not None)

    @property
    def batch(self) -> int:
        """B: sequences."""
        return self.lengths.shape[0]

    @property
    def max_pages(self) -> int:
        """M: pages a sequence can have."""
        return self.block_tables.shape[1]

    @property
    def next_positions(self) -> Int32[Array, " B"]:
        """The logical position of each sequence's next token, skipped tokens counted."""
        return self.lengths + self.skipped

    @property
    def pages_held(self) -> Int32[Array, " B"]:
        """How many pages each sequence holds, reserved ones included."""
        return jnp.sum(self.block_tables < self.num_pages, axis=1, dtype=jnp.int32)

    @property
    def pages_free(self) -> Int32[Array, ""]:
        """How many pages nobody holds."""
        return jnp.sum(self.page_refs == 0, dtype=jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reservation:
    """What became of a request for pages. Where `ok` is false, nothing was changed."""

    ok: Bool[Array, ""]  # asked rightly, every page was there, every block table wide enough
    needed: Int32[Array, ""]  # pages asked for
    free: Int32[Array, ""]  # pages that were free
    longest: Int32[Array, ""]  # pages the longest sequence would have had
    wrong: Int32[Array, ""]  # what was asked wrongly: COUNTS, STARTS or SEQUENCES; 0 if nothing

    def check(self, cache: PagedKVCache) -> None:
        """Raise, outside jit, if the reservation failed.

        Args:
          cache: the cache that was asked, for its sizes.

        Raises:
          KvjaxError: the request made no sense, or a sequence would have outgrown its block table.
          PoolExhaustedError: there were too few free pages; it carries both numbers.
        """
        if bool(self.ok):
            return
        if int(self.wrong):
            raise KvjaxError(
                _WRONG[int(self.wrong)].format(last=cache.batch - 1, most=cache.most_at_once)
            )
        needed, free, longest = int(self.needed), int(self.free), int(self.longest)
        if longest > cache.max_pages:
            raise KvjaxError(
                f"a sequence needs {longest} pages of {cache.page_size} tokens, but max_pages is "
                f"{cache.max_pages}: make the cache with max_pages={longest} or more"
            )
        raise PoolExhaustedError(
            f"the page pool is exhausted: {needed} more pages of {cache.page_size} tokens are "
            f"needed and {free} of {cache.num_pages} are free; raise num_pages to "
            f"{cache.num_pages + needed - free} or more, or release sequences",
            needed=needed,
            free=free,
        )


def init(
    spec: KVSpec,
    *,
    num_pages: int,
    batch: int,
    max_pages: int,
    page_size: int = 16,
    format: Format | None = None,
    window_chunk: int | None = None,
) -> PagedKVCache:
    """An empty cache.

    Args:
      spec: what a token stores in each layer, and in which dtype.
      num_pages: N, pages in each layer's pool, shared by all sequences.
      batch: B, sequences.
      max_pages: M, pages one sequence can have.
      page_size: P, tokens a page.
      format: how full pages are stored; None stores them in the spec's dtype.
      window_chunk: most tokens of a sequence that come at once; `reserve` refuses more than rings
        have room for. If it is given, layers with a window keep a ring of pages for each sequence,
        as many as the window reaches into from any of such tokens, where that is less than N
        pages; None keeps all pages in all layers.

    Returns:
      The cache; its pools take `num_pages * spec.bytes_per_page(page_size)` bytes, or as many
      pages of the format's bytes, and the newest tokens of each sequence.

    Raises:
      KvjaxError: a size is below 1, a pool is too large to index, the spec's dtype is one that
        pools do not hold, or the format cannot pack its pages, or is given where layers are
        shared or keep rings.
    """
    sizes = {"num_pages": num_pages, "batch": batch, "max_pages": max_pages, "page_size": page_size}
    for name, value in sizes.items():
        check_integer(name, value, 1)
    if window_chunk is not None:
        check_integer("window_chunk", window_chunk, 1, ", or None")
    check_pools(spec, num_pages, page_size, batch=batch, window_chunk=window_chunk)
    if format is not None:
        check_packable(spec, window_chunk)
        format.check(spec, page_size)
    dtype = jnp.dtype(spec.dtype)
    k_pages: list[KeyPool | None] = []
    v_pages: list[ValuePool | None] = []
    recent: list[Recent | None] = []
    for index, layer in enumerate(spec.layers):
        if not layer.elements_per_token:
            k_pages.append(None)
            v_pages.append(None)
            recent.append(None)
            continue
        packed = None if format is None else format.layer(spec, index)
        heads, *dims = layer.pool_dims
        if format is None or packed is None:
            pages = _pages_of(layer, num_pages, page_size, batch, window_chunk)
            pools: list[Any] = [jnp.zeros((pages, heads, page_size, d), dtype) for d in dims]
            newest = None
        else:
            # No more than a sequence can have: then nothing of it is ever encoded.
            rows = _sinks(format, page_size, max_pages) + format.recent(page_size)
            rows = min(rows, max_pages * page_size)
            newest = Recent(*(jnp.zeros((batch, rows, heads, dim), dtype) for dim in dims))
            packings = zip((packed.keys, packed.values), dims, strict=True)
            pools = [empty_pages(p, num_pages, heads, page_size, d) for p, d in packings]
        k_pages.append(pools[0])
        v_pages.append(pools[1])
        recent.append(newest)
    return PagedKVCache(
        k_pages=tuple(k_pages),
        v_pages=tuple(v_pages),
        block_tables=jnp.full((batch, max_pages), num_pages, jnp.int32),
        lengths=jnp.zeros((batch,), jnp.int32),
        skipped=jnp.zeros((batch,), jnp.int32),
        page_refs=jnp.zeros((num_pages,), jnp.int32),
        recent=tuple(recent),
        index_pages=tuple(_index_pages(spec, layer, num_pages, page_size) for layer in spec.layers),
        states=tuple(_no_state(layer, batch) for layer in spec.layers),
        spec=spec,
        format=format,
    )


def _pages_of(
    layer: LayerSpec, num_pages: int, page_size: int, batch: int, window_chunk: int | None
) -> int:
    """Pages of one layer's pool: N, or those of all sequences' rings."""
    if layer.window is None or window_chunk is None:
        return num_pages
    return min(num_pages, batch * ring_pages(layer.window + window_chunk - 1, page_size))


def _no_state(layer: LayerSpec, batch: int) -> Float32[Array, "B H D Dv"] | None:
    if not layer.state_elements:
        return None
    return jnp.zeros((batch, layer.kv_heads, layer.head_dim, layer.value_dim), jnp.float32)


def _index_pages(
    spec: KVSpec, layer: LayerSpec, num_pages: int, page_size: int
) -> IndexPages | None:
    if not layer.index_dim or layer.shared is not None:
        return None
    float4 = spec.index_dtype == INDEX_FLOAT4
    rows = page_size // 2 if float4 else page_size
    dtype = jnp.dtype(jnp.uint8 if float4 else spec.index_dtype or spec.dtype)
    keys = jnp.zeros((num_pages, 1, rows, layer.index_dim), dtype)
    if spec.index_dtype is None:
        return IndexPages(keys, None)
    return IndexPages(keys, jnp.zeros((num_pages, 1, page_size), jnp.float32))


def ring_pages(tokens: int, page_size: int) -> int:
    """Most pages that so many consecutive tokens of a sequence can be in.

    Args:
      tokens: at least 1.
      page_size: tokens a page.

    >>> [ring_pages(tokens, 16) for tokens in (1, 2, 16, 17, 18, 512)]
    [1, 2, 2, 2, 3, 33]
    """
    return -(-(tokens - 1) // page_size) + 1


def check_packable(spec: KVSpec, window_chunk: int | None) -> None:
    """Refuse to pack pages of layers that are shared, that keep rings, or that have none.

    Args:
      spec: what a token stores in each layer.
      window_chunk: as `init` takes it.

    Raises:
      KvjaxError: there are such layers.
    """
    shared = [index for index, layer in enumerate(spec.layers) if not layer.elements_per_token]
    if shared or window_chunk is not None:
        kind = "shared" if shared and spec.layers[shared[0]].shared is not None else "a state"
        what = f"layer {shared[0]} is {kind}" if shared else f"window_chunk is {window_chunk}"
        raise KvjaxError(
            f"format is given and {what}: packed pages are of layers that store their own, all of "
            f"them; leave out format"
        )


def _sinks(format: Format, page_size: int, max_pages: int) -> int:
    """First tokens that are never encoded; a last page always has room among the newest."""
    return min(format.sink_tokens(page_size), (max_pages - 1) * page_size)


def as_int32(name: str, values: object) -> Int32[Array, "..."]:
    """A caller's integers as every array of the cache holds them, whatever JAX's default width.

    Args:
      name: the argument's, for the message.
      values: an array of JAX or NumPy, a list, or a number.

    Raises:
      KvjaxError: they are no integers.
    """
    array = jnp.asarray(values)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise KvjaxError(f"{name} is {array.dtype}: must be integers")
    return array.astype(jnp.int32)


def check_pools(
    spec: KVSpec,
    num_pages: int,
    page_size: int,
    *,
    batch: int = 1,
    window_chunk: int | None = None,
) -> None:
    """Refuse pools that cannot be made, before anything is traced.

    Args:
      spec: what a token stores in each layer.
      num_pages: N.
      page_size: P, tokens a page.
      batch: B, sequences.
      window_chunk: as `init` takes it.

    Raises:
      KvjaxError: a pool is too large to index, or the spec's dtype is one that pools do not hold.
    """
    if spec.dtype not in FLOATS:
        raise KvjaxError(
            f"the spec's dtype is {spec.dtype}: a PagedKVCache stores {', '.join(FLOATS)}; tokens "
            f"would be cut to anything else without a scale"
        )
    for index, layer in enumerate(spec.layers):
        if not layer.elements_per_token:
            continue
        if layer.index_dim and spec.index_dtype == INDEX_FLOAT4 and page_size % 2:
            raise KvjaxError(
                f"page_size is {page_size}: must be even, as two tokens share a byte of their "
                f"index keys in {INDEX_FLOAT4}"
            )
        heads, *dims = layer.pool_dims
        pages = _pages_of(layer, num_pages, page_size, batch, window_chunk)
        elements = pages * page_size * heads * max(*dims, layer.index_dim)
        if elements > MAX_INT32:
            most = MAX_INT32 * pages // elements
            raise KvjaxError(
                f"num_pages is {num_pages}: layer {index}'s pool would have {elements} elements, "
                f"more than int32 can index; use at most {most} pages"
            )


def pool_bytes(cache: PagedKVCache) -> dict[str, int]:
    """Bytes the pools really take, by dtype.

    Args:
      cache: concrete or abstract (`jax.eval_shape`).

    Returns:
      The bytes of pages, scales, newest tokens, index keys and states.
    """
    totals: dict[str, int] = {}
    stored = (cache.k_pages, cache.v_pages, cache.recent, cache.index_pages, cache.states)
    for pool in jax.tree.leaves(stored):
        name = jnp.dtype(pool.dtype).name
        totals[name] = totals.get(name, 0) + pool.size * pool.dtype.itemsize
    return totals
