"""What numbers stored pages are kept in, as their identity says it: a dtype, and the format if any.

Pages of a format come in two ways: prefilled in it, so that each read what was encoded before it,
or prefilled exactly and encoded when they left, as over tiers. One does not serve for the other.
"""

import hashlib

from kvjax.formats import NAMED, Format

_PREFILLED = "prefilled in format "


def kept_in(dtype: str, page_format: Format | None, *, prefilled_exactly: bool = False) -> str:
    """What a stored prefix is kept in and was computed with, as its identity says it.

    Args:
      dtype: of the cache.
      page_format: of the cache.
      prefilled_exactly: whether pages were encoded only after the whole prompt was prefilled.
    """
    if page_format is None:
        return dtype
    digest = hashlib.sha256(repr(page_format).encode()).hexdigest()
    return f"{dtype}, {'' if prefilled_exactly else _PREFILLED}{digest}"


def dtype_of(kept: str) -> str:
    """The dtype that `kept_in` was given.

    Args:
      kept: as `kept_in` says it.
    """
    return kept.partition(", ")[0]


def was_prefilled_exactly(kept: str) -> bool:
    """Whether pages are in a format that they were not prefilled in.

    Args:
      kept: as `kept_in` says it.
    """
    of_format = kept.partition(", ")[2]
    return bool(of_format) and not of_format.startswith(_PREFILLED)


def format_words(kept: str) -> str:
    """What to call the format that pages are kept in.

    Args:
      kept: as `kept_in` says it.
    """
    dtype, exactly = dtype_of(kept), was_prefilled_exactly(kept)
    if kept == dtype:
        return "no format"
    for name, known in NAMED.items():
        if kept_in(dtype, known, prefilled_exactly=exactly) == kept:
            return f"format {name!r}"
    return "a format that has no name"
