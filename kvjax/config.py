"""How a cache is configured: one frozen value, the same for every entry point and command."""

import dataclasses

from kvjax.errors import KvjaxError
from kvjax.pallas_kernels import IMPLEMENTATIONS
from kvjax.pallas_kernels.support import Implementation
from kvjax.spec import DEFAULT_PAGE_SIZE, ITEM_BYTES

MIN_PAGE_SIZE, MAX_PAGE_SIZE = 8, 128
"""Page sizes, in tokens, that every attention implementation takes."""


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Where keys and values live while a model runs.

    Attributes:
      page_size: tokens a page, 8 to 128.
      num_pages: pages in the pool; None makes it as large as the call needs.
      dtype: of stored keys and values, "float32", "bfloat16" or "float16"; None takes that of the
        model's matrices.
      attention: which attention implementation to insist on; None lets kvjax choose.

    Raises:
      KvjaxError: a field is not what it must be.
    """

    page_size: int = DEFAULT_PAGE_SIZE
    num_pages: int | None = None
    dtype: str | None = None
    attention: Implementation | None = None

    def __post_init__(self) -> None:
        size = self.page_size
        if not _is_integer(size) or not MIN_PAGE_SIZE <= size <= MAX_PAGE_SIZE or size % 8:
            raise KvjaxError(
                f"page_size is {size!r}: must be a multiple of 8 tokens, {MIN_PAGE_SIZE} to "
                f"{MAX_PAGE_SIZE}; 16 is the default"
            )
        if self.num_pages is not None and (not _is_integer(self.num_pages) or self.num_pages < 1):
            raise KvjaxError(
                f"num_pages is {self.num_pages!r}: must be an integer of at least 1, or None to "
                f"make as many as the call needs"
            )
        stored = [name for name in ITEM_BYTES if name in ("float32", "bfloat16", "float16")]
        if self.dtype is not None and self.dtype not in stored:
            raise KvjaxError(
                f"dtype is {self.dtype!r}: must be one of {', '.join(stored)}, or None"
            )
        if self.attention is not None and self.attention not in IMPLEMENTATIONS:
            raise KvjaxError(
                f"attention is {self.attention!r}: must be one of {', '.join(IMPLEMENTATIONS)}, or "
                f"None to let kvjax choose"
            )


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
