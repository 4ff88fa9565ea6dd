"""Pages of generated tokens in a page store, for prompts that go on where the answer ended."""

from kvjax.decode.open_prefixes import PREFILL_S
from kvjax.decode.prefilled_pages import kept_elsewhere
from kvjax.decode.prefixes import PrefixCache
from kvjax.model import Model
from kvjax.storage.errors import SegmentError
from kvjax.storage.page_store import Match
from kvjax.storage.sequence_pages import SequencePages


class KeptAnswers:
    """Stores the pages of one call's sequences that are not stored yet, when it ends.

    What is stored is what prefill computes, to rounding. A step that reads some pages only computes
    something else, which would be found by calls that are to be exact, and is not kept.

    Args:
      prefixes: in the store.

    Attributes:
      pages: how many were stored.
      failure: why some were not; None while all were.
    """

    def __init__(self, prefixes: PrefixCache) -> None:
        self._prefixes = prefixes
        self.pages = 0
        self.failure: str | None = None

    def keep(
        self,
        model: Model,
        tokens: list[int],
        pages: SequencePages,
        row: int,
        match: Match | None,
        *,
        chosen: int,
        page_size: int,
    ) -> None:
        """Store a sequence's full pages that are not; a fault is noted, since the answer is there.

        Args:
          model: what ran.
          tokens: those whose keys and values exist.
          pages: holds them.
          row: which sequence.
          match: where its first pages are stored, open.
          chosen: the most pages that a step read.
          page_size: tokens a page.
        """
        total = len(tokens) // page_size
        stored = 0 if match is None else match.pages
        if total <= stored:
            return
        if chosen < total:
            self.failure = f"steps read {chosen} of {total} pages"
            return
        seconds = _prefill_seconds(match, len(tokens))
        prefilled = kept_elsewhere(model, *pages.in_memory(row, total), seconds)
        if not prefilled.finite:
            self.failure = f"keys or values of {model.name} are not finite"
            return
        try:
            self._prefixes.put(model, tokens, prefilled, after=match)
        except OSError as error:  # of the store, in all its kinds
            self.failure = str(error)
        else:
            self.pages += total - stored


def _prefill_seconds(match: Match | None, tokens: int) -> float:
    """What prefilling tokens would take, by what prefilling the first of them took."""
    if match is None or PREFILL_S not in match.segment.sketch_names:
        return 0.0
    try:
        took = float(match.segment.sketch(PREFILL_S))
    except SegmentError:
        return 0.0
    return took * tokens / match.segment.info.tokens
