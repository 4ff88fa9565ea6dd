"""Objects that compiled programs name by an integer, as a process names files.

A program cannot hold a Python object; it holds a handle, and its callbacks find the object under
it.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

_held: dict[int, Any] = {}
_handles = itertools.count(1)
_lock = threading.Lock()


@contextlib.contextmanager
def opened(thing: object) -> Iterator[int]:
    """A handle under which callbacks find an object, valid inside the `with`."""
    with _lock:
        handle = next(_handles) % (1 << 31)
        _held[handle] = thing
    try:
        yield handle
    finally:
        with _lock:
            del _held[handle]


def held(handle: int) -> Any:
    """The object that `opened` gave this handle.

    Raises:
      KeyError: the handle is not open.
    """
    return _held[int(handle)]
