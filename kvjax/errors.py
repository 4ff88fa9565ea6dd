"""What goes wrong at kvjax's boundary, by name.

Every error says which argument was wrong, what it was, what is allowed and what to do. All of
them are `ValueError`s, so callers that catch `ValueError` need not know this module.
"""


class KvjaxError(ValueError):
    """A bad argument, model or state, found before anything was traced or after a program ended."""


class ModelNotFoundError(KvjaxError):
    """A model is not in the local cache; the message names the command that fetches it."""


class PoolExhaustedError(KvjaxError):
    """The page pool ran out. `needed` and `free` count pages."""

    def __init__(self, message: str, *, needed: int, free: int):
        super().__init__(message)
        self.needed = needed
        self.free = free
