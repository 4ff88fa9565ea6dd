"""What goes wrong at kvjax's boundary, by name.

Every error says which argument was wrong, what it was, what is allowed and what to do. All of
them are `ValueError`s, so callers that catch `ValueError` need not know this module.
"""

import contextlib
import functools
import math
import numbers
from collections.abc import Iterator
from typing import Any


class KvjaxError(ValueError):
    """A bad argument, model or state, found before anything was traced or after a program ended."""


class ModelNotFoundError(KvjaxError):
    """A model is not in the local cache; the message names the command that fetches it."""


class PullError(KvjaxError):
    """A model could not be fetched; nothing was left half-written."""


class PoolExhaustedError(KvjaxError):
    """The page pool ran out. `needed` and `free` count pages."""

    def __init__(self, message: str, *, needed: int, free: int):
        super().__init__(message)
        self.needed = needed
        self.free = free

    def __reduce__(self) -> tuple[Any, ...]:
        """Keyword arguments are not among those that copies and pickles are made of."""
        return functools.partial(type(self), needed=self.needed, free=self.free), self.args


def is_integer(value: Any, least: float = -math.inf) -> bool:
    """Whether this is an integer of any type, NumPy's too, of at least `least`; `True` is none."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return whole and int(value) >= least


def check_integer(name: str, value: Any, least: int, hint: str = "") -> int:
    """The Python integer that a caller's is.

    Args:
      name: the argument's, for the message.
      value: what a caller gave.
      least: the smallest that is allowed.
      hint: how the message goes on.

    Raises:
      KvjaxError: it is no integer, or smaller.
    """
    if not is_integer(value, least):
        raise KvjaxError(f"{name} is {value!r}: must be an integer of at least {least}{hint}")
    return int(value)


@contextlib.contextmanager
def as_kvjax_error() -> Iterator[None]:
    """Raises the `ValueError`s of readers and tokenizers, which know no kvjax, as `KvjaxError`s."""
    try:
        yield
    except KvjaxError:
        raise
    except ValueError as error:
        raise KvjaxError(str(error)) from error
