"""Shapes of tiered programs: how many pages a step reads, and how many stay near."""

import dataclasses
from collections.abc import Sequence

from kvjax.config import CacheConfig
from kvjax.decode.calls import cache_spec
from kvjax.decode.identity import fingerprint
from kvjax.decode.prefix_config import check_codec
from kvjax.decode.shapes import check_attention, half_step, power_of_two, too_long
from kvjax.decode.tiered_index import index_for
from kvjax.decode.tiered_layers import check_layers, selecting, selecting_layers
from kvjax.decode.tiered_slots import slots_by_head
from kvjax.decode.tiered_state import TieredShapes
from kvjax.errors import KvjaxError
from kvjax.formats import Format
from kvjax.model import Model
from kvjax.policies import Choice, DistilledIndexer, Select, Window
from kvjax.policies.budget import Budget
from kvjax.spec import KVSpec, pages_for


def tiered_plan(
    model: Model, lengths: Sequence[int], new_tokens: int, cache: CacheConfig
) -> tuple[TieredShapes, list[int]]:
    """Shapes, and the pages that each row chooses in a step.

    Args:
      model: what runs.
      lengths: tokens of each prompt, all at least 1.
      new_tokens: most tokens to draw for each.
      cache: with `select`.

    Raises:
      KvjaxError: as `TieredCall` says.
    """
    select, place = cache.select, cache.place
    assert select is not None
    _check_context(model, lengths, new_tokens)
    stored = place is not None and place.store is not None
    size, spec = cache.page_size, cache_spec(model, cache, over_tiers=True)
    check_layers(model, stored=stored)
    if isinstance(select.by, DistilledIndexer):
        select.by.check(model=fingerprint(model), name=model.name)
    if place is not None:
        check_codec(place.codec, cache_spec(model, cache).dtype)
    check_attention(spec, cache)
    page_format = cache.page_format
    if page_format is not None:
        page_format.check(spec, size)
        # Layers with a sliding window send nothing away, so that they pack nothing.
        page_format = dataclasses.replace(page_format, skip_windows=True)
        _check_format(page_format, spec)
    choice = select.choice()
    least = choice.first + choice.last
    tokens = half_step(pages_for(max(lengths), size)) * size
    longest = max(pages_for(n + max(new_tokens - 1, 0), size) for n in lengths)
    pages = max(half_step(longest), tokens // size, least)
    page_bytes = selecting(spec).bytes_per_page(size)
    counts = _counts(select, choice, lengths, new_tokens, page_bytes, size)
    index = index_for(select, model.config)
    if index is None:  # as many pages as there may be tokens, if each is in another one
        tops = [layer.indexer.top_k for layer in model.config.layers if layer.indexer is not None]
        counts = [min(count, max(tops)) for count in counts]
    # Programs have room for more than is chosen, so that few serve all budgets; slots do not.
    room = min(max(half_step(max(counts)), least), pages)
    batch = power_of_two(len(lengths))
    window = cache.window or Window()
    slots = slots_by_head(model, spec, cache, count=max(counts), pages=pages, batch=batch)
    return (
        TieredShapes(
            spec=spec,
            batch=batch,
            tokens=tokens,
            pages=pages,
            page_size=size,
            room=room,
            slots=slots,
            output=4 ** (-(-(max(new_tokens, 16) - 1).bit_length() // 2)),
            fetches=place is not None,
            stored=stored,
            keeps=window.times > 0,
            evict=window.evict,
            observe=1 if place is None else place.observe,
            micro_batches=1 if place is None else min(place.micro_batches, batch),
            index=index.form if isinstance(index, DistilledIndexer) else index,
            choice=choice,
            attention=cache.attention,
            format=page_format,
            hot_exact=place is not None and place.hot_exact,
        ),
        counts,
    )


def _check_context(model: Model, lengths: Sequence[int], new_tokens: int) -> None:
    context = model.config.max_context
    for row, length in enumerate(lengths):
        if length + new_tokens > context:
            raise KvjaxError(too_long(row, length, new_tokens, context))


def _check_format(page_format: Format, spec: KVSpec) -> None:
    """Refuse what a format says and pages over tiers have not.

    Raises:
      KvjaxError: it says such a thing.
    """
    if any(page_format.layer(spec, layer) is None for layer in selecting_layers(spec)):
        raise KvjaxError(
            f"format.skip_layers is {page_format.skip_layers} and select is given: all layers' "
            f"pages leave in the same bytes; skip none, or leave out select"
        )
    if page_format.residual or page_format.products != "float32":
        name = "residual" if page_format.residual else "products"
        raise KvjaxError(
            f"format.{name} is {getattr(page_format, name)!r} and select is given: there the page "
            f"that is being filled is exact, the others are read in float32; take the format with "
            f"residual=0 and products='float32'"
        )


def _counts(
    select: Select,
    choice: Choice,
    lengths: Sequence[int],
    new_tokens: int,
    page_bytes: int,
    page_size: int,
) -> list[int]:
    """Pages that each row chooses in a step."""
    least = choice.first + choice.last
    totals = [max(pages_for(n + new_tokens, page_size), least) for n in lengths]
    assert select.budget is not None  # `Select` says which
    budget = Budget(select.budget)
    return [
        budget.pages(total, page_size=page_size, page_bytes=page_bytes, least=least)
        for total in totals
    ]
