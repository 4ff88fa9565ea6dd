"""A prompt's full pages, taken out of the pool after plain prefill."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Shaped

from kvjax.config import CacheConfig
from kvjax.decode.calls import Progress, cache_spec
from kvjax.decode.latent_rows import LatentRows
from kvjax.decode.meter import Meter
from kvjax.decode.opening import empty_state, prefill_program
from kvjax.decode.packed_prefix import packed_prefix
from kvjax.decode.shapes import plan
from kvjax.decode.stored_form import StoredForm
from kvjax.errors import KvjaxError
from kvjax.model import Model, check_own_keys, keeps_latents


class PrefilledPages(NamedTuple):
    """A prompt's full pages after plain prefill: numbers, or the bytes that a format keeps."""

    keys: Shaped[np.ndarray, "L N Hkv P D"]
    values: Shaped[np.ndarray, "L N Hkv P D"]
    seconds: float  # that prefilling took, compilation excluded
    decoded: Float[np.ndarray, "L N Hkv P D"] | None = None  # what bytes of keys stand for
    exact: Mapping[str, np.ndarray] = MappingProxyType({})  # kept too, by name: see `packed_prefix`
    bytes_finite: bool = True  # whether all that bytes stand for is finite
    halves: bool = False  # whether they are both halves of rows of latents (`LatentRows`)

    @property
    def chosen_by(self) -> Iterator[Shaped[np.ndarray, "N Hkv P D"]]:
        """All that queries score, as numbers, for what stands in for it when pages are chosen.

        A layer at a time, to save memory; bytes over tiers.
        """
        if self.halves:
            both = zip(self.keys, self.values, strict=True)
            yield from (np.concatenate(layer, axis=-1) for layer in both)
        else:
            yield from self.keys if self.decoded is None else self.decoded

    @property
    def finite(self) -> bool:
        """Whether no key or value is NaN or infinite; asked a layer at a time, to save memory."""
        arrays = (self.keys, self.values, *self.exact.values())
        both = (layer for pages in arrays for layer in pages if pages.dtype != np.uint8)
        return self.bytes_finite and all(bool(np.isfinite(layer).all()) for layer in both)


def prefilled_pages(
    model: Model,
    ids: list[int],
    cache: CacheConfig,
    prefill_chunk: int,
    progress: Progress,
    *,
    split: bool = False,
) -> PrefilledPages:
    """Prefill a prompt and take its full pages out of the pool.

    Args:
      model: what to run.
      ids: the prompt.
      cache: page size, dtype and format.
      prefill_chunk: most tokens prefilled at once.
      progress: called with "prefill" and how much of it is done.
      split: whether keys and values will be read apart, if there is a format.

    Raises:
      KvjaxError: a key or a value is not finite, the prompt does not fit the model's context, or
        the format cannot pack the model's pages.
    """
    spec, count = cache_spec(model, cache), len(ids) // cache.page_size
    if cache.page_format is not None:
        ids = ids[: count * cache.page_size]  # so that the newest tokens are those of the pages
    shapes = plan(
        model.config, spec, [len(ids)], new_tokens=0, prefill_chunk=prefill_chunk, cache=cache
    )
    meter = Meter()
    limits = jnp.ones((shapes.batch,), jnp.int32)
    state = empty_state(model, shapes, limits, meter)
    stored = prefill_program(model, ids, shapes, state, meter)(state, progress).cache
    seconds = meter.seconds
    if shapes.format is None and keeps_latents(model.config):
        rows, pages_of = LatentRows(spec, cache.page_size), stored.block_tables[0, :count]
        layers = zip(stored.k_pages, stored.v_pages, strict=True)
        halves = [rows.halves(*(pool[pages_of] for pool in pools)) for pools in layers]
        keys, values = (np.stack(half) for half in zip(*halves, strict=True))
        pages = kept_elsewhere(model, keys, values, seconds)
    elif shapes.format is None:
        table = np.asarray(stored.block_tables)[0, :count]
        keys, values = (
            np.stack([np.asarray(pool)[table] for pool in pools])
            for pools in (stored.k_pages, stored.v_pages)
        )
        pages = PrefilledPages(keys, values, seconds)
    else:
        form = StoredForm(shapes.format, spec, cache.page_size, split)
        packed = packed_prefix(form, stored, count)
        pages = PrefilledPages(
            packed.keys, packed.values, seconds, packed.decoded, packed.exact, packed.finite
        )
    if not pages.finite:
        raise KvjaxError(
            f"keys or values of {model.name} are not finite in {spec.dtype} and cannot be stored: "
            f"try CacheConfig(dtype='float32'), and load the model with dtype='float32'"
        )
    return pages


def kept_elsewhere(
    model: Model,
    keys: Shaped[np.ndarray, "L N Hkv P D"],
    values: Shaped[np.ndarray, "L N Hkv P D"],
    seconds: float,
) -> PrefilledPages:
    """Pages as they left the device; those of latents are chosen by their whole rows.

    Args:
      model: what made them.
      keys: or the first half of every row of latents.
      values: or the second half.
      seconds: that prefilling took.
    """
    halves = keeps_latents(model.config) and keys.dtype != np.uint8
    return PrefilledPages(keys, values, seconds, halves=halves)


def check_layers(model: Model) -> None:
    """Refuse a model whose layers differ in shape, make no keys, or choose tokens by an indexer.

    Raises:
      KvjaxError: they do.
    """
    check_own_keys(model, "prefixes are stored for", "leave out prefixes")
    layers = model.config.layers
    if any(layer.indexer is not None for layer in layers):
        raise KvjaxError(
            f"{model.name} chooses tokens by an indexer, whose keys are not stored with pages: run "
            f"it without prefixes"
        )
    shapes = {(x.num_kv_heads, x.head_dim, x.latent is None) for x in layers}
    # Rows of latents have room for the largest layer's.
    if len(shapes) > 1 and not keeps_latents(model.config):
        raise KvjaxError(
            f"{model.name} has layers of different shapes: its prefixes cannot be stored and "
            f"chosen from; run it without prefixes"
        )
