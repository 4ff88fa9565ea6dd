"""How a prefix is stored whose pages are packed: bytes of every layer, and the tokens left exact.

A layer that the format leaves as it is has the bytes of its numbers, so that all layers' pages are
bytes, as many as the largest takes.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt8

from kvjax.cache.pages import set_page
from kvjax.decode.latent_rows import LatentRows
from kvjax.decode.page_bytes import array_bytes, bytes_array, packed_bytes, page_bytes, pages_of
from kvjax.formats import Format, PagePacking
from kvjax.pallas_kernels.packed_pages import KeyPool, PackedPages
from kvjax.spec import KVSpec


@dataclasses.dataclass(frozen=True)
class StoredForm:
    """What a format makes of a stored prefix. Hashable, static under jit.

    Attributes:
      format: of the cache that pages are for.
      spec: of that cache, whose layers have the same shape.
      page_size: P, tokens a page.
      split: whether keys and values are read apart; otherwise their bytes share what one brings.
    """

    format: Format
    spec: KVSpec
    page_size: int
    split: bool

    @property
    def page(self) -> jax.ShapeDtypeStruct:
        """[P, W] uint8: one KV head's page of keys, and of values, as it is stored."""
        return jax.ShapeDtypeStruct((self.page_size, _width(self)), jnp.uint8)

    @property
    def sinks(self) -> int:
        """S: first tokens of a prefix that stay exact in layers that are packed, whole pages."""
        return self.format.sink_tokens(self.page_size)

    @property
    def newest(self) -> int:
        """R: last tokens of a prefix that do: whoever goes on with it sees these as they were."""
        return self.format.recent(self.page_size)

    @property
    def always(self) -> tuple[int, int]:
        """First and last pages that are attended to whatever the budget."""
        return max(self.sinks // self.page_size, 1), max(self.newest // self.page_size, 1)

    @property
    def latents(self) -> LatentRows | None:
        """Rows of latents, where all layers keep them."""
        kept = all(layer.kind == "mla" for layer in self.spec.layers)
        return LatentRows(self.spec, self.page_size) if kept else None

    def packed(self, layer: int) -> bool:
        """Whether a layer's pages are packed."""
        return self.format.layer(self.spec, layer) is not None

    def exact_pages(self, layer: int) -> tuple[int, int]:
        """First and last pages of a layer that stand in `recent`, and need no reading."""
        if not self.packed(layer):
            return 0, 0
        return self.sinks // self.page_size, self.newest // self.page_size

    def exact_positions(self, tokens: int) -> Int32[Array, " E"]:
        """The S first and the R last tokens of a prefix, some twice if it has fewer.

        Args:
          tokens: of the prefix's pages.
        """
        first = jnp.arange(self.sinks, dtype=jnp.int32)
        last = tokens - self.newest + jnp.arange(self.newest, dtype=jnp.int32)
        return jnp.clip(jnp.concatenate([first, last]), 0, tokens - 1)

    def as_bytes(self, keys: KeyPool, values: KeyPool) -> UInt8[Array, "two n Hkv P W"]:
        """Pages of a layer as they are stored.

        Args:
          keys: n pages, packed if the layer's are.
          values: n pages, packed if the layer's are.
        """
        size, width = self.page.shape
        kept = [
            packed_bytes(pool) if isinstance(pool, PackedPages) else array_bytes(pool)
            for pool in (keys, values)
        ]
        if not self.split:
            kept = [jnp.concatenate(kept, axis=-1)]
        room = size * width * (1 if self.split else 2)
        rows = jnp.stack([jnp.pad(x, ((0, 0), (0, 0), (0, room - x.shape[-1]))) for x in kept])
        if self.split:
            return rows.reshape(2, *rows.shape[1:3], size, width)
        return rows[0].reshape(*rows.shape[1:3], 2, size, width).transpose(2, 0, 1, 3, 4)

    def from_bytes(self, layer: int, both: UInt8[Array, "kinds n Hkv P W"]) -> tuple[KeyPool, ...]:
        """Pages of keys and of values, packed if the layer's are.

        Args:
          layer: whose.
          both: as `as_bytes` gave them; where they are apart, keys may come without values.
        """
        kinds, count, heads, _, _ = both.shape
        assert self.split or kinds == 2  # one has some of the other's bytes
        flat = both.reshape(kinds, count, heads, -1)
        if not self.split:
            flat = flat.transpose(1, 2, 0, 3).reshape(1, count, heads, -1)
        found: list[KeyPool] = []
        begin = 0
        for kind, (packing, dim, size) in enumerate(_parts(self, layer)[:kinds]):
            raw = flat[kind, :, :, :size] if self.split else flat[0, :, :, begin : begin + size]
            begin += size
            if packing is None:
                found.append(bytes_array(raw, (self.page_size, dim), self.spec.dtype))
            else:
                found.append(pages_of(packing, raw, self.page_size, dim))
        return tuple(found)

    def keys(self, layer: int, raw: UInt8[Array, "n Hkv P W"]) -> Float[Array, "n Hkv P D"]:
        """What pages of keys stand for that were read without values.

        Args:
          layer: whose.
          raw: keys, as `as_bytes` gave them.
        """
        return self.numbers(self.from_bytes(layer, raw[None])[0])

    def numbers(self, pool: KeyPool) -> Float[Array, "n Hkv P D"]:
        """What pages stand for, in the cache's dtype."""
        pages = pool.values() if isinstance(pool, PackedPages) else pool
        return pages.astype(jnp.dtype(self.spec.dtype))

    def scored(
        self, keys: Float[Array, "*n Hkv P D"], values: Float[Array, "*n Hkv P Dv"]
    ) -> Float[Array, "*n Hkv P Dk"]:
        """All that queries score: keys; of latents these and position keys, as wide in all layers.

        Args:
          keys: as numbers.
          values: as numbers.
        """
        if self.latents is None:
            return keys
        return self.latents.padded(jnp.concatenate([values, keys], axis=-1))

    def padded(self, queries: Float[Array, "T Hq D"]) -> Float[Array, "T Hq D2"]:
        """Queries as wide as what they score.

        Args:
          queries: of a layer.
        """
        return queries if self.latents is None else self.latents.padded(queries)

    def put(
        self, layer: int, both: UInt8[Array, "two K Hkv P W"], pools: tuple[KeyPool, KeyPool]
    ) -> tuple[KeyPool, KeyPool]:
        """Write pages into a layer's pools of keys and values, from the first on.

        Args:
          layer: whose.
          both: pages, as `as_bytes` gave them.
          pools: of the layer.
        """
        start = jnp.int32(0)
        done: list[KeyPool] = []
        for pool, pages in zip(pools, self.from_bytes(layer, both), strict=True):
            if isinstance(pool, PackedPages):
                assert isinstance(pages, PackedPages)
                done.append(pool.map_stored(lambda x, y: set_page(x, y, start), pages))
            else:
                assert not isinstance(pages, PackedPages)
                done.append(lax.dynamic_update_slice(pool, pages, (0, 0, 0, 0)))
        return done[0], done[1]


@functools.lru_cache(maxsize=64)
def _width(form: StoredForm) -> int:
    """W: bytes of a page in P rows, so that the largest layer's fit."""
    sizes = [[size for _, _, size in _parts(form, layer)] for layer in range(len(form.spec.layers))]
    most = max(max(one) if form.split else -(-sum(one) // 2) for one in sizes)
    return -(-most // form.page_size)


@functools.lru_cache(maxsize=1024)
def _parts(form: StoredForm, layer: int) -> tuple[tuple[PagePacking | None, int, int], ...]:
    """Of a layer's keys and of its values: packing, elements a row, bytes of a head's page."""
    shape, chosen = form.spec.layers[layer], form.format.layer(form.spec, layer)
    size, (heads, *dims) = form.page_size, shape.pool_dims
    if chosen is None:
        return tuple((None, dim, size * dim * form.spec.bytes_per_element) for dim in dims)
    packings = zip((chosen.keys, chosen.values), dims, strict=True)
    return tuple((p, dim, page_bytes(p, heads, size, dim)) for p, dim in packings)
