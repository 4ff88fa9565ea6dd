"""Short runs that choose the settings of decoding over tiers for one model on one machine.

KVDrive (arXiv:2605.18071) has three knobs: centroids of the index, the size of the window, and the
size of micro-batches. Each is tried on the last tokens of real prompts, which are decoded one by
one as if they were an answer.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jaxtyping import Array, Float32, Int32

from kvjax.cache.residency import Residency, admit, find, nothing_near, ranked, used
from kvjax.config import CacheConfig
from kvjax.decode import inputs
from kvjax.decode.calibration import Calibration, Trial, centroids_of, with_centroids
from kvjax.decode.calls import Progress, cache_spec
from kvjax.decode.identity import fingerprint
from kvjax.decode.program import compiled
from kvjax.decode.tiered_layers import check_layers, ring_bytes, selecting, slot_bytes
from kvjax.decode.tiered_plan import tiered_plan
from kvjax.decode.tiered_state import TieredShapes
from kvjax.decode.told import Told, kl_divergence, told
from kvjax.decode.window_profile import plan_windows, profile_windows
from kvjax.errors import KvjaxError, check_integer
from kvjax.model import Model
from kvjax.policies import Place, Window, WindowPlan
from kvjax.spec import pages_for

CENTROIDS = (1, 2, 4)
"""Of those that the index has, how many times as many entries a centroid is tried with."""

TIMES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Windows that are tried, in multiples of a step's pages."""

TOLERATED = 1.1
"""Fewer centroids are taken if the KL is at most this many times the least that was found."""

_EVALUATIONS = 20

NOTICED = 0.98
"""More micro-batches are taken if a step then takes at most this share of the time."""


def calibrate(
    model: Model,
    prompts: inputs.PromptLike | Sequence[inputs.PromptLike],
    cache: CacheConfig,
    *,
    new_tokens: int = 32,
    runs: int = 3,
    plan: bool = False,
    progress: Progress | None = None,
) -> Calibration:
    """Choose centroids, window and micro-batches by short runs; takes minutes.

    Centroids, where pages are chosen by an index that has them: the fewest whose distributions are
    as close to those with all pages as any (KL at most 1.1 times the least). Window: grown until
    looking up and evicting take as long as fetching what is missing, or until it does not fit
    `device_bytes` or holds the whole prompt. Micro-batches: powers of two up to the number of
    prompts; more of them only where a step takes at least 2 % less.

    Args:
      model: that will run.
      prompts: texts or token ids like those that will come, as many as a batch will have. Their
        last `new_tokens` tokens are decoded, the others prefilled, once for every setting.
      cache: with `select` and `place`, which the calibration will be used with.
      new_tokens: steps of a run, at least 2.
      runs: of each setting; times are medians.
      plan: whether slots are then shared out among layers and KV heads, as many as the window has
        in all; for prompts as long as these.
      progress: called with "calibrate" and how much of it is done.

    Returns:
      What to `apply` to `cache`.

    Raises:
      KvjaxError: `cache` has no `select` or `place`, a prompt is too short, memory has no room for
        the prompts' pages, or as `generate` says.
    """
    steps = check_integer("new_tokens", new_tokens, 2)
    check_integer("runs", runs, 1)
    if cache.select is None or cache.place is None:
        raise KvjaxError(
            "cache has no select or no place: what is calibrated is how selected pages are found "
            "and fetched; give CacheConfig(select=kvjax.Select(), place=kvjax.Place())"
        )
    check_layers(model, stored=cache.place.store is not None)
    ids = inputs.prompt_list(model, prompts)
    _check_prompts(ids, steps, cache.page_size)
    _check_memory(model, ids, cache)
    run = _Run([row[:-steps] for row in ids], [row[-steps:] for row in ids], runs, model)
    total = _most_trials(cache, len(ids))
    done, report = 0, progress or (lambda phase, share: None)
    trials: list[Trial] = []
    report("calibrate", 0.0)

    def tried(trial: Trial) -> Trial:
        nonlocal done
        done += 1
        report("calibrate", min(done / total, 1.0))
        trials.append(trial)
        return trial

    per_centroid = centroids_of(cache.select.index())
    if per_centroid is not None:
        per_centroid = _fewest([tried(trial) for trial in run.centroids(cache, per_centroid)])
        by = with_centroids(cache.select.index(), per_centroid)
        cache = dataclasses.replace(cache, select=dataclasses.replace(cache.select, by=by))
    times = [tried(trial) for trial in run.windows(cache)][-1].value
    cache = _with_window(cache, times=times)
    slots = run.planned(cache) if plan else None
    if slots is not None:
        cache = _with_window(cache, plan=slots)
    parts = _fastest([tried(trial) for trial in run.micro_batches(cache, len(ids))])
    report("calibrate", 1.0)
    return Calibration(
        model=fingerprint(model),
        page_size=cache.page_size,
        per_centroid=per_centroid,
        times=times,
        micro_batches=parts,
        slots=None if slots is None else slots.slots,
        trials=tuple(trials),
    )


@dataclasses.dataclass(frozen=True)
class _Run:
    """Prompts, what follows them, and how often each setting runs."""

    prompts: list[list[int]]
    given: list[list[int]]
    runs: int
    model: Model

    def with_settings(self, cache: CacheConfig, slots: int | None = None) -> Told:
        return told(self.model, self.prompts, self.given, cache, runs=self.runs, slots=slots)

    def shapes(self, cache: CacheConfig) -> TieredShapes:
        lengths = [len(row) for row in self.prompts]
        return tiered_plan(self.model, lengths, len(self.given[0]) + 1, cache)[0]

    def centroids(self, cache: CacheConfig, per_centroid: int) -> Iterator[Trial]:
        """Each number of entries that a centroid may stand for, with the KL that it leads to."""
        assert cache.select is not None
        exact = self.with_settings(
            CacheConfig(
                page_size=cache.page_size,
                dtype=cache.dtype,
                attention=cache.attention,
                select=dataclasses.replace(cache.select, budget="100%"),
            )
        )
        for factor in CENTROIDS:
            by = with_centroids(cache.select.index(), per_centroid * factor)
            select = dataclasses.replace(cache.select, by=by)
            found = self.with_settings(dataclasses.replace(cache, select=select))
            kl = kl_divergence(exact.logprobs, found.logprobs)
            yield _trial("centroids", per_centroid * factor, found, kl=kl)

    def windows(self, cache: CacheConfig) -> Iterator[Trial]:
        """Windows of growing size, until finding pages takes as long as fetching them."""
        largest, before = _with_window(cache, times=TIMES[-1]), 0
        for times in TIMES:
            slots = self.shapes(_with_window(cache, times=times)).slots[0][0]
            if slots == before:  # there are no more pages, or no more memory
                return
            before = slots
            found = self.with_settings(largest, slots)
            evaluated = evaluate_seconds(found.shapes, slots)
            yield _trial("window", times, found, evaluated=evaluated)
            if evaluated >= found.fetch_seconds:
                return

    def planned(self, cache: CacheConfig) -> WindowPlan:
        """As many slots as the window has, where they save most."""
        shapes, steps = self.shapes(cache), len(self.given[0])
        by_layer = zip(slot_bytes(shapes.spec, shapes.page_size), shapes.slots, strict=True)
        profile = profile_windows(self.model, self.prompts, cache, new_tokens=steps + 1)
        device_bytes = sum(one * sum(row) for one, row in by_layer)
        device_bytes += ring_bytes(shapes.spec, shapes.page_size)
        return plan_windows(profile, self.model, cache, device_bytes=device_bytes)

    def micro_batches(self, cache: CacheConfig, rows: int) -> Iterator[Trial]:
        """The batch in 1, 2, 4, ... parts."""
        for parts in _parts(rows):
            place = dataclasses.replace(cache.place or Place(), micro_batches=parts)
            found = self.with_settings(dataclasses.replace(cache, place=place))
            yield _trial("micro-batches", parts, found)


def _with_window(
    cache: CacheConfig, *, times: float = Window.times, plan: WindowPlan | None = None
) -> CacheConfig:
    window = dataclasses.replace(cache.window or Window(), times=times, plan=plan)
    return dataclasses.replace(cache, window=window)


def evaluate_seconds(shapes: TieredShapes, slots: int) -> float:
    """Seconds of a decode step in which pages are looked up and evicted, in all layers.

    Args:
      shapes: of the program whose steps are meant.
      slots: of every KV head, in its place.
    """
    heads, _, _ = shapes.spec.layers[shapes.selecting[0]].pool_dims
    near = nothing_near(shapes.batch, heads, pages=shapes.pages, slots=slots)
    rng = np.random.default_rng(0)
    mass = rng.random((shapes.batch, heads, shapes.pages), np.float32)
    order = np.argsort(mass, axis=2)[:, :, : shapes.room].astype(np.int32)
    given = (jnp.asarray(order), jnp.asarray(mass))
    program, _ = compiled(_evaluate, shapes, near, *given)
    began = time.perf_counter()
    for _ in range(_EVALUATIONS):
        near = program(near, *given)
    jax.block_until_ready(near)
    return (time.perf_counter() - began) / _EVALUATIONS * len(shapes.selecting)


def _evaluate(
    shapes: TieredShapes,
    near: Residency,
    pages: Int32[Array, "B Hkv K"],
    mass: Float32[Array, "B Hkv N"],
) -> Residency:
    """What a step does with a layer's residency; it takes as long however many pages are near."""
    slots = find(near, pages)
    missing = jnp.where(slots == near.page_in.shape[2], pages, shapes.pages)
    missing = jnp.take_along_axis(
        missing, jnp.argsort(missing == shapes.pages, axis=2, stable=True).astype(jnp.int32), axis=2
    )
    read = used(near, slots)
    near = ranked(near, shapes.evict, mass=mass, read=read, step=jnp.int32(1))
    rank = jnp.take_along_axis(mass, jnp.clip(missing, 0, shapes.pages - 1), axis=2)
    return admit(near, missing, rank, read)[0]


def _trial(
    setting: Literal["centroids", "window", "micro-batches"],
    value: float,
    found: Told,
    *,
    evaluated: float | None = None,
    kl: float | None = None,
) -> Trial:
    ratio = found.tiers.hit_ratio
    return Trial(setting, value, found.step_seconds, found.fetch_seconds, evaluated, ratio, kl)


def _fewest(trials: list[Trial]) -> int:
    """The most entries a centroid that are as good as any."""
    least = max(min(trial.kl or 0.0 for trial in trials), 0.0)  # rounding may be below 0
    return int(max(t.value for t in trials if (t.kl or 0.0) <= TOLERATED * least))


def _fastest(trials: list[Trial]) -> int:
    """The fewest parts that no others beat noticeably."""
    best = trials[0]
    for trial in trials[1:]:
        if trial.step_seconds <= NOTICED * best.step_seconds:
            best = trial
    return int(best.value)


def _parts(rows: int) -> list[int]:
    """Powers of two, up to a row a part."""
    return [1 << power for power in range(rows.bit_length()) if 1 << power <= rows]


def _most_trials(cache: CacheConfig, rows: int) -> int:
    assert cache.select is not None
    centroids = 0 if centroids_of(cache.select.index()) is None else len(CENTROIDS)
    return centroids + len(TIMES) + len(_parts(rows))


def _check_prompts(ids: list[list[int]], steps: int, page_size: int) -> None:
    """Refuse prompts of which too little is left to choose from.

    Raises:
      KvjaxError: one is too short.
    """
    for row, tokens in enumerate(ids):
        if len(tokens) - steps < 4 * page_size:
            raise KvjaxError(
                f"prompt {row} has {len(tokens)} tokens: the last {steps} are decoded, and "
                f"{4 * page_size} or more (four pages) must be left before them; give a longer "
                f"text, or fewer new_tokens"
            )


def _check_memory(model: Model, ids: list[list[int]], cache: CacheConfig) -> None:
    """Refuse prompts whose pages this machine has no memory for.

    Raises:
      KvjaxError: it has not.
    """
    tokens = sum(pages_for(len(row), cache.page_size) for row in ids) * cache.page_size
    spec = cache_spec(model, cache, over_tiers=True)
    stored = cache.place is not None and cache.place.store is not None
    needed = tokens * (spec if stored else selecting(spec)).bytes_per_token
    free = psutil.virtual_memory().available
    if needed > free:
        raise KvjaxError(
            f"the pages of {tokens} tokens of {len(ids)} prompts take {needed} bytes, and this "
            f"machine has {free} bytes of memory free: calibrate with fewer or shorter prompts, or "
            f"on a larger machine"
        )
