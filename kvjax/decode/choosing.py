"""How a layer gets the part of a stored prefix that it attends to, inside a program."""

import dataclasses
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from kvjax.decode.fetch import Worth, collect, issue
from kvjax.decode.latent_rows import LatentRows
from kvjax.decode.near_memory import Near
from kvjax.decode.packed_prefix import ExactTokens
from kvjax.decode.read_missing import read_missing
from kvjax.decode.reordering import note
from kvjax.decode.stored_form import StoredForm
from kvjax.models import ModelConfig
from kvjax.policies import (
    Choice,
    ExactKeys,
    Sketch,
    chunk_pages,
    heavy_hitters,
    impress,
    select,
)
from kvjax.spec import pages_for


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StoredPrefix:
    """A prefix as a program sees it."""

    sketches: tuple[dict[str, Array], ...]  # one a layer, padded to N pages
    pages: Int32[Array, ""]  # pages that exist, at most N
    count: Int32[Array, ""]  # pages to choose, at most K
    handle: Int32[Array, ""]  # of the reads
    near: Near  # what needs no reading
    exact: tuple[ExactTokens | None, ...] = ()  # one a layer, if its pages are in a format


class Asked(NamedTuple):
    """What a layer asks with."""

    layer: int
    queries: Float[Array, "T Hq D"]
    valid: Bool[Array, " T"]  # which of them are not padding
    page: jax.ShapeDtypeStruct  # [P, D], one head's page as it is stored
    form: StoredForm | LatentRows | None = None  # of pages in a format, or of latents


class Chosen(NamedTuple):
    """What a layer chose."""

    ids: Int32[Array, "Hkv K"]  # pages; N or more is none
    mass: Float32[Array, "Hkv K"]  # attention each got from what decided, summed over queries


Both = Shaped[Array, "two K Hkv P D"]
"""Keys and values that a layer attends to besides the suffix, as they are stored."""


@runtime_checkable
class Selection(Protocol):
    """A way to choose from a prefix. Hashable, static under jit."""

    def get(
        self,
        config: ModelConfig,
        prefix: StoredPrefix,
        asked: Asked,
        before: Chosen,
    ) -> tuple[Both, Chosen]:
        """Choose a layer's pages and read them.

        Args:
          config: the model's.
          prefix: what is stored.
          asked: the layer and its queries.
          before: what the layer before chose.

        Returns:
          The pages, `prefix.count` of them and then zeros, and what was chosen.
        """
        ...


@dataclasses.dataclass(frozen=True)
class ByPages:
    """Pages by what stands in for the keys; every layer, KV head or period decides.

    Attributes:
      by: what stands in for the keys; None takes every page, in order. `ExactKeys` are read from
        the store by the layers that decide (ContiguousKV, arXiv:2601.13631).
      choice: who decides, and what is always in.
    """

    by: Sketch | None
    choice: Choice = dataclasses.field(default_factory=Choice)

    def get(
        self,
        config: ModelConfig,
        prefix: StoredPrefix,
        asked: Asked,
        before: Chosen,
    ) -> tuple[Both, Chosen]:
        """See `Selection.get`."""
        heads, room = before.ids.shape
        if self.by is None:
            column = jnp.arange(room, dtype=jnp.int32)
            ids = jnp.where(column < prefix.count, column, prefix.pages)
            chosen = Chosen(jnp.broadcast_to(ids, before.ids.shape), before.mass)
        elif self._decides(config, asked.layer):
            sketch = prefix.sketches[asked.layer]
            if isinstance(self.by, ExactKeys):
                sketch = _stored_keys(prefix, asked, heads, sketch["pages"].shape[0])
            mass = self.by.page_mass(
                sketch,
                asked.queries,
                asked.valid,
                prefix.pages,
                config.scale(asked.layer),
                soft_cap=config.attn_soft_cap,
            )
            ids = select(
                mass,
                prefix.pages,
                room=room,
                kv_heads=heads,
                count=prefix.count,
                choice=self.choice,
            )
            grouped = jnp.sum(mass.reshape(heads, -1, mass.shape[1]), axis=1)
            there = jnp.clip(ids, 0, mass.shape[1] - 1)
            chosen = Chosen(ids, jnp.take_along_axis(grouped, there, axis=1))
        else:
            chosen = before
        worth = Worth(chosen.mass, jnp.ones_like(chosen.mass))
        return _read(prefix, asked, chosen.ids, worth), chosen

    def _decides(self, config: ModelConfig, layer: int) -> bool:
        """Whether a layer chooses: if others before it choose for it, these all have windows."""
        before = range(self.choice.decider(layer), layer)
        return all(config.layers[other].window is not None for other in before)


@dataclasses.dataclass(frozen=True)
class ByTokens:
    """H2O's or IMPRESS's tokens, read in chunks and then packed: a baseline.

    Every layer decides by keys read from the store, for all its heads together. K pages hold the
    K x P chosen tokens; whole chunks are read for them.

    Attributes:
      probe_heads: KV heads whose keys are read first (IMPRESS, FAST'25: 3); all if they disagree.
        None reads all heads' keys at once (H2O).
      chunk: tokens of a chunk.
      alpha: of IMPRESS's threshold.
      count_uses: whether somebody counts what is chosen, to reorder it.
    """

    probe_heads: int | None = None
    chunk: int = 64
    alpha: float = 0.6
    count_uses: bool = False

    def get(
        self,
        config: ModelConfig,
        prefix: StoredPrefix,
        asked: Asked,
        before: Chosen,
    ) -> tuple[Both, Chosen]:
        """See `Selection.get`."""
        heads, room = before.ids.shape
        size = asked.page.shape[0]
        num_pages = prefix.sketches[asked.layer]["pages"].shape[0]
        count = room * size

        def choose(probes: int) -> tuple[Array, Array, Array, Array]:
            keys = _stored_keys(prefix, asked, heads, num_pages, probes)
            group = asked.queries.shape[1] // heads
            mass = ExactKeys().token_mass(
                {"keys": keys["keys"][:probes]},
                asked.queries[:, : probes * group],
                asked.valid,
                prefix.pages * size,
                config.scale(asked.layer),
                soft_cap=config.attn_soft_cap,
            )
            mass = jnp.sum(mass.reshape(probes, group, -1), axis=1)
            if probes < heads or self.probe_heads is not None:
                choice, similar = impress(
                    mass, prefix.pages * size, count=count, chunk=self.chunk, alpha=self.alpha
                )
            else:
                choice = heavy_hitters(mass, prefix.pages * size, count=count, chunk=self.chunk)
                similar = jnp.bool_(True)
            return choice.tokens, choice.chunks, jnp.mean(mass, axis=0), similar

        probes = heads if self.probe_heads is None else min(self.probe_heads, heads)
        tokens, chunks, mass, similar = choose(probes)
        if probes < heads:
            tokens, chunks, mass, _ = lax.cond(
                similar, lambda: (tokens, chunks, mass, similar), lambda: choose(heads)
            )
        pages = chunk_pages(chunks, chunk=self.chunk, page_size=size, num_pages=num_pages)
        ids = jnp.broadcast_to(
            jnp.where(pages < prefix.pages, pages, num_pages), (heads, pages.size)
        )
        column = jnp.searchsorted(pages, tokens // size).astype(jnp.int32)
        worth = Worth(
            *(
                jnp.broadcast_to(jnp.zeros((pages.size,)).at[column].add(x, mode="drop"), ids.shape)
                for x in (
                    mass.at[tokens].get(mode="fill", fill_value=0),
                    jnp.where(tokens < prefix.pages * size, 1 / size, 0),
                )
            )
        )
        both = _read(prefix, asked, ids, worth)
        # The chosen tokens, packed in order; what is no token is not attended to.
        rows = both.swapaxes(2, 3).reshape(2, -1, heads, asked.page.shape[1])
        packed = rows.at[:, column * size + tokens % size].get(mode="clip")
        packed = packed.reshape(2, room, size, heads, -1).swapaxes(2, 3)
        if self.count_uses:
            note(prefix.handle, asked.layer, tokens)
        return packed, before


def window_pages(window: int, page_size: int) -> int:
    """Pages of a prefix that its suffix sees through a window.

    Args:
      window: tokens that a query sees, itself included.
      page_size: tokens a page.
    """
    return pages_for(window - 1, page_size)


def read_window(
    config: ModelConfig, prefix: StoredPrefix, asked: Asked, window: int, room: int
) -> Both:
    """The last pages of a prefix, for a layer that sees no others.

    They lie where they lie if the last `prefix.count` pages are taken: a window is measured in the
    pool, and tokens are as far apart there as in the prompt. What comes before them is not read.

    Args:
      config: the model's.
      prefix: what is stored; its `count` must be no less than `window_pages`, or all pages.
      asked: the layer and its queries.
      window: the layer's.
      room: K.
    """
    layer, size = config.layers[asked.layer], asked.page.shape[0]
    seen = jnp.minimum(window_pages(window, size), prefix.pages)
    column = jnp.arange(room, dtype=jnp.int32)
    wanted = (column >= prefix.count - seen) & (column < prefix.count)
    ids = jnp.where(wanted, column + prefix.pages - prefix.count, prefix.pages)
    # Nobody measured what each of them got: as if it were the same.
    group = layer.num_heads // layer.num_kv_heads
    queries = jnp.sum(asked.valid, dtype=jnp.float32)
    mass = group * queries / jnp.maximum(seen, 1).astype(jnp.float32)
    shape = (layer.num_kv_heads, room)
    worth = Worth(jnp.broadcast_to(mass, shape), jnp.ones(shape))
    return _read(prefix, asked, jnp.broadcast_to(ids, shape), worth)


def _read(prefix: StoredPrefix, asked: Asked, ids: Int32[Array, "Hkv K"], worth: Worth) -> Both:
    if asked.form is not None:  # what stands exact in `recent` is not read from pages
        first, last = asked.form.exact_pages(asked.layer)
        column = jnp.arange(ids.shape[1], dtype=jnp.int32)
        is_exact = (column < first) | (column >= prefix.count - last)
        ids = jnp.where(is_exact, prefix.pages, ids)
    if prefix.near.rows:
        return read_missing(prefix.near, prefix.handle, asked.layer, ids, worth, asked.page)
    ticket = issue(prefix.handle, asked.layer, ids, worth)
    return collect(prefix.handle, ticket, asked.layer, ids, asked.page)


def _stored_keys(
    prefix: StoredPrefix, asked: Asked, heads: int, num_pages: int, wanted: int | None = None
) -> dict[str, Array]:
    """All keys of a layer's first heads from the store, as `ExactKeys` takes them."""
    head = jnp.arange(heads, dtype=jnp.int32)[:, None]
    page = jnp.arange(num_pages, dtype=jnp.int32)[None, :]
    ids = jnp.where(head < (heads if wanted is None else wanted), page, num_pages)
    ticket = issue(prefix.handle, asked.layer, ids, None)
    (keys,) = collect(prefix.handle, ticket, asked.layer, ids, asked.page, to_choose=True)
    if asked.form is not None:
        assert isinstance(asked.form, StoredForm)  # keys of latents are not read alone
        keys = asked.form.keys(asked.layer, keys)
    return {"keys": keys.swapaxes(0, 1)}
