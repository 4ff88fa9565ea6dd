"""What each KV head would fetch with windows of several sizes, and a plan made of that.

KVDrive's two-dimensional window scaling (arXiv:2605.18071): layers and heads differ in how much a
larger window saves them.
"""

import dataclasses
import math
import numbers
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from kvjax.config import CacheConfig
from kvjax.decode import inputs
from kvjax.decode.calls import Progress, cache_spec, not_finite
from kvjax.decode.identity import fingerprint
from kvjax.decode.meter import Meter
from kvjax.decode.sampling import Sampling
from kvjax.decode.tiered import TieredCall, loop
from kvjax.decode.tiered_layers import check_layers, ring_bytes, selecting, slot_bytes
from kvjax.decode.tiered_plan import tiered_plan
from kvjax.errors import KvjaxError, check_integer
from kvjax.model import Model
from kvjax.policies import Place, TrafficProfile, Window, WindowPlan, greedy_windows

TIMES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Window sizes to measure, in multiples of the pages that a step reads."""


def profile_windows(
    model: Model,
    prompts: inputs.PromptLike | Sequence[inputs.PromptLike],
    cache: CacheConfig,
    *,
    new_tokens: int = 64,
    times: Sequence[float] = TIMES,
    progress: Progress | None = None,
) -> TrafficProfile:
    """Decode greedily once for every window size, and count what every layer's KV heads fetch.

    One set of programs, with slots for the largest window, serves all sizes; what is drawn does not
    depend on them. Stop tokens stop nothing. Pages are in host memory.

    Args:
      model: what to run.
      prompts: what is typical: a text, token ids, or a list of either.
      cache: with `select`. Of `window` only what makes room counts, of `place` only `observe`.
      new_tokens: tokens to draw after each prompt, at least 2.
      times: the window sizes, in multiples of the K pages of a step; each at least 1. Those that
        come to as many slots, all pages at most, are measured once.
      progress: called with "profile" and how much of it is done.

    Returns:
      Pages that each head fetched in a step, all prompts together; `windows` are slots without the
      open page's. Layers with a sliding window fetch nothing, and are not among its layers.

    Raises:
      KvjaxError: an argument is not usable, or the prompts do not fit the model's context.
    """
    if cache.select is None:
        raise KvjaxError("cache.select is None: windows are of use with select=kvjax.Select() only")
    new_tokens = check_integer("new_tokens", new_tokens, 2)
    ids = inputs.prompt_list(model, prompts)
    evict = "lookahead" if cache.window is None else cache.window.evict
    observe = Place.observe if cache.place is None else cache.place.observe

    def with_window(size: float) -> CacheConfig:
        window = Window(times=size, evict=evict)
        return dataclasses.replace(cache, window=window, place=Place(observe=observe))

    def slots(size: float) -> int:
        lengths = [len(row) for row in ids]
        return tiered_plan(model, lengths, new_tokens, with_window(size))[0].slots[0][0]

    sizes = _checked(times)
    most, measured = with_window(sizes[-1]), sorted({slots(size) for size in sizes})
    misses = []
    for done, limit in enumerate(measured):
        if progress is not None:
            progress("profile", done / len(measured))
        misses.append(_missed(model, ids, most, new_tokens, limit) / (new_tokens - 1))
    if progress is not None:
        progress("profile", 1.0)
    return TrafficProfile(np.stack(misses, axis=2), [limit - 1 for limit in measured])


def plan_windows(
    profile: TrafficProfile, model: Model, cache: CacheConfig, *, device_bytes: int
) -> WindowPlan:
    """Slots for every layer and KV head that fetch least within some memory.

    Args:
      profile: of this model.
      model: what was profiled.
      cache: for page size and dtype.
      device_bytes: most bytes of one row's slots, the open page's, a format's first pages and those
        of sliding windows included; so that a plan compares with equal windows, their
        `TierStats.device_bytes` for one prompt that is longer than sliding windows.

    Returns:
      The plan of `greedy_windows`; memory that would save nothing is left over.

    Raises:
      KvjaxError: the profile is of other layers or heads, or the memory does not cover the smallest
        window that was profiled everywhere.
    """
    check_layers(model)
    check_integer("device_bytes", device_bytes, 0, " bytes")
    whole = cache_spec(model, cache, over_tiers=True)
    spec = selecting(whole)
    shape = (len(spec.layers), spec.layers[0].pool_dims[0])
    if profile.misses.shape[:2] != shape:
        raise KvjaxError(
            f"profile is of {profile.misses.shape[:2]} layers and KV heads, and {model.name} has "
            f"{shape} that choose pages: profile this model"
        )
    heads = math.prod(shape)
    page_format, size = cache.page_format, cache.page_size
    cost = np.repeat(np.asarray(slot_bytes(whole, size))[:, None], shape[1], axis=1)
    every = int(cost.sum())  # a slot for every head
    sinks = 0 if page_format is None else page_format.sink_tokens(size) // size
    others = every * (1 + sinks) + ring_bytes(whole, size)  # open pages, and what never leaves
    room, least = device_bytes - others, every * int(profile.windows[0])
    if room < least:
        raise KvjaxError(
            f"device_bytes is {device_bytes}: must be at least "
            f"{least + others}, what the smallest window ({profile.windows[0]} "
            f"slots, the open page's and those of pages that never leave) takes for each of "
            f"{heads} heads; raise it, or profile a smaller window"
        )
    costly = TrafficProfile(profile.misses, profile.windows, cost)
    return WindowPlan.of(greedy_windows(costly, room), fingerprint(model), cache.page_size)


def _missed(
    model: Model, ids: list[list[int]], cache: CacheConfig, new_tokens: int, limit: int
) -> np.ndarray:
    """Pages that each layer's KV heads fetched with so many slots, [L, Hkv]."""
    call, meter = TieredCall(model, ids, new_tokens=new_tokens, cache=cache), Meter()
    rules = inputs.rules(model, Sampling(), None, [], new_tokens, len(ids), call.shapes.batch)
    limits = jnp.full(np.shape(call.shapes.slots), limit, jnp.int32)
    with call.prefilled(rules, meter, lambda phase, share: None, limits=limits) as state:
        state = loop(call, model, state, rules, meter).state
        call.check()
        for row in np.flatnonzero(~np.asarray(state.finite)):
            raise not_finite(f"prompt {row}", model, call.shapes)
        return np.asarray(state.cache.traffic.missed, np.float64)


def _checked(times: Sequence[float]) -> list[float]:
    """The sizes in increasing order."""
    for size in times:
        number = isinstance(size, numbers.Real) and not isinstance(size, bool)
        if not (number and 1 <= size < math.inf):
            raise KvjaxError(f"times holds {size!r}: each must be a number of at least 1")
    if not len(times):
        raise KvjaxError("times is empty: give window sizes, such as (1, 2, 3)")
    return sorted(times)
