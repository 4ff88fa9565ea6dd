"""The public function that chooses pages by score, and its contract."""

from importlib import import_module
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from kvjax.pallas_kernels.select_pages.selection import Selection
from kvjax.pallas_kernels.validate_lists import check_selection


def select_pages(
    scores: Float32[Array, "B Hkv M"],
    page_counts: Int32[Array, "B"],
    *,
    room: int,
    sink_pages: int = 1,
    recent_pages: int = 1,
    open_tail: Bool[Array, "B"] | None = None,
    budgets: Int32[Array, "B Hkv"] | None = None,
    implementation: Literal["reference", "xla"] | None = None,
) -> Selection:
    """Choose the pages of greatest score for every KV head.

    Always in are a sequence's first pages (attention sinks: StreamingLLM, arXiv:2309.17453, section
    3.2), its most recent ones, and the page that is still being filled, which has no score yet
    (Quest's newest page, arXiv:2406.10774, section 3.3). The rest goes by score; of pages with
    equal scores the earlier one is chosen. A NaN score counts as -inf, and -inf is still a page:
    it is chosen if there is room.

    There is no Mosaic or Triton kernel, because there is nothing to save: the scores are 4 bytes a
    page where `page_scores` has just read hundreds, and XLA's own top-k runs on them.

    Args:
        scores: float32 [B, Hkv, M], as `page_scores` gives them.
        page_counts: int32 [B], pages each sequence has, the open one too; those of an index from
            there on are never chosen, whatever their scores.
        room: K, static: the most pages that a head can choose. It may exceed M.
        sink_pages: how many of the first pages are always in.
        recent_pages: how many of the last pages are always in, the open one not counted.
        open_tail: bool [B], whether a sequence's last page is open, and so in beside the recent
            ones; None means that there is none, or that it counts as a recent page.
        budgets: int32 [B, Hkv], how many pages each head chooses, so that one program serves every
            budget up to K; taken as the pages that are always in, or as K, where it is out of
            range. None means K.
        implementation: None means "xla"; "reference" sorts everything.

    Returns:
        The `Selection`.

    Raises:
        ValueError: an argument breaks a rule above, or `room` is less than what is always in; the
            message names the argument. Raised before anything is traced.
    """
    check_selection(
        scores,
        page_counts,
        room=room,
        sink_pages=sink_pages,
        recent_pages=recent_pages,
        open_tail=open_tail,
        budgets=budgets,
        implementation=implementation,
    )
    backend = import_module(f"kvjax.pallas_kernels.select_pages.{implementation or 'xla'}")
    scores = jnp.asarray(scores)
    counts = jnp.clip(jnp.asarray(page_counts), 0, scores.shape[2])[:, None]
    recent = jnp.full_like(counts, recent_pages)
    if open_tail is not None:
        recent += jnp.asarray(open_tail)[:, None].astype(jnp.int32)
    least = sink_pages + recent
    most = jnp.full(scores.shape[:2], room, jnp.int32)
    if budgets is not None:
        most = jnp.clip(jnp.asarray(budgets), least, most)
    page = jnp.arange(scores.shape[2], dtype=jnp.int32)[None, None]
    counts, recent = counts[..., None], recent[..., None]
    # Above every score, also an infinite one, stands what is always in.
    greatest = jnp.finfo(jnp.float32).max
    ranked = jnp.where(jnp.isnan(scores), -jnp.inf, jnp.minimum(scores, greatest))
    ranked = jnp.where(ranked == 0.0, 0.0, ranked)  # XLA's top-k puts -0 below 0
    ranked = jnp.where((page < sink_pages) | (page >= counts - recent), jnp.inf, ranked)
    # Pages that do not exist come last in order, so of equal scores those that exist are chosen.
    ranked = jnp.where(page < counts, ranked, -jnp.inf)
    result: Selection = getattr(backend, f"select_pages_{implementation or 'xla'}")(
        ranked, jnp.minimum(most, counts[..., 0]), room
    )
    return result
