"""A prompt's full pages, taken out of the pool after plain prefill."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Shaped

from kvjax.config import CacheConfig
from kvjax.decode.calls import Progress, cache_spec
from kvjax.decode.meter import Meter
from kvjax.decode.opening import empty_state, prefill_program
from kvjax.decode.packed_prefix import packed_prefix
from kvjax.decode.shapes import plan
from kvjax.decode.stored_form import StoredForm
from kvjax.errors import KvjaxError
from kvjax.model import Model, check_own_keys


class PrefilledPages(NamedTuple):
    """A prompt's full pages after plain prefill: numbers, or the bytes that a format keeps."""

    keys: Shaped[np.ndarray, "L N Hkv P D"]
    values: Shaped[np.ndarray, "L N Hkv P D"]
    seconds: float  # that prefilling took, compilation excluded
    decoded: Float[np.ndarray, "L N Hkv P D"] | None = None  # what bytes of keys stand for
    exact: Mapping[str, np.ndarray] = MappingProxyType({})  # kept too, by name: see `packed_prefix`
    bytes_finite: bool = True  # whether all that bytes stand for is finite

    @property
    def chosen_by(self) -> Shaped[np.ndarray, "L N Hkv P D"]:
        """Keys as numbers, for what stands in for them when pages are chosen; bytes over tiers."""
        return self.keys if self.decoded is None else self.decoded

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
    if shapes.format is None:
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


def check_layers(model: Model) -> None:
    """Refuse a model that keeps latents, or whose layers differ in shape or make no keys.

    Raises:
      KvjaxError: they do.
    """
    check_own_keys(model, "prefixes are stored for", "leave out prefixes")
    if any(layer.latent is not None for layer in model.config.layers):
        raise KvjaxError(
            f"{model.name} keeps latents: prefixes are stored and chosen from as keys and values; "
            f"run it without prefixes"
        )
    if len({(x.num_kv_heads, x.head_dim) for x in model.config.layers}) > 1:
        raise KvjaxError(
            f"{model.name} has layers of different shapes: its prefixes cannot be stored and "
            f"chosen from; run it without prefixes"
        )
