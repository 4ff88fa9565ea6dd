"""Which tests a shorter run leaves out."""

import pathlib
from collections.abc import Sequence
from typing import Any


def first_cases(items: Sequence[Any], whole: pathlib.Path) -> tuple[list[Any], list[Any]]:
    """The first case of every parametrised test, and the cases left out.

    Args:
      items: pytest's, in order.
      whole: a folder whose tests keep all their cases.
    """
    wanted: list[Any] = []
    others: list[Any] = []
    seen: set[str] = set()
    for item in items:
        function = item.nodeid.split("[")[0]
        repeated = function in seen and whole not in item.path.parents
        (others if repeated else wanted).append(item)
        seen.add(function)
    return wanted, others
