"""What the entry points have in common."""

from collections.abc import Callable, Sequence

from kvjax.config import CacheConfig
from kvjax.decode.identity import fingerprint
from kvjax.decode.kept_numbers import kept_in
from kvjax.decode.results import FinishReason
from kvjax.decode.shapes import Shapes
from kvjax.decode.step import BROKEN, FULL, STOPPED
from kvjax.decode.tiered_state import TieredShapes
from kvjax.errors import KvjaxError
from kvjax.model import Model, kv_spec
from kvjax.spec import KVSpec

Progress = Callable[[str, float], None]
"""progress(phase, share): phases are "compile", "prefill" and "decode"; share is 0 to 1."""

REASONS: dict[int, FinishReason] = {STOPPED: "stop", FULL: "length", BROKEN: "error"}
"""The word for a row's `finished` code, once it does not run."""


def cache_spec(model: Model, cache: CacheConfig, *, over_tiers: bool = False) -> KVSpec:
    """What the cache of a call stores: the model's layers in the configured dtype.

    Args:
      model: what runs.
      cache: the caller's.
      over_tiers: whether pages are selected.

    Raises:
      KvjaxError: `select` or a format is given and layers share pages, the format was calibrated
        for another model, or what an indexer chooses by is asked of a model that has none, or of
        pages that are selected.
    """
    for name in ("select", "format") if model.config.cross_from is not None else ():
        if getattr(cache, name) is not None or (over_tiers and name == "select"):
            raise KvjaxError(
                f"{name} is given and {model.name} has a cross-decoder, whose layers share the "
                f"pages of one: these are read whole, as the model made them; leave out {name}"
            )
    chooses = any(layer.indexer is not None for layer in model.config.layers)
    own = cache.select is not None and cache.select.by == "indexer"
    if chooses and (over_tiers or cache.select is not None) and not own:
        raise KvjaxError(
            f"select is given and {model.name} chooses tokens by an indexer of its own: take "
            f"Select(by='indexer'), or leave out select"
        )
    if own and not all(layer.indexer is not None for layer in model.config.layers):
        raise KvjaxError(
            f"by is 'indexer' and {model.name} has no indexer of its own in all layers: select by "
            f"something else, such as 'low-bit'"
        )
    if cache.index_dtype is not None and not chooses:
        raise KvjaxError(
            f"index_dtype is {cache.index_dtype!r} and {model.name} has no indexer: leave it out"
        )
    page_format = cache.page_format
    made_for = None if page_format is None else page_format.model
    if made_for is not None and made_for != fingerprint(model):
        raise KvjaxError(
            f"format was calibrated for model {made_for[:12]}, and {model.name} is "
            f"{fingerprint(model)[:12]}: calibrate this model, with `kvjax calibrate formats`"
        )
    return kv_spec(model.config, cache.dtype or model.dtype, index_dtype=cache.index_dtype)


def kept_as(model: Model, cache: CacheConfig) -> str:
    """What numbers a call over tiers keeps pages in: see `kept_in`."""
    kept = kept_in(cache_spec(model, cache).dtype, cache.page_format, prefilled_exactly=True)
    if cache.index_dtype is None:
        return kept
    # What was attended to depends on them, and so do the latents of later layers.
    return f"{kept}, chosen by index keys in {cache.index_dtype}"


def text_of(model: Model, tokens: Sequence[int], stops: Sequence[int]) -> str:
    """The text of drawn tokens, without a final stop token and control tokens."""
    if model.tokenizer is None:
        return ""
    shown = tokens[:-1] if tokens and tokens[-1] in set(stops) else tokens
    return model.tokenizer.decode(list(shown))


def not_finite(where: str, model: Model, shapes: Shapes | TieredShapes) -> KvjaxError:
    """What to raise where logits are NaN or infinite.

    Args:
      where: the prompt or the token.
      model: whose logits they are.
      shapes: the program's.
    """
    return KvjaxError(
        f"{where}: the logits of {model.name} are not finite; its weights are {model.dtype} and "
        f"its keys and values {shapes.spec.dtype}, which may not reach far enough: try "
        f"CacheConfig(dtype='float32'), and load the model with dtype='float32'"
    )
