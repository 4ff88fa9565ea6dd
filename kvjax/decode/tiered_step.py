"""One decode step over tiers: select, fetch, compute, evict (KVDrive, arXiv:2605.18071)."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, Num

from kvjax.cache.residency import Residency, admit, find, only, ranked, used
from kvjax.decode.attend import attend_token, merged
from kvjax.decode.attend_chosen import Chosen, DecodeChoice
from kvjax.decode.latents_as_one_head import AsOneHead
from kvjax.decode.step import DecodeState, Rules, draw
from kvjax.decode.tiered_attention import Pages, attend_listed, attend_tokens
from kvjax.decode.tiered_choice import pages_of_choice, tables_of
from kvjax.decode.tiered_fetch import collect, issue, put_filled
from kvjax.decode.tiered_index import estimate_unread, extend_index, page_mass
from kvjax.decode.tiered_packed import as_bytes, as_kept, back, page_shape
from kvjax.decode.tiered_packed import sent as as_sent
from kvjax.decode.tiered_sinks import filled as filled_sinks
from kvjax.decode.tiered_sinks import instead
from kvjax.decode.tiered_sliding import attend_window, newest_pages, put_token
from kvjax.decode.tiered_state import (
    TieredCache,
    TieredShapes,
    counted,
    slot_rows,
    usable,
    with_layer,
)
from kvjax.models import Attend, Decoder, Indexed, ModelConfig
from kvjax.pallas_kernels.output import AttentionOutput
from kvjax.policies import EstimatingIndex, select


class _Step(NamedTuple):
    """What does not differ between layers."""

    shapes: TieredShapes
    config: ModelConfig
    active: Bool[Array, " B"]
    number: Int32[Array, ""]  # of the step


class _Selected(NamedTuple):
    """What a layer reads in this step."""

    mass: Float32[Array, "B Hkv N"]  # attention that every page gets
    pages: Int32[Array, "B Hkv K"]  # chosen; N is none
    slots: Int32[Array, "B Hkv K"]  # where they are; S where they are not near
    missing: Int32[Array, "B Hkv K"]  # pages to fetch, and then N
    open_page: Int32[Array, "B Hkv 1"]  # the page that the token goes to
    open_slot: Int32[Array, "B Hkv 1"]  # where that is; S if the token is its first


def tiered_step(
    decoder: Decoder, shapes: TieredShapes, state: DecodeState, rules: Rules
) -> DecodeState:
    """Put each running row's newest token into the cache and draw the next.

    Args:
      decoder: the model.
      shapes: the program's.
      state: after `draw`; its cache is a `TieredCache`.
      rules: how to draw and when to end.
    """
    cache: TieredCache = state.cache
    attend = tiered_attend(_Step(shapes, decoder.config, state.active, state.step), cache.lengths)
    hidden, cache = decoder(state.tokens, cache.lengths, attend, cache)
    lengths = cache.lengths + state.active.astype(jnp.int32)
    cache = dataclasses.replace(cache, lengths=lengths)
    return draw(decoder, dataclasses.replace(state, cache=cache, hidden=hidden), rules)


def tiered_attend(step: _Step, lengths: Int32[Array, " B"]) -> Attend[TieredCache]:
    """Attend with one new token a row.

    A layer chooses pages by its index, asks for those that are not near, attends to those that are
    and to the page that is being filled, waits for the others and attends to them, and merges both,
    the token itself and what an index estimates of the rest by their log-sum-exp. Then the pages
    that came take the slots of those that rank least, and the token is written: a pool that is read
    after it was written in the same step might be copied. A layer with a sliding window attends to
    what that reaches, which is all here. Where the model's own indexer chooses tokens (DSA), the
    pages are those that hold them, and of these the chosen tokens alone are attended to.

    Args:
      step: the rows and the program.
      lengths: int32 [B], tokens in pages.
    """
    shapes = step.shapes
    choice = DecodeChoice(
        step.config, jnp.where(step.active, lengths, 0), step.active, shapes.attention
    )

    def choose(
        layer: int, indexed: Indexed, cache: TieredCache
    ) -> tuple[Chosen | None, TieredCache]:
        assert cache.index_keys is not None
        chosen, index_keys = choice(layer, indexed, cache.index_keys)
        return chosen, dataclasses.replace(cache, index_keys=index_keys)

    def attend(
        layer: int, q: Array, k: Array, v: Array, cache: TieredCache, tokens: Chosen | None
    ) -> tuple[Array, TieredCache]:
        dtype = cache.keys[layer].dtype
        k, v = k.astype(dtype), v.astype(dtype)  # as every later step will read them
        if layer not in shapes.selecting:
            return _slid(step, layer, q, (k, v), cache)
        micro_batches = _micro_batches(shapes)
        selected, tickets = [], []
        for rows in micro_batches:
            some = _select(step, layer, q, cache, rows, tokens)
            selected.append(some)
            if shapes.fetches:
                ticket = _issued(step, layer, cache, some, rows)
                # Before pages are selected for others, and before anything is read.
                q, ticket = lax.optimization_barrier((q, ticket))
                tickets.append(ticket)
        chosen = jax.tree.map(lambda *x: jnp.concatenate(x) if x[1:] else x[0], *selected)
        near_by = _attend_near(step, layer, q, cache, chosen, tokens)
        # None is waited for before all are asked for, and before all that is near is attended to.
        after = (*tickets, near_by.lse)
        fetched = None
        own = attend_token(step.config, layer, q, shapes.scored(k, v), v)
        if tokens is not None:
            assert tokens.own is not None
            own = own._replace(lse=jnp.where(tokens.own[:, None], own.lse, -jnp.inf))
        parts = [near_by, own]
        index = shapes.index_of(layer, cache.learned)
        if isinstance(index, EstimatingIndex):
            parts.append(
                estimate_unread(
                    index,
                    step.config,
                    layer,
                    q,
                    cache.index[layer],
                    chosen.pages,
                    cache.lengths // shapes.page_size,
                    num_pages=shapes.pages,
                )
            )
        if shapes.fetches:
            collected = [
                _collected(step, layer, cache, some, ticket, rows, after)
                for some, ticket, rows in zip(selected, tickets, micro_batches, strict=True)
            ]
            keys, values = zip(*collected, strict=True)
            fetched = jnp.concatenate(keys), jnp.concatenate(values)
            parts.append(_attend_fetched(step, layer, q, fetched, chosen, tokens))
        out = merged(*parts)
        # A row whose attention is NaN writes nothing; its logits are NaN too, and end it.
        sound = step.active & ~jnp.isnan(out.lse).any(axis=1)
        near, taken = _admitted(step, layer, cache, chosen)
        taken = jnp.where(sound[:, None, None], taken, shapes.most_slots(layer))
        cache = _written(step, layer, cache, chosen, near, taken, fetched, (k, v), sound)
        traffic = counted(
            cache.traffic,
            shapes.place(layer),
            chosen.pages < shapes.pages,
            chosen.missing < shapes.pages,
            _tokens_read(shapes, chosen, tokens),
        )
        return out.out, dataclasses.replace(cache, traffic=traffic)

    return AsOneHead(attend, choose)


def _tokens_read(
    shapes: TieredShapes, chosen: _Selected, tokens: Chosen | None
) -> Int32[Array, ""]:
    """Tokens in a step's full pages that the model's own indexer chose; 0 where none does."""
    if tokens is None:
        return jnp.int32(0)
    pages, total = chosen.pages[:, 0], shapes.pages
    place = jnp.zeros_like(pages)
    tables = tables_of(pages, place, total=total, none=1)
    column = jnp.clip(tokens.token_ids // shapes.page_size, 0, total - 1)
    read = jnp.take_along_axis(tables, column, axis=1) == 0
    read &= tokens.token_ids < total * shapes.page_size
    return jnp.sum(read, dtype=jnp.int32)


def _slid(
    step: _Step,
    layer: int,
    q: Float[Array, "B Hq D"],
    token: tuple[Float[Array, "B Hkv D"], Float[Array, "B Hkv Dv"]],
    cache: TieredCache,
) -> tuple[Array, TieredCache]:
    """Attention of a layer with a sliding window, and the cache with the token in it."""
    shapes = step.shapes
    near = attend_window(shapes, step.config, layer, q, cache, step.active)
    out = merged(near, attend_token(step.config, layer, q, *token))
    sound = step.active & ~jnp.isnan(out.lse).any(axis=1)
    cache = put_token(shapes, cache, layer, token, sound)
    if shapes.fetches and layer in shapes.leaving:
        full, offset = jnp.divmod(cache.lengths, shapes.page_size)
        page = jnp.where(sound & (offset == shapes.page_size - 1), full, shapes.pages)
        cache = _kept_elsewhere(shapes, layer, cache, page, *newest_pages(shapes, cache, layer))
    return out.out, cache


def _micro_batches(shapes: TieredShapes) -> list[slice]:
    """Rows of the batch whose pages are selected, and then read, together."""
    size = shapes.batch // shapes.micro_batches
    return [slice(first, first + size) for first in range(0, shapes.batch, size)]


def _select(
    step: _Step,
    layer: int,
    q: Float[Array, "B Hq D"],
    cache: TieredCache,
    rows: slice,
    tokens: Chosen | None,
) -> _Selected:
    """Choose pages for some rows, and look up where they are."""
    shapes, config = step.shapes, step.config
    heads, total = len(shapes.slots_of(layer)), shapes.pages
    near, index, lengths, counts, active, q = jax.tree.map(
        lambda x: x[rows],
        (cache.near[layer], cache.index[layer], cache.lengths, cache.counts, step.active, q),
    )
    full = lengths // shapes.page_size

    of_layer = shapes.index_of(layer, cache.learned)
    if of_layer is None:
        sizes = {"room": shapes.room, "pages": total, "page_size": shapes.page_size}
        named = pages_of_choice(tokens, cache.lengths, **sizes)
        pages, mass = (x[rows, None] for x in named)
    else:

        def choose(
            index: dict[str, Array], q: Array, length: Array, full: Array, count: Array
        ) -> tuple[Array, Array]:
            mass = page_mass(of_layer, config, layer, q, index, length, full)
            pages = select(
                mass, full, room=shapes.room, kv_heads=heads, count=count, choice=shapes.choice
            )
            return jnp.sum(mass.reshape(heads, -1, total), axis=1), pages

        mass, pages = jax.vmap(choose)(index, q, lengths, full, counts)
    pages = jnp.where(active[:, None, None] & (pages < total), pages, total)
    slots, none = find(near, pages), shapes.most_slots(layer)
    missing = (pages < total) & (slots == none)
    order = jnp.argsort(~missing, axis=2, stable=True).astype(jnp.int32)
    open_page = jnp.broadcast_to(full[:, None, None], (len(full), heads, 1))
    begun = (lengths % shapes.page_size > 0)[:, None, None]
    return _Selected(
        mass=mass,
        pages=pages,
        slots=slots,
        missing=jnp.take_along_axis(jnp.where(missing, pages, total), order, axis=2),
        open_page=open_page,
        open_slot=jnp.where(begun, find(near, open_page), none),
    )


def _mass_of(chosen: _Selected, pages: Int32[Array, "B Hkv n"]) -> Float32[Array, "B Hkv n"]:
    """Attention that pages get; anything for what is none."""
    there = jnp.clip(pages, 0, chosen.mass.shape[2] - 1)
    return jnp.take_along_axis(chosen.mass, there, axis=2)


def _attend_near(
    step: _Step,
    layer: int,
    q: Float[Array, "B Hq D"],
    cache: TieredCache,
    chosen: _Selected,
    chosen_tokens: Chosen | None,
) -> AttentionOutput:
    """Attention to chosen pages in slots, and to the open page, or to the chosen tokens in them.

    The pools hold pages of single KV heads: a row's KV head is a sequence of its own to them.
    """
    size = step.shapes.page_size
    slots = jnp.concatenate([chosen.slots, chosen.open_slot], axis=2)
    if chosen_tokens is not None:
        pages = jnp.concatenate([chosen.pages, chosen.open_page], axis=2)[:, 0]
        pools = cache.keys[layer], cache.values[layer]
        places = slot_rows(step.shapes, layer, slots, _rows(len(slots)))[:, 0]
        return _attend_chosen(step, layer, q, pools, pages, places, chosen_tokens)
    offset = jnp.broadcast_to((cache.lengths % size)[:, None, None], chosen.open_slot.shape)
    tokens = jnp.concatenate([jnp.full_like(chosen.slots, size), offset], axis=2)
    batch, heads, count = slots.shape
    lists = (batch * heads, 1, count)
    by_head = attend_listed(
        step.shapes,
        step.config,
        layer,
        q.reshape(batch * heads, -1, q.shape[2]),
        (cache.keys[layer], cache.values[layer]),
        slot_rows(step.shapes, layer, slots, _rows(batch)).reshape(lists),
        tokens.reshape(lists),
    )
    return AttentionOutput(by_head.out.reshape(*q.shape[:2], -1), by_head.lse.reshape(q.shape[:2]))


def _rows(batch: int) -> Int32[Array, " B"]:
    return jnp.arange(batch, dtype=jnp.int32)


def _issued(
    step: _Step, layer: int, cache: TieredCache, chosen: _Selected, rows: slice
) -> Int32[Array, ""]:
    """Ask for the missing pages; there is nothing to ask for if all of them are in memory."""
    if not step.shapes.stored:
        return cache.written
    worth = _mass_of(chosen, chosen.missing)
    ticket: Array = lax.cond(
        jnp.any(chosen.missing < step.shapes.pages),
        lambda: issue(
            cache.handle,
            cache.written,
            step.shapes.leaving.index(layer),
            chosen.missing,
            worth,
            first_row=rows.start,
        ),
        lambda: cache.written,
    )
    return ticket


def _collected(
    step: _Step,
    layer: int,
    cache: TieredCache,
    chosen: _Selected,
    ticket: Int32[Array, ""],
    rows: slice,
    after: tuple[Array, ...],
) -> Pages:
    """The missing pages as a pool: page j of row b is b x K + j."""
    page = jax.ShapeDtypeStruct(*page_shape(step.shapes))
    wanted = chosen.missing < step.shapes.pages
    at = step.shapes.leaving.index(layer)
    both = collect(
        cache.handle,
        ticket,
        at,
        chosen.missing,
        wanted,
        page,
        first_row=rows.start,
        after=after,
    )
    keys, values = (pages.reshape(-1, *pages.shape[2:]) for pages in both)
    pages = back(step.shapes, layer, keys, values)
    return instead(cache.sinks[layer], rows, chosen.missing, pages)


def _attend_chosen(
    step: _Step,
    layer: int,
    q: Float[Array, "B Hq D"],
    pools: Pages,
    pages: Int32[Array, "B C"],
    places: Int32[Array, "B C"],
    tokens: Chosen,
) -> AttentionOutput:
    """Attention to the chosen tokens of some pages, of which these are the places in pools."""
    none = len(pools[0])
    tables = tables_of(pages, places, total=step.shapes.pages, none=none)
    named = tokens.token_ids, tables
    return tokens.sounded(attend_tokens(step.shapes, step.config, layer, q, pools, *named))


def _attend_fetched(
    step: _Step,
    layer: int,
    q: Float[Array, "B Hq D"],
    fetched: Pages,
    chosen: _Selected,
    chosen_tokens: Chosen | None,
) -> AttentionOutput:
    """Attention to the pages that were not near, or to the chosen tokens in them."""
    batch, _, room = chosen.missing.shape
    own = jnp.arange(batch * room, dtype=jnp.int32).reshape(batch, 1, room)
    rows = jnp.where(chosen.missing < step.shapes.pages, own, batch * room)
    if chosen_tokens is not None:
        some = chosen.missing[:, 0], rows[:, 0]
        return _attend_chosen(step, layer, q, fetched, *some, chosen_tokens)
    tokens = jnp.full_like(rows, step.shapes.page_size)
    return attend_listed(step.shapes, step.config, layer, q, fetched, rows, tokens)


def _admitted(
    step: _Step, layer: int, cache: TieredCache, chosen: _Selected
) -> tuple[Residency, Int32[Array, "B Hkv K1"]]:
    """Slots for the pages that come, and last for the open page if the token is its first."""
    shapes = step.shapes
    near = cache.near[layer]
    read = used(near, chosen.slots)
    near = ranked(near, shapes.evict, mass=chosen.mass, read=read, step=step.number)
    first = step.active & (cache.lengths % shapes.page_size == 0)
    fresh = jnp.where(first[:, None, None], chosen.open_page, shapes.pages)
    coming = jnp.concatenate([chosen.missing, fresh], axis=2)
    if shapes.evict == "lookahead":
        rank = _mass_of(chosen, coming)
    else:
        value = step.number.astype(jnp.float32) if shapes.evict == "lru" else jnp.float32(1)
        rank = jnp.broadcast_to(value, coming.shape)
    keep = read | used(near, chosen.open_slot) | ~usable(shapes, cache, layer)[None]
    return admit(near, coming, rank, keep)


def _written(
    step: _Step,
    layer: int,
    cache: TieredCache,
    chosen: _Selected,
    near: Residency,
    taken: Int32[Array, "B Hkv K1"],
    fetched: Pages | None,
    token: tuple[Float[Array, "B Hkv D"], Float[Array, "B Hkv Dv"]],
    sound: Bool[Array, " B"],
) -> TieredCache:
    """The cache with fetched pages in their slots and the token in the open page.

    What is written depends on `sound`, and so on all that was read: XLA may write an independent
    update first, into a copy. A page that the token fills joins the index, and is put where pages
    live.
    """
    shapes = step.shapes
    rows = _rows(len(sound))
    offset = cache.lengths % shapes.page_size
    none = shapes.most_slots(layer)
    slot = jnp.where(sound[:, None, None], find(near, chosen.open_page), none)
    at = slot_rows(shapes, layer, slot, rows)[..., 0]
    pools = []
    for kind, pool in enumerate((cache.keys[layer], cache.values[layer])):
        if fetched is not None:
            to = slot_rows(shapes, layer, taken[:, :, :-1], rows).swapaxes(1, 2)
            pages = fetched[kind].reshape(-1, *pool.shape[1:])
            pool = pool.at[to.reshape(-1)].set(pages, mode="drop")
        pools.append(pool.at[at, 0, offset[:, None]].set(token[kind], mode="drop"))
    filled = sound & (offset == shapes.page_size - 1)
    page = jnp.where(filled, chosen.open_page[:, 0, 0], shapes.pages)
    keys, values = (pool.at[at, 0].get(mode="clip") for pool in pools)
    scored = shapes.scored(keys, values)
    index, of_layer = cache.index[layer], shapes.index_of(layer, cache.learned)
    if of_layer is not None:
        index = lax.cond(
            jnp.any(filled),
            lambda: extend_index(of_layer, cache.index[layer], page, scored, values),
            lambda: cache.index[layer],
        )
    sinks = cache.sinks[layer]
    if shapes.format is not None:
        if shapes.sink_pages:
            sinks = filled_sinks(sinks, page, keys, values)
        sent, near_pages = lax.cond(
            jnp.any(filled),
            lambda: _packed(step, layer, keys, values, page, filled),
            lambda: jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype),
                jax.eval_shape(lambda: _packed(step, layer, keys, values, page, filled)),
            ),
        )
        to = jnp.where(filled[:, None], at, len(pools[0]))
        pools = [
            pool.at[to, 0].set(new, mode="drop")
            for pool, new in zip(pools, near_pages, strict=True)
        ]
    else:
        sent = as_sent(shapes, keys, values)
    if shapes.fetches:
        cache = _kept_elsewhere(shapes, layer, cache, page, *sent)
    if not shapes.keeps:
        near = only(near, used(near, find(near, chosen.open_page)))
    return with_layer(
        cache, layer, keys=pools[0], values=pools[1], sinks=sinks, near=near, index=index
    )


def _kept_elsewhere(
    shapes: TieredShapes,
    layer: int,
    cache: TieredCache,
    page: Int32[Array, " B"],
    keys: Num[Array, "B Hkv P D"],
    values: Num[Array, "B Hkv P Dv"],
) -> TieredCache:
    """Put the pages that rows have just filled, N for none, where pages live."""
    at = shapes.leaving.index(layer)
    written = lax.cond(
        jnp.any(page < shapes.pages),
        lambda: put_filled(cache.handle, cache.written, at, page, keys, values),
        lambda: cache.written,
    )
    return dataclasses.replace(cache, written=written)


def _packed(
    step: _Step,
    layer: int,
    keys: Float[Array, "B Hkv P D"],
    values: Float[Array, "B Hkv P Dv"],
    page: Int32[Array, " B"],
    filled: Bool[Array, " B"],
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Pages that rows have just filled: what is kept of them, and as steps read them then."""
    kept = as_bytes(step.shapes, layer, keys, values, page * step.shapes.page_size)
    return kept, as_kept(step.shapes, layer, keys, values, page, filled, kept)
