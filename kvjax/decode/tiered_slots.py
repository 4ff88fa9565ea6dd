"""How many pages of each layer and KV head have room on the device, in one call."""

import os

from kvjax.cache import check_pools
from kvjax.config import CacheConfig
from kvjax.decode.identity import fingerprint
from kvjax.decode.tiered_layers import ring_bytes, selecting, slot_bytes
from kvjax.decode.tiered_state import sink_pages
from kvjax.errors import KvjaxError
from kvjax.model import Model
from kvjax.policies import Window, WindowPlan
from kvjax.spec import KVSpec

Slots = tuple[tuple[int, ...], ...]


def slots_by_head(
    model: Model, spec: KVSpec, cache: CacheConfig, *, count: int, pages: int, batch: int
) -> Slots:
    """Slots of a row for every layer that chooses pages and KV head, the open page's included.

    A head has those that the window says, at least K + 1, at most as many as a row has pages.

    Args:
      model: what runs.
      spec: what the cache stores; layers that choose pages have as many KV heads.
      cache: the caller's.
      count: K, the most pages that a row chooses in a step.
      pages: N, most pages of a row.
      batch: B, rows.

    Raises:
      KvjaxError: the plan is another model's or another page size's or cannot be read,
        `device_bytes` have no room for them or for a step, or a pool would be larger than programs
        can index.
    """
    chosen_from = selecting(spec)
    layers, (heads, _, _) = len(chosen_from.layers), chosen_from.layers[0].pool_dims
    place, window = cache.place, cache.window or Window()
    given = None if place is None else place.device_bytes
    size = cache.page_size
    a_slot = batch * chosen_from.bytes_per_page(size)  # of every layer's heads
    kept = 0 if cache.page_format is None else sink_pages(cache.page_format, size, pages)
    # Of the first pages, of sliding windows and of an indexer's keys, which have no slots.
    others = a_slot * kept + batch * ring_bytes(spec, size, pages)
    others += batch * pages * size * sum(map(spec.index_bytes_per_token, spec.layers))
    if place is not None and window.plan is not None:
        plan = _loaded(window.plan, model, size, (layers, heads))
        slots = tuple(tuple(min(max(n, count) + 1, pages) for n in row) for row in plan.slots)
        by_layer = zip(slot_bytes(spec, size), slots, strict=True)
        need = batch * sum(one * sum(row) for one, row in by_layer) + others
        if given is not None and given < need:
            raise KvjaxError(
                f"device_bytes is {given}: the slots of the window plan need {need} bytes for "
                f"{_rows(batch)}; raise it to that, or plan windows for less"
            )
    else:
        equal = pages if place is None else min(window.slots(count) + 1, pages)
        if given is not None:
            equal = min(equal, _affordable(given, others, a_slot, count, pages, batch))
        slots = ((equal,) * heads,) * layers
    widest = max(-(-sum(row) // heads) for row in slots)
    check_pools(chosen_from, batch * widest, size)
    return slots


def _loaded(
    plan: WindowPlan | str | os.PathLike[str],
    model: Model,
    page_size: int,
    shape: tuple[int, int],
) -> WindowPlan:
    """The plan, which is this model's."""
    if isinstance(plan, WindowPlan):
        plan.check("the window's plan", model=fingerprint(model), page_size=page_size)
    else:
        plan = WindowPlan.load(plan, model=fingerprint(model), page_size=page_size)
    if plan.array.shape != shape:
        raise KvjaxError(
            f"the window's plan is of {plan.array.shape} layers and KV heads, and {model.name} has "
            f"{shape} that choose pages: profile this model and solve the plan again"
        )
    return plan


def _affordable(
    device_bytes: int, others: int, a_slot: int, count: int, pages: int, batch: int
) -> int:
    """Slots that device memory has room for, beside other bytes.

    Raises:
      KvjaxError: they are fewer than a step reads.
    """
    slots, least = max(device_bytes - others, 0) // a_slot, min(count + 1, pages)
    if slots < least:
        raise KvjaxError(
            f"device_bytes is {device_bytes}: the {count} pages of a step, the page that is being "
            f"filled and those that never leave need {least * a_slot + others} bytes for "
            f"{_rows(batch)}; raise it to that, or lower the budget"
        )
    return slots


def _rows(batch: int) -> str:
    return "one row" if batch == 1 else f"{batch} rows, a power of two"
