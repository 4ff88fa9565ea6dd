"""How much of a prefix may be read: as pages, tokens, a share or bytes."""

import dataclasses
import re

from kvjax.errors import KvjaxError
from kvjax.spec import pages_for

_UNITS = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(%|pages?|tokens?|[kmg]i?b|b)\s*", re.IGNORECASE)
_FORMS = "such as '5%', '64 pages', '1024 tokens' or '8MB'"


@dataclasses.dataclass(frozen=True)
class Budget:
    """Most of a stored prefix that a request attends to.

    >>> Budget("5%").pages(512, page_size=16, page_bytes=368640)
    26
    >>> Budget("100 tokens").pages(512, page_size=16, page_bytes=368640)
    7
    >>> Budget("8MB").pages(512, page_size=16, page_bytes=368640)
    21

    Attributes:
      text: an amount and its unit.

    Raises:
      KvjaxError: it is not such a text, or the amount is 0 or more than 100 %.
    """

    text: str

    def __post_init__(self) -> None:
        match = _AMOUNT.fullmatch(self.text) if isinstance(self.text, str) else None
        if match is None:
            raise KvjaxError(f"budget is {self.text!r}: must be an amount and a unit, {_FORMS}")
        amount = float(match[1])
        if amount == 0 or (match[2] == "%" and amount > 100):
            most = " and at most 100%" if match[2] == "%" else ""
            raise KvjaxError(f"budget is {self.text!r}: must be above 0{most}")

    def pages(self, total: int, *, page_size: int, page_bytes: int, least: int = 2) -> int:
        """Pages to choose of a prefix.

        Args:
          total: pages that the prefix has.
          page_size: tokens a page.
          page_bytes: bytes of a page in all layers.
          least: pages that are always in; a smaller budget is raised to it.
        """
        match = _AMOUNT.fullmatch(self.text)
        assert match is not None  # checked when it was made
        amount, unit = float(match[1]), match[2].lower()
        if unit == "%":
            count = -(-total * amount // 100)
        elif unit.startswith("page"):
            count = amount
        elif unit.startswith("token"):
            count = pages_for(int(amount), page_size)
        else:
            count = amount * _UNITS.get(unit, 1) // page_bytes
        return min(max(int(count), least), total)
